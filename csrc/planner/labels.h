/* labels.h: what is left of all choices from one region to the last: bytes, error and time. */
#ifndef GRADCKPT_LABELS_H
#define GRADCKPT_LABELS_H

#include "planner/chain.h"

/* Options chosen for this region and those after it: the slack that they need, the sum of their
 * errors and of their times.  Both are 0 or more. */
typedef struct {
    int64_t  bytes, error, time;
    uint32_t from;                           /* the label of the next region that it extends */
    uint32_t option;                         /* of this region */
} gck_label;

/* By ascending bytes. */
typedef struct {
    gck_label *at;                           /* malloc */
    int64_t    n, capacity;
} gck_labels;

/* Make room for `capacity` labels; GCK_OK or GCK_E_MEMORY.  The labels are kept. */
int  gck_labels_reserve(gck_labels *labels, int64_t capacity);
void gck_labels_free(gck_labels *labels);

/* The label that takes `option` and goes on with label number `from`, which is `next`. */
static inline gck_label gck_label_extend(const gck_label *next, int64_t from, const gck_option *option)
{
    const int64_t bytes = next->bytes + option->kept;

    return (gck_label){bytes > option->need ? bytes : option->need, next->error + option->error,
                       next->time + option->time, (uint32_t)from, option->index};
}

/* Set `out` to all labels that extend one of `next` by one of n options, without those that are in
 * no way better than another.  `spare` is memory to work in.  `out` then has more than `most`
 * labels if there are more; which ones is undefined.  GCK_OK or GCK_E_MEMORY. */
int gck_labels_extend(const gck_labels *next, const gck_option *options, int n, int64_t most, gck_labels *out,
                      gck_labels *spare);

/* The same with errors. */
int gck_labels_extend_with_errors(const gck_labels *next, const gck_option *options, int n, int64_t most,
                                  gck_labels *out, gck_labels *spare);

/* Sort labels by bytes, error, time, and remove those that are in no way better than another.  It
 * stops when more than `most` are left.  GCK_OK or GCK_E_MEMORY. */
int gck_labels_sort_out(gck_labels *labels, int64_t most, gck_labels *spare);

#endif
