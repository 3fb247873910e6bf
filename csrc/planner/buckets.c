/* buckets.c: the inner loop of the planner, over buckets and options. */
#include "planner/buckets.h"

enum { BLOCK = 8, TILE = 512 };              /* buckets that are skipped together; for which options are sorted */

/* Take a move for `count` buckets, all of which lead to one of the next region's: a bound. */
static void take_bound(const int64_t *time, int64_t cost, int64_t *best, int64_t count)
{
    for (int64_t block = 0; block < count; block += BLOCK) {
        const int64_t end = gck_smaller(block + BLOCK, count);
        if (time[end - 1] + cost >= best[block]) {
            continue;                        /* faster: times descend, so none of these is better */
        }
        for (int64_t b = block; b < end; b++) {
            const int64_t new = time[b] + cost;
            best[b] = new < best[b] ? new : best[b];
        }
    }
}

/* The same, for labels.  `room` is what the first bucket leaves. */
static void take_label(const gck_buckets *next, int64_t first, int64_t room, int shift, const gck_move *move,
                       int64_t *best, uint32_t *ways, int64_t count)
{
    const int64_t *time = next->time + first + 1, *bytes = next->bytes + first + 1, *fall = next->fall + first + 1;
    const int64_t width = INT64_C(1) << shift;
    const int coarse = shift > 6 ? shift - 6 : 0, fine = shift - coarse;

    for (int64_t block = 0; block < count; block += BLOCK) {
        const int64_t end = gck_smaller(block + BLOCK, count);
        if (time[end - 1] + move->time - fall[block] >= best[block]) {
            continue;                        /* faster: none of these is much better */
        }
        for (int64_t b = block; b < end; b++) {
            const int before = bytes[b] > room + (b << shift);
            const int64_t left = gck_smaller(room + (b << shift) - bytes[b - before], width);
            const int64_t new = time[b - before] + move->time - ((fall[b - before] * (left >> coarse)) >> fine);
            const int better = new < best[b];
            best[b] = better ? new : best[b];
            ways[b] = better ? move->option * 2 + (uint32_t)before : ways[b];
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

void gck_buckets_bound(const gck_buckets *next, const gck_option *options, int n, int64_t width, gck_move *moves,
                       gck_buckets *now)
{
    prepare(next, options, n, width, moves, now);
    for (int64_t tile = 0; tile < now->n; tile += TILE) {
        const int64_t end = gck_smaller(now->n, tile + TILE);
        sort(moves, n, next, (tile + end) / 2);
        for (const gck_move *move = moves; move < moves + n; move++) {
            const int64_t from = gck_larger(move->begin, tile), to = gck_smaller(next->n - move->shift, end);
            const int64_t last = next->time[next->n] + move->time;
            if (from < to) {
                take_bound(next->time + 1 + from + move->shift, move->time, now->time + 1 + from, to - from);
            }
            /* Beyond the next region's last bucket its time holds. */
            for (int64_t b = gck_larger(from, to); b < end && last < now->time[b + 1]; b++) {
                now->time[b + 1] = last;
            }
        }
    }
}

void gck_buckets_choose(const gck_buckets *next, const gck_option *options, int n, int shift, gck_move *moves,
                        gck_buckets *now, uint32_t *ways)
{
    prepare(next, options, n, INT64_C(1) << shift, moves, now);
    for (int64_t tile = 0; tile < now->n; tile += TILE) {
        const int64_t end = gck_smaller(now->n, tile + TILE);
        sort(moves, n, next, (tile + end) / 2);
        for (const gck_move *move = moves; move < moves + n; move++) {
            const int64_t from = gck_larger(move->begin, tile), to = gck_smaller(next->n - move->shift, end);
            const int64_t last = next->time[next->n] + move->time;
            if (from < to) {
                take_label(next, from + move->shift, move->room + (from << shift), shift, move, now->time + 1 + from,
                           ways + from, to - from);
            }
            for (int64_t b = gck_larger(from, to); b < end && last < now->time[b + 1]; b++) {
                now->time[b + 1] = last;
                ways[b] = move->option * 2 + 1;
            }
        }
    }
}
