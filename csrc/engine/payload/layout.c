/* layout.c: strides in the order of their size, with and without holes and overlaps. */
#include "engine/payload/layout.h"

/* Sort the dimensions by stride, the smallest first; of equal ones the last dimension first. */
static void sort(const gck_tensor *x, const int64_t *strides, int *order)
{
    int n = 0;

    for (int d = x->ndim - 1; d >= 0; d--) {
        int at = n++;
        for (; at > 0 && strides[order[at - 1]] > strides[d]; at--) {
            order[at] = order[at - 1];
        }
        order[at] = d;
    }
}

/* Check every stride, also of dimensions with one element. */
static int is_plain(const gck_tensor *x)
{
    int64_t expected = 1;
    int plain = 1;

    for (int d = x->ndim - 1; d >= 0; d--) {
        plain &= x->steps[d] == expected;
        expected *= x->sizes[d] > 1 ? x->sizes[d] : 1;
    }
    return plain;
}

gck_layout gck_layout_of(const gck_tensor *x, int exact, int64_t *strides)
{
    int order[GCK_MAX_DIM], expanded = 0, holes = 0, overlaps = 0;
    int64_t reach = 1, dense = 1;                /* memory for the dimensions so far, as they are and without holes */

    if (is_plain(x)) {
        return GCK_LAYOUT_PLAIN;
    }
    sort(x, x->steps, order);
    for (int i = 0; i < x->ndim; i++) {
        const int d = order[i];
        const int64_t step = x->steps[d], last = x->sizes[d] - 1;
        const int moves = last > 0 && x->numel > 0;
        strides[d] = exact || !moves ? step : dense;
        if (moves && step == 0) {
            expanded = 1;
        } else if (moves) {
            overlaps |= step < reach;
            holes |= step > reach;
            reach += step * last;
            dense *= last + 1;
        }
    }
    return !exact ? overlaps || expanded ? GCK_LAYOUT_PLAIN : GCK_LAYOUT_STRIDED
         : overlaps ? holes ? GCK_LAYOUT_TANGLED : GCK_LAYOUT_RUN
         : expanded ? GCK_LAYOUT_EXPANDED : GCK_LAYOUT_STRIDED;
}

int gck_is_dense(const gck_tensor *x)
{
    int order[GCK_MAX_DIM];
    int64_t expected = 1;

    sort(x, x->strides, order);
    for (int i = 0; i < x->ndim; i++) {
        const int d = order[i];
        if (x->sizes[d] != 1 && x->strides[d] != expected) {
            return 0;
        }
        expected *= x->sizes[d];
    }
    return 1;
}

int64_t gck_reach(int ndim, const int64_t *sizes, const int64_t *strides)
{
    int64_t reach = 1;

    for (int d = 0; d < ndim; d++) {
        if (sizes[d] == 0) {
            return 0;
        }
        reach += (sizes[d] - 1) * strides[d];    /* torch has no negative strides */
    }
    return reach;
}

int64_t gck_distinct(const gck_tensor *x)
{
    int64_t n = 1;

    for (int d = 0; d < x->ndim; d++) {
        n *= x->steps[d] == 0 && x->sizes[d] > 0 ? 1 : x->sizes[d];
    }
    return n;
}
