/* slack_grid.c: one label per bucket of slack. */
#include "planner/slack_grid.h"

#include <stdlib.h>

#define NEVER (INT64_C(1) << 61)             /* a time beyond all sums, which may be added to */

int gck_slack_grid_init(gck_slack_grid *grid, int64_t buckets, int64_t width)
{
    *grid = (gck_slack_grid){.buckets = buckets, .width = width};
    grid->bytes = gck_planner_memory(buckets + 2, sizeof *grid->bytes);
    grid->time = gck_planner_memory(buckets + 2, sizeof *grid->time);
    grid->label = gck_planner_memory(buckets + 2, sizeof *grid->label);
    grid->best = gck_planner_memory(buckets, sizeof *grid->best);
    grid->way = gck_planner_memory(buckets, sizeof *grid->way);
    return grid->bytes == NULL || grid->time == NULL || grid->label == NULL || grid->best == NULL
           || grid->way == NULL ? GCK_E_MEMORY : GCK_OK;
}

void gck_slack_grid_free(gck_slack_grid *grid)
{
    free(grid->bytes);
    free(grid->time);
    free(grid->label);
    free(grid->best);
    free(grid->way);
    *grid = (gck_slack_grid){.bytes = NULL};
}

static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Let entry j + 1 be the fastest of `next` up to the end of bucket j; entry 0 never fits in time,
 * the last one never in bytes.  Returns the number of buckets. */
static int64_t fill(gck_slack_grid *grid, const gck_labels *next)
{
    const int64_t first = next->at[0].bytes;
    int64_t i = 0, n = 0;

    grid->bytes[0] = INT64_MIN;
    grid->time[0] = NEVER;
    for (int64_t end = first + grid->width; i < next->n; end += grid->width) {
        while (i < next->n && next->at[i].bytes < end) {
            i++;
        }
        n++;
        grid->bytes[n] = next->at[i - 1].bytes;
        grid->time[n] = next->at[i - 1].time;
        grid->label[n] = (uint32_t)(i - 1);
    }
    grid->bytes[n + 1] = INT64_MAX;
    grid->time[n + 1] = NEVER;
    return n;
}

/* For `count` buckets: take the fastest label that fits `room`, which grows with each, if it makes
 * the bucket's best faster.  It is this bucket's of the next region or the one before. */
static void take(const int64_t *bytes, const int64_t *time, int64_t room, int64_t width, int64_t cost, uint32_t way,
                 int64_t *best, uint32_t *ways, int64_t count)
{
    for (int64_t b = 0; b < count; b++, room += width) {
        const int before = bytes[b] > room;
        const int64_t new = (before ? time[b - 1] : time[b]) + cost;
        const int faster = new < best[b];
        best[b] = faster ? new : best[b];
        ways[b] = faster ? way + (uint32_t)before : ways[b];
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
    enum { TILE = 1024 };                    /* buckets whose memory stays in the first cache */
    const int64_t width = grid->width, known = fill(grid, next);
    const gck_label first = first_of(next, options, n), last = last_of(next, options, n);
    const int64_t buckets = (last.bytes - first.bytes) / width + 1;
    const int status = gck_labels_reserve(out, buckets + 1);

    if (status != GCK_OK) {
        return status;
    }
    for (int64_t b = 0; b < buckets; b++) {
        grid->best[b] = NEVER;
    }
    for (int64_t tile = 0; tile < buckets; tile += TILE) {
        for (int o = 0; o < n; o++) {
            /* Room for the next region at the end of this one's bucket 0, and the bucket there. */
            const int64_t room = first.bytes + width - 1 - options[o].kept;
            const int64_t shift = floor_div(room - next->at[0].bytes, width);
            const int64_t begin = larger(floor_div(options[o].need - first.bytes, width), larger(-shift, 0));
            /* Beyond the next region's last bucket its last label stays the fastest. */
            const int64_t end = larger(known - shift, begin) + 1;
            const int64_t from = larger(begin, tile), to = smaller(smaller(end, buckets), tile + TILE);
            const int64_t at = smaller(from + shift, known);
            if (from < to) {
                take(grid->bytes + at + 1, grid->time + at + 1, room + from * width, width, options[o].time,
                     (uint32_t)o * 2, grid->best + from, grid->way + from, to - from);
            }
        }
    }
    out->n = 0;
    out->at[out->n++] = first;
    for (int64_t b = 0; b < buckets; b++) {
        if (grid->best[b] < out->at[out->n - 1].time) {
            const gck_option *option = &options[grid->way[b] / 2];
            const int64_t room = first.bytes + width - 1 - option->kept;
            const int64_t at = smaller(b + floor_div(room - next->at[0].bytes, width), known) - grid->way[b] % 2;
            const uint32_t from = grid->label[at + 1];
            const gck_label new = grid->best[b] > last.time ? gck_label_extend(&next->at[from], from, option) : last;
            out->n -= new.bytes == out->at[out->n - 1].bytes;
            out->at[out->n++] = new;
        }
    }
    return GCK_OK;
}
