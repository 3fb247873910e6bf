/* slack_grid.h: labels of bytes and time, thinned to one per bucket of slack. */
#ifndef GRADCKPT_SLACK_GRID_H
#define GRADCKPT_SLACK_GRID_H

#include "planner/buckets.h"
#include "planner/labels.h"

/* Memory to work in: the next region's fastest label for each bucket, and this region's. */
typedef struct {
    gck_buckets next, now;                   /* malloc */
    uint32_t   *label;                       /* for each bucket of `next` the number of its label; malloc */
    int64_t    *ways;                        /* for each bucket of `now`; malloc */
    gck_move   *moves;                       /* malloc */
    int64_t    *shifts;                      /* of each option's move; malloc */
    int         shift;                       /* a bucket is 2**shift bytes */
} gck_slack_grid;

/* For `buckets` buckets at most, and labels that lie at most `range` bytes apart.  GCK_OK or
 * GCK_E_MEMORY.  Give it back in either case. */
int  gck_slack_grid_init(gck_slack_grid *grid, int64_t options, int64_t buckets, int64_t range);
void gck_slack_grid_free(gck_slack_grid *grid);

/* Set `out` to an extension of `next` for each bucket, to the one of fewest bytes, and to the one of
 * fewest bytes among the fastest of all: by ascending bytes and descending times. */
int gck_slack_grid_extend(gck_slack_grid *grid, const gck_labels *next, const gck_option *options, int n,
                          gck_labels *out);

#endif
