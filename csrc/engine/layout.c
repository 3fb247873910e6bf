/* layout.c: strides without holes. */
#include "layout.h"

int gck_is_dense(const gck_tensor *x)
{
    int64_t expected = 1;
    uint64_t used = 0;

    for (int found = 0; found < x->ndim; found++) {
        int next = -1;
        for (int d = 0; d < x->ndim; d++) {
            if (!(used >> d & 1) && (next < 0 || x->strides[d] < x->strides[next]
                                     || (x->strides[d] == x->strides[next] && x->sizes[d] < x->sizes[next]))) {
                next = d;
            }
        }
        used |= (uint64_t)1 << next;
        if (x->sizes[next] != 1) {
            if (x->strides[next] != expected) {
                return 0;
            }
            expected *= x->sizes[next];
        }
    }
    return 1;
}
