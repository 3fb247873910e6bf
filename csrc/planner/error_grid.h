/* error_grid.h: labels of bytes, error and time, thinned to one per bucket of slack and error. */
#ifndef GRADCKPT_ERROR_GRID_H
#define GRADCKPT_ERROR_GRID_H

#include "planner/labels.h"

enum { GCK_ERROR_BUCKETS = 64 };

/* A bucket is 2**shift bytes of slack.  Bucket 0 of error is no error at all; the others have the
 * same number in each octave: 2**parts. */
typedef struct {
    gck_label *cells;                        /* buckets * GCK_ERROR_BUCKETS; malloc */
    int64_t    buckets;
    int        shift, parts, octave;         /* the first octave begins at 2**octave */
} gck_error_grid;

/* `range`: the most bytes between two labels.  GCK_OK or GCK_E_MEMORY. */
int  gck_error_grid_init(gck_error_grid *grid, const gck_chain *chain, int64_t buckets, int64_t range);
void gck_error_grid_free(gck_error_grid *grid);

/* Set `out`, in no order, to the fastest extension of `next` in each pair of buckets, and to the
 * one of fewest bytes in each bucket of error.  No extension has fewer bytes than `first`. */
int gck_error_grid_extend(gck_error_grid *grid, const gck_labels *next, const gck_option *options, int n,
                          int64_t first, gck_labels *out);

#endif
