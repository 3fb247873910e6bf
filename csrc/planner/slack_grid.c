/* slack_grid.c: one label per bucket of slack. */
#include "planner/slack_grid.h"

#include <stdlib.h>

enum { AROUND = 8 };                         /* buckets on each side between which times are seen to fall */
#define MOST_FALL (INT64_C(1) << 50)         /* so that it can be multiplied by a part of a bucket */

int gck_slack_grid_init(gck_slack_grid *grid, int64_t options, int64_t buckets, int64_t range)
{
    *grid = (gck_slack_grid){.shift = 0};
    while (range >> grid->shift >= buckets) {
        grid->shift++;
    }
    grid->next.time = gck_planner_memory(buckets + 1, sizeof *grid->next.time);
    grid->next.bytes = gck_planner_memory(buckets + 1, sizeof *grid->next.bytes);
    grid->next.fall = gck_planner_memory(buckets + 1, sizeof *grid->next.fall);
    grid->now.time = gck_planner_memory(buckets + 1, sizeof *grid->now.time);
    grid->label = gck_planner_memory(buckets, sizeof *grid->label);
    grid->ways = gck_planner_memory(buckets, sizeof *grid->ways);
    grid->moves = gck_planner_memory(options, sizeof *grid->moves);
    grid->shifts = gck_planner_memory(options, sizeof *grid->shifts);
    return grid->next.time == NULL || grid->next.bytes == NULL || grid->next.fall == NULL
           || grid->now.time == NULL || grid->label == NULL || grid->ways == NULL
           || grid->moves == NULL || grid->shifts == NULL ? GCK_E_MEMORY : GCK_OK;
}

void gck_slack_grid_free(gck_slack_grid *grid)
{
    free(grid->next.time);
    free(grid->next.bytes);
    free(grid->next.fall);
    free(grid->now.time);
    free(grid->label);
    free(grid->ways);
    free(grid->moves);
    free(grid->shifts);
    *grid = (gck_slack_grid){.shift = 0};
}

/* Set the buckets of the next region: the fastest label up to the end of each. */
static void fill(gck_slack_grid *grid, const gck_labels *labels)
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

/* The extension of fewest bytes, of these the fastest. */
static gck_label first_of(const gck_labels *next, const gck_option *options, int n)
{
    gck_label first = gck_label_extend(&next->at[0], 0, &options[0]);

    for (int o = 1; o < n; o++) {
        const gck_label new = gck_label_extend(&next->at[0], 0, &options[o]);
        if (new.bytes < first.bytes || (new.bytes == first.bytes && new.time < first.time)) {
            first = new;
        }
    }
    return first;
}

/* The fastest extension, of these the one of fewest bytes. */
static gck_label last_of(const gck_labels *next, const gck_option *options, int n)
{
    gck_label last = gck_label_extend(&next->at[next->n - 1], next->n - 1, &options[0]);

    for (int o = 1; o < n; o++) {
        const gck_label new = gck_label_extend(&next->at[next->n - 1], next->n - 1, &options[o]);
        if (new.time < last.time || (new.time == last.time && new.bytes < last.bytes)) {
            last = new;
        }
    }
    return last;
}

/* Append a label that is faster than those before, and remove those that need as much; not what is
 * as fast as the last one, which is appended itself. */
static void add(gck_label label, const gck_label *last, gck_labels *out)
{
    if (label.time > last->time && label.time < out->at[out->n - 1].time) {
        while (out->n > 0 && out->at[out->n - 1].bytes >= label.bytes) {
            out->n--;
        }
        out->at[out->n++] = label;
    }
}

int gck_slack_grid_extend(gck_slack_grid *grid, const gck_labels *next, const gck_option *options, int n,
                          gck_labels *out)
{
    const gck_label first = first_of(next, options, n), last = last_of(next, options, n);
    const gck_buckets *now = &grid->now;
    int status;

    grid->now.first = first.bytes;
    grid->now.n = ((last.bytes - first.bytes) >> grid->shift) + 1;
    if ((status = gck_labels_reserve(out, now->n + 2)) != GCK_OK) {
        return status;
    }
    fill(grid, next);
    gck_buckets_choose(&grid->next, options, n, grid->shift, grid->moves, &grid->now, grid->ways);
    for (int o = 0; o < n; o++) {            /* the moves are sorted by time now */
        grid->shifts[grid->moves[o].option] = grid->moves[o].shift;
    }
    out->n = 0;
    out->at[out->n++] = first;
    for (int64_t b = 0; b < now->n; b++) {
        if (now->time[b + 1] != GCK_NEVER) {
            const uint32_t option = (uint32_t)grid->ways[b] / 2, before = (uint32_t)grid->ways[b] % 2;
            const int64_t to = gck_smaller(b + grid->shifts[option], grid->next.n);
            const uint32_t from = grid->label[to - before];
            add(gck_label_extend(&next->at[from], from, &options[option]), &last, out);
        }
    }
    add(last, &(gck_label){.time = -1}, out);
    return GCK_OK;
}
