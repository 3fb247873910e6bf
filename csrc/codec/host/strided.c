/* strided.c: an odometer over the outer dimensions, a plain loop over the inner one. */
#include "codec/host/strided.h"

#include <string.h>

typedef struct {
    const gck_tensor *x;
    int64_t index[GCK_MAX_DIM];   /* of the next value                              */
    int64_t offset;               /* of the next value, in elements from x->data    */
} odometer;

static void odometer_set(odometer *o, const gck_tensor *x, int64_t linear)
{
    o->x = x;
    o->offset = 0;
    for (int d = x->ndim - 1; d >= 0; d--) {
        o->index[d] = linear % x->sizes[d];
        linear /= x->sizes[d];
        o->offset += o->index[d] * x->strides[d];
    }
}

/* Advance by `step` values, which stay inside the innermost dimension. */
static void odometer_advance(odometer *o, int64_t step)
{
    const gck_tensor *x = o->x;
    int d = x->ndim - 1;

    o->index[d] += step;
    o->offset += step * x->strides[d];
    while (d > 0 && o->index[d] == x->sizes[d]) {
        o->offset -= o->index[d] * x->strides[d];
        o->index[d] = 0;
        d--;
        o->index[d]++;
        o->offset += x->strides[d];
    }
}

/* Values of the innermost dimension from here on, at most `count`. */
static int64_t odometer_run(const odometer *o, int64_t count)
{
    const int d = o->x->ndim - 1;
    const int64_t left = o->x->sizes[d] - o->index[d];

    return left < count ? left : count;
}

/* With a constant item, the compiler knows how long each copy is. */
static inline __attribute__((always_inline)) void copy_each(char *dst, int64_t dst_stride, const char *src,
                                                            int64_t src_stride, int64_t count, int64_t item)
{
    for (int64_t i = 0; i < count; i++) {
        memcpy(dst + i * dst_stride * item, src + i * src_stride * item, (size_t)item);
    }
}

static void copy_run(char *dst, int64_t dst_stride, const char *src, int64_t src_stride, int64_t count, size_t item)
{
    if (dst_stride == 1 && src_stride == 1) {
        memcpy(dst, src, (size_t)count * item);
    } else if (item == 1) {
        copy_each(dst, dst_stride, src, src_stride, count, 1);
    } else if (item == 2) {
        copy_each(dst, dst_stride, src, src_stride, count, 2);
    } else {
        copy_each(dst, dst_stride, src, src_stride, count, 4);
    }
}

/* Values of x to `packed`, or from there. */
static void copy_values(const gck_tensor *x, int64_t first, int64_t count, char *packed, int gather)
{
    const size_t item = gck_itemsize(x->dtype);
    const int flat = x->strides == NULL || x->ndim == 0;
    const int64_t stride = flat ? 1 : x->strides[x->ndim - 1];
    odometer o = {.offset = first};

    if (!flat) {
        odometer_set(&o, x, first);
    }
    for (int64_t run; count > 0; count -= run, packed += (size_t)run * item) {
        char *at = (char *)x->data + o.offset * (int64_t)item;
        run = flat ? count : odometer_run(&o, count);
        copy_run(gather ? packed : at, gather ? 1 : stride, gather ? at : packed, gather ? stride : 1, run, item);
        if (!flat) {
            odometer_advance(&o, run);
        }
    }
}

void gck_gather(const gck_tensor *x, int64_t first, int64_t count, void *dst) { copy_values(x, first, count, dst, 1); }

void gck_scatter(const gck_tensor *x, int64_t first, int64_t count, const void *src)
{
    copy_values(x, first, count, (char *)src, 0);
}
