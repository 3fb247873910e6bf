/* payload_sizes.c: counted on the CPU, learned from a device. */
#include "engine/payload/payload_sizes.h"

#include "torch/simulated.h"
#include "torch/tensor.h"

#include <string.h>

enum { MARGIN = 20, SLOW = 4 };      /* a twentieth more; a quarter of the way down in each step */

int gck_is_sized_late(const gck_payload *p)
{
    return p->codec->counted != NULL && !p->codec->counted->host_only
        && (p->device >= 0 || p->state->late_overflow != 0);
}

/* The room of payloads like p, moved to the front; the one that was not used for longest is taken for
 * new ones, which begin with room for all. */
static gck_room *room_of(const gck_payload *p)
{
    gck_room *rooms = p->state->rooms, found;
    int i = 0;

    while (i < GCK_NROOMS - 1 && rooms[i].codec != NULL
           && (rooms[i].codec != p->codec || rooms[i].dtype != p->dtype || rooms[i].numel != p->values)) {
        i++;
    }
    found = rooms[i];
    if (found.codec != p->codec || found.dtype != p->dtype || found.numel != p->values) {
        found = (gck_room){p->codec, p->dtype, p->values, p->state->restores, GCK_WHOLE + 1, 0};
    }
    memmove(&rooms[1], &rooms[0], (size_t)i * sizeof *rooms);
    rooms[0] = found;
    return &rooms[0];
}

/* A step ends with the restores of its backward.  The first one says all that is known. */
static void begin_step(gck_room *room, int64_t restores)
{
    if (room->restores != restores && room->latest != 0) {
        room->level = room->latest >= room->level || room->level > GCK_WHOLE
                    ? room->latest : room->level - (room->level - room->latest) / SLOW;
        room->latest = 0;
    }
    room->restores = restores;
}

/* Values for which a payload like p gets room. */
static int64_t values_for(const gck_payload *p)
{
    gck_room *room = room_of(p);

    begin_step(room, p->state->restores);
    const uint32_t part = room->level > room->latest ? room->level : room->latest;
    const int64_t wanted = (int64_t)part + part / MARGIN + 1;
    return wanted >= GCK_WHOLE ? p->values
         : p->values / GCK_WHOLE * wanted + p->values % GCK_WHOLE * wanted / GCK_WHOLE;
}

int gck_payload_room(gck_payload *p, const gck_tensor *x, int for_user)
{
    const gck_counted *counted = p->codec->counted;
    const int late = p->device >= 0 || p->state->late_overflow != 0;
    const int64_t most = p->nbytes, all = p->values;

    if (counted == NULL || all == 0 || !gck_has_values(x->data) || (late && (counted->host_only || for_user))) {
        return 1;
    }
    const gck_tensor values = p->once != NULL ? gck_payload_values(p, x->data, x->stream) : *x;
    const int64_t count = p->device < 0 ? gck_run_count(p->codec, &values) : 0;
    p->nbytes = count < 0 ? most : counted->nbytes(all, p->dtype, late ? values_for(p) : count);
    if (late && p->nbytes == most && counted->nbytes(all, p->dtype, 0) < most) {
        p->nbytes = most - 1;                    /* the form that says how many there are */
    }
    p->lengths.codes = p->nbytes;
    p->late = (uint32_t)((count * GCK_WHOLE + all - 1) / all) << GCK_OVERFLOW_BITS;
    return for_user || counted->host_only || p->nbytes < p->bytes_in;
}

void gck_payload_room_learn(const gck_payload *p, uint32_t part)
{
    if (gck_is_sized_late(p) && part != 0) {
        gck_room *room = room_of(p);
        room->latest = part > room->latest ? part : room->latest;
    }
}
