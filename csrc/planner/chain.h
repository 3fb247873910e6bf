/* chain.h: regions, their options, and what these need. */
#ifndef GRADCKPT_CHAIN_H
#define GRADCKPT_CHAIN_H

#include "gradckpt.h"

#define GCK_UNAVAILABLE INT64_MAX            /* need of an option that the region does not have */
enum { GCK_MAX_REGIONS = 1 << 20, GCK_MAX_OPTIONS = 1024 };

/* Tables are row-major: option o of region l is at l * options + o. */
typedef struct {
    int64_t        regions, options;
    const int64_t *kept, *need, *time;       /* bytes, which may be negative; bytes; ns >= 0 */
    const int64_t *error;                    /* >= 0; NULL: no option has one               */
    int64_t        last_need;                /* GCK_UNAVAILABLE: no budget is enough        */
} gck_chain;

/* One option of one region. */
typedef struct {
    int64_t  kept, need, time, error;
    uint32_t index;
} gck_option;

/* Memory of the planner; NULL when there is none.  free() gives it back. */
void *gck_planner_memory(int64_t count, size_t size);

/* GCK_OK, or GCK_E_RANGE when a time or an error is negative, or when the sum over regions of the
 * largest number of bytes, time or error reaches 2**60. */
int gck_chain_check(const gck_chain *chain);

/* Add an option to n others, unless one of them is as good in everything; remove those that it is
 * as good as.  Returns how many there are then. */
int gck_options_add(gck_option *options, int n, const gck_option *option);

/* Write the available options of a region to `options`, in their order and added as above; return
 * how many. */
int gck_chain_options(const gck_chain *chain, int64_t region, gck_option *options);

#endif
