/* slack_grid.h: one label for each bucket of slack, and a bound on what that may cost. */
#ifndef GRADCKPT_SLACK_GRID_H
#define GRADCKPT_SLACK_GRID_H

#include "planner/chain.h"

/* Bucket b is the slack from first + b * width to its end, first + (b + 1) * width - 1.  Entry
 * b + 1 of each list is of bucket b, and entry 0 of what is before. */
typedef struct {
    int64_t  first, n;
    int64_t *time;                           /* n + 1: the least up to the bucket's end; GCK_NEVER: none */
    int64_t *bytes;                          /* n + 1: what the label of this time needs; or NULL  */
    int64_t *fall;                           /* n + 1: how much a bucket more saves, descending; or NULL */
} gck_buckets;

/* An option as it moves slack to the next region, in whole buckets and bytes. */
typedef struct {
    int64_t  shift;                          /* bucket b leads to bucket b + shift */
    int64_t  room;                           /* what the end of bucket 0 leaves    */
    int64_t  begin;                          /* the first bucket that has its need */
    int64_t  time;
    uint32_t option;                         /* its place among the options */
} gck_move;

/* Memory to work in: the next region's cheapest label for each bucket, and this region's. */
typedef struct {
    gck_buckets next, now;                   /* malloc, by next.time */
    uint32_t   *label;                       /* for each bucket of `next` the number of its label; malloc */
    int64_t    *ways;                        /* for each bucket of `now`; with next.time */
    gck_move   *moves;                       /* malloc */
    int         shift;                       /* a bucket is 2**shift bytes */
} gck_slack_grid;

/* Set the most bytes between two labels of one region; return 0 if no budget is large enough.
 * `options` has room for those of a region. */
int gck_slack_range(const gck_chain *chain, gck_option *options, int64_t *range);

/* For `buckets` buckets at most, and labels that lie at most `range` bytes apart.  GCK_OK or
 * GCK_E_MEMORY.  Give it back in either case. */
int  gck_slack_grid_init(gck_slack_grid *grid, int64_t options, int64_t buckets, int64_t range);
void gck_slack_grid_free(gck_slack_grid *grid);

/* Set `out` to an extension of `next` for each bucket, to the one of fewest bytes, and to the one of
 * fewest bytes among the cheapest of all: by ascending bytes and descending costs. */
int gck_slack_grid_extend(gck_slack_grid *grid, const gck_labels *next, const gck_option *options, int n,
                          gck_labels *out);

/* Where a bound begins, and what it is of. */
typedef struct {
    const gck_chain  *chain;
    const gck_labels *labels;                /* of region `from`: all that are in some best plan */
    int64_t           from, buckets;
    int64_t           budget, most_error;    /* as gck_chain_options() has it */
    gck_price         price;
} gck_bound;

/* No choice within the budget costs less than *cost.  Any choices within it are good: the bound is
 * tighter the better they are.  GCK_OK or GCK_E_MEMORY. */
int gck_lower_bound(const gck_bound *bound, const uint32_t *choices, int64_t *cost);

#endif
