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

static void copy_run(char *dst, int64_t dst_stride, const char *src, int64_t src_stride, int64_t count, size_t item)
{
    if (dst_stride == 1 && src_stride == 1) {
        memcpy(dst, src, (size_t)count * item);
    } else if (item == 1) {
        for (int64_t i = 0; i < count; i++) {
            dst[i * dst_stride] = src[i * src_stride];
        }
    } else if (item == 2) {
        for (int64_t i = 0; i < count; i++) {
            memcpy(dst + i * dst_stride * 2, src + i * src_stride * 2, 2);
        }
    } else {
        for (int64_t i = 0; i < count; i++) {
            memcpy(dst + i * dst_stride * 4, src + i * src_stride * 4, 4);
        }
    }
}

void gck_gather(const gck_tensor *x, int64_t first, int64_t count, void *dst)
{
    const size_t item = gck_itemsize(x->dtype);
    odometer o;
    char *to = dst;

    if (x->strides == NULL || x->ndim == 0) {
        memcpy(dst, (const char *)x->data + (size_t)first * item, (size_t)count * item);
        return;
    }
    odometer_set(&o, x, first);
    while (count > 0) {
        const int64_t run = odometer_run(&o, count);
        copy_run(to, 1, (const char *)x->data + o.offset * (int64_t)item, x->strides[x->ndim - 1], run, item);
        to += (size_t)run * item;
        count -= run;
        odometer_advance(&o, run);
    }
}

void gck_scatter(const gck_tensor *x, int64_t first, int64_t count, const void *src)
{
    const size_t item = gck_itemsize(x->dtype);
    odometer o;
    const char *from = src;

    if (x->strides == NULL || x->ndim == 0) {
        memcpy((char *)x->data + (size_t)first * item, src, (size_t)count * item);
        return;
    }
    odometer_set(&o, x, first);
    while (count > 0) {
        const int64_t run = odometer_run(&o, count);
        copy_run((char *)x->data + o.offset * (int64_t)item, x->strides[x->ndim - 1], from, 1, run, item);
        from += (size_t)run * item;
        count -= run;
        odometer_advance(&o, run);
    }
}
