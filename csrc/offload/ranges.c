/* ranges.c: free ranges, and those that are given but in use. */
#include "offload/ranges.h"

#include <stdlib.h>
#include <string.h>

/* Room for all that may be given.  0 or -1. */
static int reserve(gck_ranges *ranges)
{
    const int64_t wanted = ranges->n + ranges->space.taken + 2;
    gck_range_given *given = ranges->given;

    if (wanted > ranges->room) {
        given = realloc(given, (size_t)(2 * wanted) * sizeof *given);
    }
    if (given == NULL) {
        return -1;
    }
    ranges->room = wanted <= ranges->room ? ranges->room : 2 * wanted;
    ranges->given = given;
    return 0;
}

static void forget(gck_ranges *ranges, int64_t i)
{
    ranges->n--;
    memmove(ranges->given + i, ranges->given + i + 1, (size_t)(ranges->n - i) * sizeof *ranges->given);
}

static void let_take(gck_ranges *ranges, gck_range_given *given)
{
    if (!given->in_space) {
        gck_space_give(&ranges->space, given->offset, given->nbytes);
        given->in_space = 1;
    }
}

/* Those whose last use is done are free: the first ones, since later ones are done later. */
void gck_ranges_poll(gck_ranges *ranges)
{
    while (ranges->n > 0 && gck_event_is_done(ranges->given[0].last)) {
        let_take(ranges, &ranges->given[0]);
        gck_event_give(ranges->given[0].last);
        forget(ranges, 0);
    }
}

/* The stream, or the host itself, comes after all earlier uses of a part.  0 or a status. */
static int wait_for(const gck_ranges *ranges, int64_t offset, int64_t nbytes, void *const *stream)
{
    int status = GCK_OK;

    for (int64_t i = 0; i < ranges->n && status == GCK_OK; i++) {
        const gck_range_given *given = &ranges->given[i];
        if (given->in_space && given->offset < offset + nbytes && offset < given->offset + given->nbytes) {
            status = GCK_EDGE(ranges->edge, stream != NULL ? gck_event_wait(given->last, *stream)
                                                           : gck_event_finish(given->last), GCK_OK);
        }
    }
    return status;
}

int64_t gck_ranges_take(gck_ranges *ranges, int64_t nbytes, void *const *stream, int *status)
{
    int64_t offset;

    *status = GCK_OK;
    gck_ranges_poll(ranges);
    if (reserve(ranges) < 0) {
        return -1;
    }
    offset = gck_space_take(&ranges->space, nbytes);
    for (int64_t i = 0; offset < 0 && stream != NULL && i < ranges->n; i++) {
        let_take(ranges, &ranges->given[i]);
        offset = gck_space_take(&ranges->space, nbytes);
    }
    if (offset >= 0 && (*status = wait_for(ranges, offset, nbytes, stream)) != GCK_OK) {
        gck_space_give(&ranges->space, offset, nbytes);
        return -2;
    }
    return offset;
}

/* Forget earlier uses that the last one of this part came after: who took it waited for them. */
static void supersede(gck_ranges *ranges, int64_t offset, int64_t nbytes)
{
    for (int64_t i = ranges->n; i-- > 0;) {
        const gck_range_given *given = &ranges->given[i];
        if (given->in_space && offset <= given->offset && given->offset + given->nbytes <= offset + nbytes) {
            gck_event_give(given->last);
            forget(ranges, i);
        }
    }
}

void gck_ranges_give(gck_ranges *ranges, int64_t offset, int64_t nbytes, gck_event *last)
{
    if (last != NULL && last->lost) {
        gck_event_give(last);
    } else if (last == NULL || gck_event_is_done(last)) {
        gck_space_give(&ranges->space, offset, nbytes);
        gck_event_give(last);
    } else {
        supersede(ranges, offset, nbytes);
        ranges->given[ranges->n++] = (gck_range_given){offset, nbytes, last, 0};
    }
}

int gck_ranges_add(gck_ranges *ranges, int64_t offset, int64_t nbytes, gck_event *last)
{
    if (reserve(ranges) < 0 || gck_space_add(&ranges->space, offset, nbytes) < 0) {
        return -1;
    }
    if (last != NULL) {
        ranges->given[ranges->n++] = (gck_range_given){offset, nbytes, last, 1};
    }
    return 0;
}

int gck_ranges_wait(const gck_ranges *ranges)
{
    int64_t i = 0;

    while (i < ranges->n && ranges->given[i].in_space) {
        i++;
    }
    return i < ranges->n;
}

gck_range_given gck_ranges_oldest(gck_ranges *ranges)
{
    for (int64_t i = 0; i < ranges->n; i++) {
        const gck_range_given found = ranges->given[i];
        if (!found.in_space) {
            forget(ranges, i);
            return found;
        }
    }
    return (gck_range_given){.offset = -1};
}

void gck_ranges_finish(gck_ranges *ranges)
{
    for (int64_t i = 0; i < ranges->n; i++) {
        gck_event_finish(ranges->given[i].last);
        let_take(ranges, &ranges->given[i]);
        gck_event_give(ranges->given[i].last);
    }
    ranges->n = 0;
}

void gck_ranges_clear(gck_ranges *ranges)
{
    free(ranges->given);
    gck_space_clear(&ranges->space);
    *ranges = (gck_ranges){.given = NULL};
}
