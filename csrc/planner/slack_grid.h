/* slack_grid.h: labels of bytes and time, thinned to one per bucket of slack. */
#ifndef GRADCKPT_SLACK_GRID_H
#define GRADCKPT_SLACK_GRID_H

#include "planner/labels.h"

/* Memory to work in: the next region's fastest label for each bucket, and this region's. */
typedef struct {
    int64_t  *bytes, *time;                  /* buckets + 2; malloc */
    uint32_t *label;                         /* the same; malloc    */
    int64_t  *best;                          /* buckets; malloc     */
    uint32_t *way;                           /* the same; malloc    */
    int64_t   buckets, width;                /* a bucket is `width` bytes of slack */
} gck_slack_grid;

/* GCK_OK or GCK_E_MEMORY.  Give it back in either case. */
int  gck_slack_grid_init(gck_slack_grid *grid, int64_t buckets, int64_t width);
void gck_slack_grid_free(gck_slack_grid *grid);

/* Set `out` to the fastest extension of `next` in each bucket, to the one of fewest bytes, and to
 * the one of fewest bytes among the fastest of all: by ascending bytes and descending times.
 * Neither next's labels nor these lie further apart than `buckets` times `width`. */
int gck_slack_grid_extend(gck_slack_grid *grid, const gck_labels *next, const gck_option *options, int n,
                          gck_labels *out);

#endif
