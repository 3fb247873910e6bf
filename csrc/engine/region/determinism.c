/* determinism.c: the metadata that the determinism check compares. */
#include "engine/region/determinism.h"

#include "torch/calls.h"
#include "torch/input.h"
#include "torch/tensor.h"

#include <string.h>

int gck_metadata_of(const gck_py *py, PyObject *reader, PyObject *x, int whole, gck_metadata *meta)
{
    gck_dl_tensor dl;

    memset(meta, 0, sizeof *meta);
    if (reader != NULL) {
        meta->objects = Py_BuildValue("(N)", PyObject_CallFunctionObjArgs(reader, x, NULL));
        return meta->objects == NULL ? -1 : 0;
    }
    if (!whole && gck_is_plain_tensor(py, x)) {
        const int shown = gck_read_dlpack(py, x, &dl);
        if (shown < 0) {
            return -1;
        }
        if (shown && dl.ndim <= GCK_METADATA_INLINE) {             /* else by attributes */
            meta->dtype = dl.dtype;
            meta->device = dl.device;
            meta->ndim = dl.ndim;
            for (int d = 0; d < dl.ndim; d++) {
                meta->sizes[d] = dl.shape[d];
                meta->strides[d] = dl.strides[d];
            }
            return 0;
        }
    }
    meta->objects = PyObject_CallFunction(py->call.metadata, "O", x);
    return meta->objects == NULL ? -1 : 0;
}

int gck_metadata_same(const gck_py *py, const gck_metadata *a, const gck_metadata *b)
{
    if (a->objects != NULL || b->objects != NULL) {      /* a subclass may come back detached, as a plain tensor */
        return gck_is_true(gck_invoke(py->call.same_metadata, Py_BuildValue("(NN)", gck_metadata_describe(a),
                                                                            gck_metadata_describe(b))));
    }
    return a->ndim == b->ndim && memcmp(&a->dtype, &b->dtype, sizeof a->dtype) == 0
        && memcmp(&a->device, &b->device, sizeof a->device) == 0
        && memcmp(a->sizes, b->sizes, sizeof(int64_t) * (size_t)a->ndim) == 0;
}

int gck_metadata_same_layout(const gck_metadata *a, const gck_metadata *b)
{
    int64_t numel = 1;
    int same = 1;

    if (a->objects != NULL || b->objects != NULL) {
        return 1;
    }
    for (int d = 0; d < a->ndim; d++) {          /* torch does not care for the stride of one element */
        same &= a->sizes[d] == 1 || a->strides[d] == b->strides[d];
        numel *= a->sizes[d];
    }
    return same || numel == 0;
}

PyObject *gck_metadata_strides(const gck_metadata *meta)
{
    return meta->objects != NULL ? Py_NewRef(Py_None) : gck_sizes(meta->ndim, meta->strides);
}

PyObject *gck_metadata_describe(const gck_metadata *meta)
{
    return meta->objects != NULL ? Py_NewRef(meta->objects)
        : Py_BuildValue("(Niiii)", gck_sizes(meta->ndim, meta->sizes), meta->dtype.code, meta->dtype.bits,
                        meta->device.device_type, meta->device.device_id);
}

void gck_metadata_clear(gck_metadata *meta) { Py_CLEAR(meta->objects); }
