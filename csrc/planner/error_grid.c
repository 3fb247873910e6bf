/* error_grid.c: one label per bucket of slack and of error. */
#include "planner/error_grid.h"

#include <stdlib.h>

static int last_bit(int64_t value) { return 63 - __builtin_clzll((uint64_t)value); }

static int bucket_of(const gck_error_grid *grid, int64_t error)
{
    const int64_t scaled = (error << grid->parts) >> grid->octave;

    if (error == 0) {
        return 0;
    }
    const int above = last_bit(scaled) - grid->parts;
    return 1 + (above << grid->parts) + (int)((scaled >> above) - (INT64_C(1) << grid->parts));
}

int gck_error_grid_init(gck_error_grid *grid, const gck_chain *chain, int64_t buckets, int64_t range)
{
    int64_t least = INT64_MAX, sum = 0;

    *grid = (gck_error_grid){.buckets = buckets};
    for (int64_t l = 0; l < chain->regions; l++) {
        int64_t most = 0;
        for (int64_t at = l * chain->options; at < (l + 1) * chain->options; at++) {
            const int64_t error = chain->need[at] == GCK_UNAVAILABLE ? 0 : chain->error[at];
            least = error > 0 && error < least ? error : least;
            most = error > most ? error : most;
        }
        sum += most;
    }
    while (range >> grid->shift >= buckets) {
        grid->shift++;
    }
    grid->octave = sum > 0 ? last_bit(least) : 0;
    for (grid->parts = 3; grid->parts > 0 && bucket_of(grid, sum) >= GCK_ERROR_BUCKETS; grid->parts--) {
    }
    grid->cells = gck_planner_memory(buckets * GCK_ERROR_BUCKETS, sizeof *grid->cells);
    return grid->cells == NULL ? GCK_E_MEMORY : GCK_OK;
}

void gck_error_grid_free(gck_error_grid *grid)
{
    free(grid->cells);
    *grid = (gck_error_grid){.cells = NULL};
}

static int is_faster(const gck_label *a, const gck_label *b)
{
    return a->time != b->time ? a->time < b->time
         : a->bytes != b->bytes ? a->bytes < b->bytes
                                : a->error < b->error;
}

static int is_smaller(const gck_label *a, const gck_label *b)
{
    return a->bytes != b->bytes ? a->bytes < b->bytes
         : a->time != b->time ? a->time < b->time
                              : a->error < b->error;
}

/* Append the cells that no label of earlier buckets of slack covers, as far as a look at the
 * fastest of each bucket of error tells. */
static void collect(const gck_error_grid *grid, gck_labels *out)
{
    gck_label fastest[GCK_ERROR_BUCKETS];

    for (int c = 0; c < GCK_ERROR_BUCKETS; c++) {
        fastest[c] = (gck_label){.time = INT64_MAX};
    }
    for (int64_t b = 0; b < grid->buckets; b++) {
        const gck_label *cells = grid->cells + b * GCK_ERROR_BUCKETS;
        int64_t time = INT64_MAX;            /* of those before, with less error */
        for (int c = 0; c < GCK_ERROR_BUCKETS; c++) {
            const int64_t before = fastest[c].time;
            if (cells[c].time < time && (cells[c].time < before || cells[c].error < fastest[c].error)) {
                out->at[out->n++] = cells[c];
                fastest[c] = cells[c].time < before ? cells[c] : fastest[c];
            }
            time = before < time ? before : time;
        }
    }
}

int gck_error_grid_extend(gck_error_grid *grid, const gck_labels *next, const gck_option *options, int n,
                          int64_t first, gck_labels *out)
{
    const int64_t size = grid->buckets * GCK_ERROR_BUCKETS;
    const int status = gck_labels_reserve(out, size + GCK_ERROR_BUCKETS);
    gck_label smallest[GCK_ERROR_BUCKETS];

    if (status != GCK_OK) {
        return status;
    }
    for (int64_t i = 0; i < size; i++) {
        grid->cells[i].time = INT64_MAX;
    }
    for (int c = 0; c < GCK_ERROR_BUCKETS; c++) {
        smallest[c] = (gck_label){.bytes = INT64_MAX};
    }
    for (int o = 0; o < n; o++) {
        for (int64_t i = 0; i < next->n; i++) {
            const gck_label new = gck_label_extend(&next->at[i], i, &options[o]);
            const int c = bucket_of(grid, new.error);
            gck_label *cell = &grid->cells[((new.bytes - first) >> grid->shift) * GCK_ERROR_BUCKETS + c];
            if (is_faster(&new, cell)) {
                *cell = new;
            }
            if (is_smaller(&new, &smallest[c])) {
                smallest[c] = new;
            }
        }
    }
    out->n = 0;
    for (int c = 0; c < GCK_ERROR_BUCKETS; c++) {
        if (smallest[c].bytes != INT64_MAX) {
            out->at[out->n++] = smallest[c];
        }
    }
    collect(grid, out);
    return GCK_OK;
}
