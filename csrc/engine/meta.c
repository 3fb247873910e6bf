/* meta.c: the metadata that the determinism check compares. */
#include "frame.h"

#include <string.h>

static PyObject *attributes(const gck_py *py, PyObject *x)
{
    PyObject *shape = PyObject_GetAttr(x, py->names.shape);
    PyObject *dtype = shape ? PyObject_GetAttr(x, py->names.dtype) : NULL;
    PyObject *device = dtype ? PyObject_GetAttr(x, py->names.device) : NULL;
    PyObject *objects = device ? PyTuple_Pack(3, shape, dtype, device) : NULL;

    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(device);
    return objects;
}

int gck_meta_of(const gck_frame *frame, PyObject *x, int whole, gck_meta *meta)
{
    const gck_py *py = &frame->state->py;
    gck_dl_tensor dl;

    memset(meta, 0, sizeof *meta);
    if (frame->metadata_fn != NULL) {
        PyObject *value = PyObject_CallFunctionObjArgs(frame->metadata_fn, x, NULL);
        meta->objects = value != NULL ? PyTuple_Pack(1, value) : NULL;
        Py_XDECREF(value);
        return meta->objects == NULL ? -1 : 0;
    }
    if (!whole && ((PyObject *)Py_TYPE(x) == py->Tensor || (PyObject *)Py_TYPE(x) == py->Parameter)) {
        const int shown = gck_read_dlpack(py, x, &dl);
        if (shown < 0) {
            return -1;
        }
        if (shown && dl.ndim <= GCK_META_INLINE) {             /* else the long way */
            meta->dtype = dl.dtype;
            meta->device = dl.device;
            meta->ndim = dl.ndim;
            for (int d = 0; d < dl.ndim; d++) {
                meta->sizes[d] = dl.shape[d];
            }
            return 0;
        }
    }
    meta->objects = attributes(py, x);
    return meta->objects == NULL ? -1 : 0;
}

/* (shape, dtype, device) as torch's objects: new reference. */
static PyObject *as_objects(const gck_py *py, const gck_meta *meta)
{
    PyObject *numbers = gck_meta_describe(meta), *convert, *objects = NULL;

    if (numbers == NULL || meta->objects != NULL) {
        return numbers;
    }
    convert = PyObject_GetAttrString(py->shim, "from_dlpack");
    if (convert != NULL) {
        objects = PyObject_CallObject(convert, numbers);
    }
    Py_XDECREF(convert);
    Py_DECREF(numbers);
    return objects;
}

int gck_meta_same(const gck_py *py, const gck_meta *a, const gck_meta *b)
{
    if (a->objects != NULL || b->objects != NULL) {      /* a subclass may come back detached, as a plain tensor */
        PyObject *x = as_objects(py, a), *y = x ? as_objects(py, b) : NULL;
        const int same = y ? PyObject_RichCompareBool(x, y, Py_EQ) : -1;
        Py_XDECREF(x);
        Py_XDECREF(y);
        return same;
    }
    return a->ndim == b->ndim && memcmp(&a->dtype, &b->dtype, sizeof a->dtype) == 0
        && memcmp(&a->device, &b->device, sizeof a->device) == 0
        && memcmp(a->sizes, b->sizes, sizeof(int64_t) * (size_t)a->ndim) == 0;
}

PyObject *gck_meta_describe(const gck_meta *meta)
{
    PyObject *sizes;

    if (meta->objects != NULL) {
        return Py_NewRef(meta->objects);
    }
    sizes = PyList_New(0);
    for (int d = 0; sizes != NULL && d < meta->ndim; d++) {
        PyObject *size = PyLong_FromLongLong(meta->sizes[d]);
        if (size == NULL || PyList_Append(sizes, size) < 0) {
            Py_CLEAR(sizes);
        }
        Py_XDECREF(size);
    }
    return sizes == NULL ? NULL : Py_BuildValue("(Niiii)", sizes, meta->dtype.code, meta->dtype.bits,
                                                meta->device.device_type, meta->device.device_id);
}

void gck_meta_clear(gck_meta *meta) { Py_CLEAR(meta->objects); }
