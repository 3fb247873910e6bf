/* buckets.h: the least time for each bucket of slack, from one region to the next. */
#ifndef GRADCKPT_BUCKETS_H
#define GRADCKPT_BUCKETS_H

#include "planner/chain.h"

#define GCK_NEVER (INT64_C(1) << 61)         /* a time beyond all sums, which may be added to */

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

/* Set `now`'s times to the least over all options of what the end of each bucket can have: an
 * option gets the time of the bucket to which it leads.  That is a lower bound.  `moves`: room for
 * n. */
void gck_buckets_bound(const gck_buckets *next, const gck_option *options, int n, int64_t width, gck_move *moves,
                       gck_buckets *now);

/* Find a label for each bucket, of those that need no more than its end.  `ways`, then, is twice
 * the option's place, and 1 more where the label is not that of the bucket to which it leads but of
 * the one before.  The label is not always the fastest: what it leaves of a bucket is worth as much
 * as next's times fall, else labels would need a little more from region to region.  now->time is
 * GCK_NEVER where there is no label.  A bucket is 2**shift wide. */
void gck_buckets_choose(const gck_buckets *next, const gck_option *options, int n, int shift, gck_move *moves,
                        gck_buckets *now, int64_t *ways);

/* Round down and up. */
static inline int64_t gck_floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
static inline int64_t gck_ceil_div(int64_t a, int64_t b) { return -gck_floor_div(-a, b); }

static inline int64_t gck_larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t gck_smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The bucket to which bucket b leads, as far as there are any. */
static inline int64_t gck_move_to(const gck_move *move, int64_t b, const gck_buckets *next)
{
    return gck_smaller(b + move->shift, next->n);
}

#endif
