/* simulate.c: the queues of a device, and the host's decisions in their order. */
#include "offload/simulate.h"

#include <stdlib.h>
#include <string.h>

#define MOST (INT64_C(1) << 60)              /* of any sum, exclusive */

/* Of the bytes in use in the ring: below 0 they become free. */
typedef struct {
    int64_t ns, bytes;
} change;

typedef struct {
    const gck_offload_step *step;
    gck_offload_time *found;
    int64_t  compute, out, in;               /* ns at which each has done what is queued there       */
    int64_t *ready;                          /* ns, by region: encoded, then copied out, then in     */
    change  *takes, *releases;               /* 2 * n each; releases in the order of their queueing  */
    int64_t  n_takes, n_releases;
    int64_t  waited, free;                   /* releases whose bytes count as free; these bytes      */
    int64_t  issued, unissued;               /* copies out of regions before it are; bytes of others */
} simulation;

static int64_t copy_ns(const gck_offload_step *step, int64_t bytes, int64_t rate)
{
    const __int128 ns = (__int128)bytes * 1000000000 / rate + step->latency;
    return ns < MOST ? (int64_t)ns : MOST;
}

static int moves(const simulation *s, int64_t l)
{
    const gck_offload_region *region = &s->step->regions[l];
    return region->placed && region->bytes > 0 && region->bytes <= s->step->ring;
}

/* ---- the ring ---- */

static void release(simulation *s, int64_t ns, int64_t bytes)
{
    s->releases[s->n_releases++] = (change){ns, -bytes};
}

/* Issue the oldest copy out that is not. */
static void issue(simulation *s)
{
    const int64_t l = s->issued++;

    if (moves(s, l)) {
        const int64_t bytes = s->step->regions[l].bytes;
        s->out = (s->out > s->ready[l] ? s->out : s->ready[l]) + copy_ns(s->step, bytes, s->step->rate_out);
        s->ready[l] = s->out;
        s->unissued -= bytes;
        s->found->copies++;
        s->found->moved += bytes;
        release(s, s->out, bytes);
    }
}

/* Take bytes: the ns from which they are free. */
static int64_t take(simulation *s, int64_t bytes)
{
    int64_t ns = 0;

    while (s->free < bytes) {
        if (s->waited == s->n_releases) {
            issue(s);
        } else {
            const change *oldest = &s->releases[s->waited++];
            ns = oldest->ns > ns ? oldest->ns : ns;
            s->free -= oldest->bytes;
        }
    }
    s->free -= bytes;
    return ns;
}

static void use(simulation *s, int64_t ns, int64_t bytes) { s->takes[s->n_takes++] = (change){ns, bytes}; }

/* ---- the compute stream ---- */

static void wait_until(simulation *s, int64_t ns, int64_t *exposed)
{
    if (ns > s->compute) {
        *exposed += ns - s->compute;
        s->found->stalls++;
        s->compute = ns;
    }
}

static void run_forward(simulation *s, int64_t l)
{
    const gck_offload_region *region = &s->step->regions[l];
    const int moving = moves(s, l);

    if (moving) {
        wait_until(s, take(s, region->bytes), &s->found->exposed_forward);
        use(s, s->compute, region->bytes);
        s->unissued += region->bytes;
    }
    s->found->stayed += !moving;
    s->compute += region->encode;
    s->ready[l] = s->compute;
    while (s->unissued > s->step->held) {
        issue(s);
    }
    s->compute += region->forward;
}

static void fetch(simulation *s, int64_t l)
{
    const int64_t bytes = s->step->regions[l].bytes, room = take(s, bytes);
    const int64_t start = room > s->ready[l] ? room : s->ready[l];

    s->in = s->in > start ? s->in : start;
    use(s, s->in, bytes);
    s->in += copy_ns(s->step, bytes, s->step->rate_in);
    s->ready[l] = s->in;
}

static void run_backward(simulation *s, int64_t l)
{
    const gck_offload_region *region = &s->step->regions[l];
    const int moving = moves(s, l);

    if (moving && l < s->issued) {
        fetch(s, l);
    }
    if (moving) {
        wait_until(s, s->ready[l], &s->found->exposed_backward);
    }
    s->compute += region->decode;
    if (moving) {
        release(s, s->compute, region->bytes);
    }
    s->compute += region->backward;
}

/* ---- the step ---- */

static int by_time(const void *left, const void *right)
{
    const change *a = left, *b = right;
    const int order = (a->ns > b->ns) - (a->ns < b->ns);

    return order != 0 ? order : (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

/* Releases are moved and both are sorted. */
static int64_t peak(simulation *s)
{
    const int64_t n = s->n_takes + s->n_releases;
    int64_t used = 0, most = 0;

    memmove(s->takes + s->n_takes, s->releases, (size_t)s->n_releases * sizeof *s->releases);
    qsort(s->takes, (size_t)n, sizeof *s->takes, by_time);
    for (int64_t i = 0; i < n; i++) {
        used += s->takes[i].bytes;
        most = used > most ? used : most;
    }
    return most;
}

/* Add to a sum.  0: it reaches MOST, or the number is negative. */
static int add(int64_t *sum, int64_t number)
{
    const int good = number >= 0 && number < MOST - *sum;
    *sum += good ? number : 0;
    return good;
}

static int check(const gck_offload_step *step)
{
    int64_t ns = 0, bytes = 0;

    if (step->n < 0 || step->n > GCK_MOST_OFFLOAD_REGIONS || step->rate_out < 1 || step->rate_in < 1
        || step->latency < 0 || step->ring < 0 || step->held < 0 || !add(&ns, step->head)) {
        return GCK_E_RANGE;
    }
    for (int64_t l = 0; l < step->n; l++) {
        const gck_offload_region *region = &step->regions[l];
        if (region->placed < 0 || region->placed > 1 || !add(&bytes, region->bytes) || !add(&ns, region->encode)
            || !add(&ns, region->forward) || !add(&ns, region->decode) || !add(&ns, region->backward)
            || !add(&ns, copy_ns(step, region->bytes, step->rate_out))
            || !add(&ns, copy_ns(step, region->bytes, step->rate_in))) {
            return GCK_E_RANGE;
        }
    }
    return GCK_OK;
}

int gck_simulate_offload(const gck_offload_step *step, gck_offload_time *found)
{
    const int status = check(step);
    simulation s = {.step = step, .found = found, .free = step->ring};

    if (status != GCK_OK) {
        return status;
    }
    const size_t n = (size_t)step->n;
    s.takes = malloc(4 * n * sizeof *s.takes + n * sizeof *s.ready + 1);
    if (s.takes == NULL) {
        return GCK_E_MEMORY;
    }
    s.releases = s.takes + 2 * n;
    s.ready = (int64_t *)(s.takes + 4 * n);
    *found = (gck_offload_time){.time = 0};
    for (int64_t l = 0; l < step->n; l++) {
        run_forward(&s, l);
    }
    s.compute += step->head;
    for (int64_t l = step->n - 1; l >= 0; l--) {
        run_backward(&s, l);
    }
    found->time = s.compute;
    found->peak = peak(&s);
    free(s.takes);
    return GCK_OK;
}
