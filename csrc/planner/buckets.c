/* buckets.c: the inner loop of the planner, over buckets and options. */
#include "planner/buckets.h"

enum { BLOCK = 8, TILE = 512 };              /* buckets that are skipped together; for which options are sorted */

#define INLINE static inline __attribute__((always_inline))

/* Take a move for `count` buckets, all of which lead to one of the next region's: a bound. */
INLINE void take_bounds(const int64_t *restrict time, int64_t cost, int64_t *restrict best, int64_t count)
{
    for (int64_t b = 0; b < count; b++) {
        best[b] = gck_smaller(time[b] + cost, best[b]);
    }
}

/* The same, for labels.  `room` is what the first bucket leaves.  No branches: vector code. */
INLINE void take_labels(const int64_t *restrict time, const int64_t *restrict bytes, const int64_t *restrict fall,
                        const gck_move *move, int64_t room, int shift, int64_t *restrict best, int64_t *restrict ways,
                        int64_t count)
{
    const int64_t width = INT64_C(1) << shift, cost = move->time, way = 2 * (int64_t)move->option;
    const int coarse = shift > 6 ? shift - 6 : 0, fine = shift - coarse;

    for (int64_t b = 0; b < count; b++) {
        const int64_t end = room + (b << shift), before = bytes[b] > end ? 1 : 0;
        const int64_t left = gck_smaller(end - (before ? bytes[b - 1] : bytes[b]), width);
        const uint64_t most = (uint64_t)(before ? fall[b - 1] : fall[b]), part = (uint32_t)((uint64_t)left >> coarse);
        const int64_t new = (before ? time[b - 1] : time[b]) + cost - (int64_t)((most * part) >> fine);
        const int64_t old = best[b], old_way = ways[b];
        best[b] = new < old ? new : old;
        ways[b] = new < old ? way + before : old_way;
    }
}

/* Take a move for `count` buckets from b on; a bound if `ways` is NULL. */
INLINE void take_block(const gck_buckets *next, const gck_move *move, int shift, const gck_buckets *now, int64_t *ways,
                       int64_t b, int64_t count)
{
    const int64_t to = 1 + b + move->shift;

    if (ways == NULL) {
        take_bounds(next->time + to, move->time, now->time + 1 + b, count);
    } else {
        take_labels(next->time + to, next->bytes + to, next->fall + to, move, move->room + (b << shift), shift,
                    now->time + 1 + b, ways + b, count);
    }
}

/* Take a move for buckets [from, to). */
INLINE void take(const gck_buckets *next, const gck_move *move, int shift, const gck_buckets *now, int64_t *ways,
                 int64_t from, int64_t to)
{
    for (int64_t b = from; b < to; b += BLOCK) {
        const int64_t count = gck_smaller(to - b, BLOCK), fall = ways != NULL ? next->fall[1 + b + move->shift] : 0;
        if (next->time[b + count + move->shift] + move->time - fall >= now->time[1 + b]) {
            continue;                        /* faster: times descend, so none of these is (much) better */
        }
        if (count == BLOCK) {                /* faster: the count is known */
            take_block(next, move, shift, now, ways, b, BLOCK);
        } else {
            take_block(next, move, shift, now, ways, b, count);
        }
    }
}

/* Sort moves by the time that they give bucket b, so that the best comes first and most others are
 * skipped.  Equal ones keep their order. */
static void sort(gck_move *moves, int n, const gck_buckets *next, int64_t b)
{
    for (int i = 1; i < n; i++) {
        const gck_move move = moves[i];
        const int64_t to = gck_move_to(&move, b, next), time = to < 0 ? GCK_NEVER : next->time[to + (to < next->n)];
        int at = i;
        for (; at > 0; at--) {
            const int64_t other = gck_move_to(&moves[at - 1], b, next);
            const int64_t others = other < 0 ? GCK_NEVER : next->time[other + (other < next->n)];
            if (others + moves[at - 1].time <= time + move.time) {
                break;
            }
            moves[at] = moves[at - 1];
        }
        moves[at] = move;
    }
}

/* Set the moves, and forget now's times. */
static void prepare(const gck_buckets *next, const gck_option *options, int n, int64_t width, gck_move *moves,
                    gck_buckets *now)
{
    for (int o = 0; o < n; o++) {
        const int64_t room = now->first + width - 1 - options[o].kept;
        const int64_t shift = gck_floor_div(room - next->first, width);
        const int64_t begin = gck_larger(gck_floor_div(options[o].need - now->first, width), gck_larger(-shift, 0));
        moves[o] = (gck_move){shift, room, begin, options[o].time, (uint32_t)o};
    }
    for (int64_t b = 0; b <= now->n; b++) {
        now->time[b] = GCK_NEVER;
    }
}

INLINE void take_all(const gck_buckets *next, gck_move *moves, int n, int shift, const gck_buckets *now, int64_t *ways)
{
    for (int64_t tile = 0; tile < now->n; tile += TILE) {
        const int64_t end = gck_smaller(now->n, tile + TILE);
        sort(moves, n, next, (tile + end) / 2);
        for (const gck_move *move = moves; move < moves + n; move++) {
            const int64_t from = gck_larger(move->begin, tile), to = gck_smaller(next->n - move->shift, end);
            const int64_t last = next->time[next->n] + move->time;
            take(next, move, shift, now, ways, from, to);
            /* Beyond the next region's last bucket its time holds. */
            for (int64_t b = gck_larger(from, to); b < end && last < now->time[b + 1]; b++) {
                now->time[b + 1] = last;
                if (ways != NULL) {
                    ways[b] = 2 * (int64_t)move->option + 1;
                }
            }
        }
    }
}

#if defined(__x86_64__)
/* take_all(), four buckets at a time. */
__attribute__((target("avx2")))
static void bound_avx2(const gck_buckets *next, gck_move *moves, int n, const gck_buckets *now)
{
    take_all(next, moves, n, 0, now, NULL);
}

__attribute__((target("avx2")))
static void choose_avx2(const gck_buckets *next, gck_move *moves, int n, int shift, const gck_buckets *now,
                        int64_t *ways)
{
    take_all(next, moves, n, shift, now, ways);
}
#endif

void gck_buckets_bound(const gck_buckets *next, const gck_option *options, int n, int64_t width, gck_move *moves,
                       gck_buckets *now)
{
    prepare(next, options, n, width, moves, now);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {    /* faster */
        bound_avx2(next, moves, n, now);
        return;
    }
#endif
    take_all(next, moves, n, 0, now, NULL);
}

void gck_buckets_choose(const gck_buckets *next, const gck_option *options, int n, int shift, gck_move *moves,
                        gck_buckets *now, int64_t *ways)
{
    prepare(next, options, n, INT64_C(1) << shift, moves, now);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {    /* faster */
        choose_avx2(next, moves, n, shift, now, ways);
        return;
    }
#endif
    take_all(next, moves, n, shift, now, ways);
}
