/* buckets.c: the inner loop of the planner, over buckets and options. */
#include "planner/buckets.h"

enum { BLOCK = 8, TILE = 512 };              /* buckets that are skipped together; for which options are sorted */

/* Take a move for buckets [from, to), which all lead to one of the next region's. */
static inline void take(const gck_move *move, const gck_buckets *next, int64_t width, int64_t from, int64_t to,
                        gck_buckets *now, uint32_t *ways)
{
    const int64_t *time = next->time + 1 + from + move->shift;
    const int64_t *bytes = next->bytes != NULL ? next->bytes + 1 + from + move->shift : NULL;
    int64_t *best = now->time + 1 + from, room = move->room + from * width;

    for (int64_t block = 0; block < to - from; block += BLOCK) {
        const int64_t end = gck_smaller(block + BLOCK, to - from);
        if (time[end - 1] + move->time >= best[block]) {
            continue;                        /* faster: times descend, so none of these is better */
        }
        for (int64_t b = block; b < end; b++) {
            const int before = bytes != NULL && bytes[b] > room + b * width;
            const int64_t new = time[b - before] + move->time;
            if (new < best[b]) {
                best[b] = new;
                if (ways != NULL) {
                    ways[from + b] = move->option * 2 + (uint32_t)before;
                }
            }
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

void gck_buckets_extend(const gck_buckets *next, const gck_option *options, int n, int64_t width, gck_move *moves,
                        gck_buckets *now, uint32_t *ways)
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
    for (int64_t tile = 0; tile < now->n; tile += TILE) {
        const int64_t end = gck_smaller(now->n, tile + TILE);
        sort(moves, n, next, (tile + end) / 2);
        for (const gck_move *move = moves; move < moves + n; move++) {
            const int64_t from = gck_larger(move->begin, tile), to = gck_smaller(next->n - move->shift, end);
            const int64_t last = next->time[next->n] + move->time;
            if (from < to && next->bytes != NULL) {
                take(move, next, width, from, to, now, ways);
            } else if (from < to) {
                take(move, &(gck_buckets){next->first, next->n, next->time, NULL}, width, from, to, now, NULL);
            }
            /* Beyond the next region's last bucket its last label stays the fastest. */
            for (int64_t b = gck_larger(from, to); b < end && last < now->time[b + 1]; b++) {
                now->time[b + 1] = last;
                if (ways != NULL) {
                    ways[b] = move->option * 2 + 1;
                }
            }
        }
    }
}
