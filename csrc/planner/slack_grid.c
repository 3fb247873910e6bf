/* slack_grid.c: the slack of a region in buckets, twice.
 *
 * A region may have as many labels as there are choices.  To keep their number, the slack between the
 * first and the last label is cut into buckets, and of each bucket one label stays.  A label holds the
 * true bytes of its choices, never those of its bucket, so what is left are plans as they stand; some
 * are missing.  The label of fewest bytes and the cheapest one always stay, and so a budget for which
 * there is a plan has one.  Of a bucket's labels the cheapest would be a poor choice: from region to
 * region labels would need a little more.  So what a label leaves of its bucket counts, at the rate at
 * which the next region's costs fall there.
 *
 * For the lower bound bytes are rounded in favour of the plan: a bucket holds a cost that no choice with
 * a slack in that bucket goes below, and a step to the next region's buckets rounds the slack up to the
 * end of its bucket.  The buckets are laid so that the plan in question is always at such an end: it
 * gains nothing, and others only where they differ from it.
 *
 * Both are one loop over options and buckets, the inner loop of the planner.  Costs descend from bucket
 * to bucket.  So an option that is no better at the first of eight buckets is no better at any of them,
 * and with the best options first most are skipped. */
#include "planner/slack_grid.h"

enum { BLOCK = 8, TILE = 512 };              /* buckets that are skipped together; for which options are sorted */
enum { AROUND = 8 };                         /* buckets on each side between which costs are seen to fall */
#define MOST_FALL (INT64_C(1) << 50)         /* so that it can be multiplied by a part of a bucket */

#define INLINE static inline __attribute__((always_inline))

/* Round down and up. */
static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
static int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }

/* ---- the loop ---- */

/* Relax `count` buckets by a move, all of which lead to one of the next region's: a bound. */
INLINE void relax_bounds(const int64_t *restrict time, int64_t cost, int64_t *restrict best, int64_t count)
{
    for (int64_t b = 0; b < count; b++) {
        best[b] = gck_smaller(time[b] + cost, best[b]);
    }
}

/* The same, for labels.  `room` is what the first bucket leaves.  No branches: vector code. */
INLINE void relax_labels(const int64_t *restrict time, const int64_t *restrict bytes, const int64_t *restrict fall,
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

/* Relax `count` buckets from b on; a bound if `ways` is NULL. */
INLINE void relax_block(const gck_buckets *next, const gck_move *move, int shift, const gck_buckets *now, int64_t *ways,
                        int64_t b, int64_t count)
{
    const int64_t to = 1 + b + move->shift;

    if (ways == NULL) {
        relax_bounds(next->time + to, move->time, now->time + 1 + b, count);
    } else {
        relax_labels(next->time + to, next->bytes + to, next->fall + to, move, move->room + (b << shift), shift,
                     now->time + 1 + b, ways + b, count);
    }
}

/* Relax buckets [from, to), eight at a time. */
INLINE void relax_range(const gck_buckets *next, const gck_move *move, int shift, const gck_buckets *now, int64_t *ways,
                        int64_t from, int64_t to)
{
    for (int64_t b = from; b < to; b += BLOCK) {
        const int64_t count = gck_smaller(to - b, BLOCK), fall = ways != NULL ? next->fall[1 + b + move->shift] : 0;
        if (next->time[b + count + move->shift] + move->time - fall >= now->time[1 + b]) {
            continue;                        /* faster: times descend, so none of these is (much) better */
        }
        if (count == BLOCK) {                /* faster: the count is known */
            relax_block(next, move, shift, now, ways, b, BLOCK);
        } else {
            relax_block(next, move, shift, now, ways, b, count);
        }
    }
}

/* The time that a move gives bucket b. */
static int64_t time_by(const gck_move *move, int64_t b, const gck_buckets *next)
{
    const int64_t to = gck_smaller(b + move->shift, next->n);

    return move->time + (to < 0 ? GCK_NEVER : next->time[to + (to < next->n)]);
}

/* Sort moves by the time that they give bucket b, so that the best comes first and most others are
 * skipped.  Equal ones keep their order. */
static void sort(gck_move *moves, int n, const gck_buckets *next, int64_t b)
{
    for (int i = 1; i < n; i++) {
        const gck_move move = moves[i];
        const int64_t time = time_by(&move, b, next);
        int at = i;
        for (; at > 0 && time_by(&moves[at - 1], b, next) > time; at--) {
            moves[at] = moves[at - 1];
        }
        moves[at] = move;
    }
}

INLINE void relax_all(const gck_buckets *next, gck_move *moves, int n, int shift, const gck_buckets *now, int64_t *ways)
{
    for (int64_t tile = 0; tile < now->n; tile += TILE) {
        const int64_t end = gck_smaller(now->n, tile + TILE);
        sort(moves, n, next, (tile + end) / 2);
        for (const gck_move *move = moves; move < moves + n; move++) {
            const int64_t from = gck_larger(move->begin, tile), to = gck_smaller(next->n - move->shift, end);
            const int64_t last = next->time[next->n] + move->time;
            relax_range(next, move, shift, now, ways, from, to);
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

/* For bounds and for labels a loop of its own. */
INLINE void relax_either(const gck_buckets *next, gck_move *moves, int n, int shift, const gck_buckets *now,
                         int64_t *ways)
{
    if (ways == NULL) {
        relax_all(next, moves, n, 0, now, NULL);
    } else {
        relax_all(next, moves, n, shift, now, ways);
    }
}

#if defined(__x86_64__)
/* Four buckets at a time. */
__attribute__((target("avx2")))
static void relax_avx2(const gck_buckets *next, gck_move *moves, int n, int shift, const gck_buckets *now,
                       int64_t *ways)
{
    relax_either(next, moves, n, shift, now, ways);
}
#endif

static void set_moves(const gck_buckets *next, const gck_option *options, int n, int64_t width, const gck_buckets *now,
                      gck_move *moves)
{
    for (int o = 0; o < n; o++) {
        const int64_t room = now->first + width - 1 - options[o].kept;
        const int64_t shift = floor_div(room - next->first, width);
        const int64_t begin = gck_larger(floor_div(options[o].need - now->first, width), gck_larger(-shift, 0));
        moves[o] = (gck_move){shift, room, begin, options[o].time, (uint32_t)o};
    }
}

/* Set `now`'s times to the least over all options of what the end of each bucket can have: a lower
 * bound, for which an option gets the time of the bucket to which it leads.
 *
 * With `ways`, of buckets that are `width` = 2**shift wide: find a label for each bucket, of those that
 * need no more than its end.  A way, then, is twice the option's place, and 1 more where the label is
 * not that of the bucket to which it leads but of the one before.  now->time is GCK_NEVER where there is
 * no label.  Sorts the moves. */
static void relax(const gck_buckets *next, const gck_option *options, int n, int64_t width, int shift, gck_move *moves,
                  gck_buckets *now, int64_t *ways)
{
    set_moves(next, options, n, width, now, moves);
    for (int64_t b = 0; b <= now->n; b++) {
        now->time[b] = GCK_NEVER;
    }
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {    /* faster */
        relax_avx2(next, moves, n, shift, now, ways);
        return;
    }
#endif
    relax_either(next, moves, n, shift, now, ways);
}

/* ---- labels ---- */

int gck_slack_range(const gck_chain *chain, gck_option *options, int64_t *range)
{
    gck_label first = {.bytes = chain->last_need}, last = first;

    *range = 0;
    if (chain->last_need == GCK_UNAVAILABLE) {
        return 0;
    }
    for (int64_t l = chain->regions - 1; l >= 0; l--) {
        const int n = gck_chain_options(chain, l, NULL, 0, options);
        if (n == 0) {
            return 0;
        }
        /* The last label is the fastest; with errors, others may have more bytes. */
        gck_label most = gck_label_best(&last, 0, options, n, 1);
        for (int o = 0; o < n && chain->error != NULL; o++) {
            most.bytes = gck_larger(most.bytes, gck_label_extend(&last, 0, &options[o]).bytes);
        }
        first = gck_label_best(&first, 0, options, n, 0);
        last = most;
        *range = gck_larger(*range, last.bytes - first.bytes);
    }
    return 1;
}

int gck_slack_grid_init(gck_slack_grid *grid, int64_t options, int64_t buckets, int64_t range)
{
    const int64_t room = buckets + 1;

    *grid = (gck_slack_grid){.shift = 0};
    while (range >> grid->shift >= buckets) {
        grid->shift++;
    }
    grid->next.time = gck_planner_memory(5 * room, sizeof *grid->next.time);
    grid->label = gck_planner_memory(buckets, sizeof *grid->label);
    grid->moves = gck_planner_memory(options, sizeof *grid->moves);
    if (grid->next.time == NULL || grid->label == NULL || grid->moves == NULL) {
        return GCK_E_MEMORY;
    }
    grid->next.bytes = grid->next.time + room;
    grid->next.fall = grid->next.bytes + room;
    grid->now.time = grid->next.fall + room;
    grid->ways = grid->now.time + room;
    return GCK_OK;
}

void gck_slack_grid_free(gck_slack_grid *grid)
{
    free(grid->next.time);
    free(grid->label);
    free(grid->moves);
}

/* Set the buckets of the next region: the cheapest label up to the end of each. */
static void set_next(gck_slack_grid *grid, const gck_labels *labels)
{
    const int64_t width = INT64_C(1) << grid->shift;
    gck_buckets *next = &grid->next;
    int64_t i = 0, most = 0;

    next->first = labels->at[0].bytes;
    next->n = 0;
    next->time[0] = GCK_NEVER;
    next->bytes[0] = -GCK_NEVER;
    for (int64_t end = next->first + width; i < labels->n; end += width) {
        while (i < labels->n && labels->at[i].bytes < end) {
            i++;
        }
        grid->label[next->n++] = (uint32_t)(i - 1);
        next->time[next->n] = labels->at[i - 1].time;
        next->bytes[next->n] = labels->at[i - 1].bytes;
    }
    for (int64_t b = next->n; b > 0; b--) {
        const int64_t low = gck_larger(b - AROUND, 1), high = gck_smaller(b + AROUND, next->n);
        const int64_t drop = next->time[low] - next->time[high], apart = high - low;
        /* faster: most are divided by a constant */
        const int64_t fall = apart == 2 * AROUND ? drop / (2 * AROUND) : apart > 0 ? drop / apart : 0;
        next->fall[b] = most = gck_larger(most, gck_smaller(fall, MOST_FALL));
    }
    next->fall[0] = 0;                       /* so that no label stays none */
}

int gck_slack_grid_extend(gck_slack_grid *grid, const gck_labels *next, const gck_option *options, int n,
                          gck_labels *out)
{
    const gck_label first = gck_label_best(&next->at[0], 0, options, n, 0);
    const gck_label last = gck_label_best(&next->at[next->n - 1], next->n - 1, options, n, 1);
    const int64_t width = INT64_C(1) << grid->shift;
    gck_buckets *now = &grid->now;
    int status;

    now->first = first.bytes;
    now->n = ((last.bytes - first.bytes) >> grid->shift) + 1;
    if ((status = gck_labels_reserve(out, now->n + 2)) != GCK_OK) {
        return status;
    }
    set_next(grid, next);
    relax(&grid->next, options, n, width, grid->shift, grid->moves, now, grid->ways);
    set_moves(&grid->next, options, n, width, now, grid->moves);          /* by option again */
    out->n = 0;
    out->at[out->n++] = first;
    for (int64_t b = 0; b < now->n; b++) {
        if (now->time[b + 1] == GCK_NEVER) {
            continue;
        }
        const uint32_t option = (uint32_t)grid->ways[b] / 2, before = (uint32_t)grid->ways[b] % 2;
        const int64_t to = gck_smaller(b + grid->moves[option].shift, grid->next.n);
        const uint32_t from = grid->label[to - before];
        const gck_label label = gck_label_extend(&next->at[from], from, &options[option]);
        if (label.time > last.time && label.time < out->at[out->n - 1].time) {
            for (; out->n > 0 && out->at[out->n - 1].bytes >= label.bytes; out->n--) {
            }
            out->at[out->n++] = label;
        }
    }
    if (last.time < out->at[out->n - 1].time) {
        for (; out->n > 0 && out->at[out->n - 1].bytes >= last.bytes; out->n--) {
        }
        out->at[out->n++] = last;
    }
    return GCK_OK;
}

/* ---- the lower bound ---- */

typedef struct {
    const gck_bound *of;
    int64_t          width, most;            /* of a bucket, in bytes; buckets               */
    int64_t         *slack;                  /* of the choices at each region; malloc        */
    int64_t         *low, *high;             /* the first and the last slack that any has; with `slack` */
    gck_option      *options;                /* malloc */
    gck_move        *moves;                  /* malloc */
    gck_buckets      now, next;              /* the bounds of this region and of the next; malloc */
} bounds;

static int options_of(const bounds *b, int64_t region)
{
    return gck_chain_options(b->of->chain, region, &b->of->price, b->of->most_error, b->options);
}

/* Set the slack that choices may have within the budget, before each region and after the last. */
static void find_slack(bounds *b, const uint32_t *choices)
{
    const gck_chain *chain = b->of->chain;

    b->slack[0] = b->low[0] = b->high[0] = b->of->budget;
    for (int64_t l = 0; l < chain->regions; l++) {
        int64_t least = INT64_MAX, most = INT64_MIN;
        for (int64_t at = l * chain->options; at < (l + 1) * chain->options; at++) {
            if (chain->need[at] != GCK_UNAVAILABLE) {
                least = gck_smaller(chain->kept[at], least);
                most = gck_larger(chain->kept[at], most);
            }
        }
        b->slack[l + 1] = b->slack[l] - chain->kept[l * chain->options + choices[l]];
        b->low[l + 1] = b->low[l] - most;
        b->high[l + 1] = b->high[l] - least;
    }
}

/* Narrow that down to the slack between the labels of each region, and set the width of a bucket. */
static void narrow_slack(bounds *b)
{
    const gck_labels *labels = b->of->labels;
    gck_label first = labels->at[0], last = labels->at[labels->n - 1];
    int64_t range = 0;

    for (int64_t l = b->of->from; l >= 0; l--) {
        b->low[l] = gck_larger(first.bytes, b->low[l]);
        b->high[l] = gck_larger(b->low[l], gck_smaller(last.bytes, b->high[l]));
        range = gck_larger(range, b->high[l] - b->low[l]);
        if (l > 0) {
            const int n = options_of(b, l - 1);
            first = gck_label_best(&first, 0, b->options, n, 0);
            last = gck_label_best(&last, 0, b->options, n, 1);
        }
    }
    b->width = range / (b->most - 1) + 1;
}

/* Lay the buckets of a region: the first is the one that holds `low`, and the slack of the choices is
 * at the end of one. */
static void lay(const bounds *b, int64_t region, gck_buckets *buckets)
{
    const int64_t end = b->slack[region] - floor_div(b->slack[region] - b->low[region], b->width) * b->width;

    buckets->first = end - b->width + 1;
    buckets->n = gck_larger(ceil_div(b->high[region] - end, b->width), 0) + 1;
}

/* The bound: from the labels where it begins to the first region. */
static int64_t find_bound(bounds *b)
{
    const gck_labels *labels = b->of->labels;

    lay(b, b->of->from, &b->next);
    b->next.time[0] = GCK_NEVER;
    for (int64_t i = 0, at = 0; i < b->next.n; i++) {
        while (at < labels->n && labels->at[at].bytes < b->next.first + (i + 1) * b->width) {
            at++;
        }
        b->next.time[i + 1] = at > 0 ? labels->at[at - 1].time : GCK_NEVER;
    }
    for (int64_t l = b->of->from - 1; l >= 0; l--) {
        const gck_buckets done = b->next;
        lay(b, l, &b->now);
        relax(&b->next, b->options, options_of(b, l), b->width, 0, b->moves, &b->now, NULL);
        b->next = b->now;
        b->now = done;
    }
    return b->next.time[1 + gck_smaller((b->of->budget - b->next.first) / b->width, b->next.n - 1)];
}

int gck_lower_bound(const gck_bound *bound, const uint32_t *choices, int64_t *cost)
{
    const int64_t options = bound->chain->options, slacks = bound->chain->regions + 1;
    bounds b = {.of = bound, .most = bound->buckets};
    int status = GCK_E_MEMORY;

    b.slack = gck_planner_memory(3 * slacks, sizeof *b.slack);
    b.options = gck_planner_memory(options, sizeof *b.options);
    b.moves = gck_planner_memory(options, sizeof *b.moves);
    b.now.time = gck_planner_memory(b.most + 2, sizeof *b.now.time);
    b.next.time = gck_planner_memory(b.most + 2, sizeof *b.next.time);
    if (b.slack != NULL && b.options != NULL && b.moves != NULL && b.now.time != NULL && b.next.time != NULL) {
        b.low = b.slack + slacks;
        b.high = b.low + slacks;
        find_slack(&b, choices);
        narrow_slack(&b);
        *cost = find_bound(&b);
        status = GCK_OK;
    }
    free(b.slack);
    free(b.options);
    free(b.moves);
    free(b.now.time);
    free(b.next.time);
    return status;
}
