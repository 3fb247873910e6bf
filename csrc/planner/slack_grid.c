/* slack_grid.c: one label per bucket of slack. */
#include "planner/slack_grid.h"

#include <stdlib.h>

int gck_slack_grid_init(gck_slack_grid *grid, int64_t options, int64_t buckets, int64_t width)
{
    *grid = (gck_slack_grid){.width = width};
    grid->next.time = gck_planner_memory(buckets + 1, sizeof *grid->next.time);
    grid->next.bytes = gck_planner_memory(buckets + 1, sizeof *grid->next.bytes);
    grid->now.time = gck_planner_memory(buckets + 1, sizeof *grid->now.time);
    grid->label = gck_planner_memory(buckets, sizeof *grid->label);
    grid->ways = gck_planner_memory(buckets, sizeof *grid->ways);
    grid->moves = gck_planner_memory(options, sizeof *grid->moves);
    grid->shifts = gck_planner_memory(options, sizeof *grid->shifts);
    return grid->next.time == NULL || grid->next.bytes == NULL || grid->now.time == NULL || grid->label == NULL
           || grid->ways == NULL || grid->moves == NULL || grid->shifts == NULL ? GCK_E_MEMORY : GCK_OK;
}

void gck_slack_grid_free(gck_slack_grid *grid)
{
    free(grid->next.time);
    free(grid->next.bytes);
    free(grid->now.time);
    free(grid->label);
    free(grid->ways);
    free(grid->moves);
    free(grid->shifts);
    *grid = (gck_slack_grid){.width = 0};
}

/* Set the buckets of the next region: the fastest label up to the end of each. */
static void fill(gck_slack_grid *grid, const gck_labels *labels)
{
    gck_buckets *next = &grid->next;
    int64_t i = 0;

    next->first = labels->at[0].bytes;
    next->n = 0;
    next->time[0] = GCK_NEVER;
    next->bytes[0] = INT64_MIN;
    for (int64_t end = next->first + grid->width; i < labels->n; end += grid->width) {
        while (i < labels->n && labels->at[i].bytes < end) {
            i++;
        }
        grid->label[next->n++] = (uint32_t)(i - 1);
        next->time[next->n] = labels->at[i - 1].time;
        next->bytes[next->n] = labels->at[i - 1].bytes;
    }
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

int gck_slack_grid_extend(gck_slack_grid *grid, const gck_labels *next, const gck_option *options, int n,
                          gck_labels *out)
{
    const gck_label first = first_of(next, options, n), last = last_of(next, options, n);
    const gck_buckets *now = &grid->now;
    int status;

    grid->now.first = first.bytes;
    grid->now.n = (last.bytes - first.bytes) / grid->width + 1;
    if ((status = gck_labels_reserve(out, now->n + 1)) != GCK_OK) {
        return status;
    }
    fill(grid, next);
    gck_buckets_extend(&grid->next, options, n, grid->width, grid->moves, &grid->now, grid->ways);
    for (int o = 0; o < n; o++) {            /* the moves are sorted by time now */
        grid->shifts[grid->moves[o].option] = grid->moves[o].shift;
    }
    out->n = 0;
    out->at[out->n++] = first;
    for (int64_t b = 0; b < now->n; b++) {
        const gck_label *before = &out->at[out->n - 1];
        if (now->time[b + 1] < before->time) {
            const gck_option *option = &options[grid->ways[b] / 2];
            const int64_t to = gck_smaller(b + grid->shifts[grid->ways[b] / 2], grid->next.n);
            const uint32_t from = grid->label[to - grid->ways[b] % 2];
            const gck_label new = now->time[b + 1] > last.time ? gck_label_extend(&next->at[from], from, option)
                                                               : last;
            out->n -= new.bytes == before->bytes;
            out->at[out->n++] = new;
        }
    }
    return GCK_OK;
}
