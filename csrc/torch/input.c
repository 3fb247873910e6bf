/* input.c: facts about a tensor.  Whenever the memory behind a tensor is not simply its values, it
 * has no view, and the reason is returned. */
#include "torch/input.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/device.h"
#include "torch/stream.h"

enum { DEVICE_STRIDED_DIMS = 8 };
    /* strided dimensions that the kernels accept; a tensor with more stays uncompressed */

int gck_version_of(const gck_py *py, PyObject *x, int64_t *version)
{
    *version = gck_as_int64(PyObject_GetAttr(x, py->names._version));
    return *version < 0 && PyErr_Occurred() ? gck_clear_refusal() : 0;
}

int gck_storage_of(const gck_py *py, PyObject *x, const void **address)
{
    GCK_SCOPED PyObject *storage = PyObject_CallMethodObjArgs(x, py->names.untyped_storage, NULL);
    GCK_SCOPED PyObject *value = storage != NULL ? PyObject_CallMethodObjArgs(storage, py->names.data_ptr, NULL) : NULL;

    *address = value != NULL ? PyLong_AsVoidPtr(value) : NULL;
    return PyErr_Occurred() ? gck_clear_refusal() : 0;
}

/* ---- views ---- */

static int view_dtype(gck_dl_dtype dtype, gck_dtype *out)
{
    static const gck_dl_dtype known[GCK_NDTYPES] = {
        {GCK_DL_FLOAT, 32, 1}, {GCK_DL_FLOAT, 16, 1}, {GCK_DL_BFLOAT, 16, 1}, {GCK_DL_BOOL, 8, 1},
    };

    for (int d = 0; d < GCK_NDTYPES; d++) {
        if (dtype.code == known[d].code && dtype.bits == known[d].bits && dtype.lanes == known[d].lanes) {
            *out = (gck_dtype)d;
            return 0;
        }
    }
    return -1;
}

int gck_read_dlpack(const gck_py *py, PyObject *x, gck_dl_tensor *dl)
{
    if (py->dlpack->dltensor_from_py_object_no_sync(x, dl) == 0) {
        return 1;
    }
    if (PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return -1;
    }
    PyErr_Clear();                               /* no Python has run: torch reports that it has no memory */
    return 0;
}

int gck_view_of(gck_py *py, PyObject *x, gck_tensor *view)
{
    gck_dl_tensor dl;

    if (!gck_is_plain_tensor(py, x)) {
        return GCK_SKIP_SUBCLASS;                /* DLPack would ask the subclass, in Python */
    }
    if (gck_read_dlpack(py, x, &dl) <= 0) {
        return PyErr_Occurred() ? -1 : GCK_SKIP_LAYOUT;
    }
    if (view_dtype(dl.dtype, &view->dtype) < 0) {
        return dl.dtype.code == GCK_DL_FLOAT && dl.dtype.bits == 64 ? GCK_SKIP_FLOAT64 : GCK_SKIP_DTYPE;
    }
    if ((view->device = gck_device_of_dlpack(dl.device)) == GCK_NO_DEVICE) {
        return GCK_SKIP_DEVICE;
    }
    view->data = (char *)dl.data + dl.byte_offset;
    view->ndim = dl.ndim;
    view->sizes = dl.shape;
    view->numel = 1;
    for (int d = 0; d < dl.ndim; d++) {
        view->numel *= dl.shape[d];
    }
    view->steps = dl.strides;
    view->strides = dl.strides == NULL || gck_is_contiguous(dl.ndim, dl.shape, dl.strides) ? NULL : dl.strides;
    view->stream = NULL;
    view->room = 0;
    if ((dl.data == NULL && view->numel > 0)
        || view->ndim > (view->device >= 0 && view->strides != NULL ? DEVICE_STRIDED_DIMS : GCK_MAX_DIM)) {
        return GCK_SKIP_LAYOUT;
    }
    return view->device >= 0 && gck_stream_of(py->dlpack, view->device, &view->stream) != 0 ? gck_stream_unknown()
                                                                                             : GCK_COMPRESS;
}

int gck_view_again(gck_py *py, PyObject *x, const gck_tensor *was, gck_tensor *view)
{
    const int reason = gck_view_of(py, x, view);

    if (reason == GCK_COMPRESS && view->dtype == was->dtype && view->device == was->device
        && view->numel == was->numel) {
        return 0;
    }
    return reason < 0 ? -1 : gck_view_changed();
}

int gck_view_changed(void)
{
    return gck_done(PyErr_Format(
        PyExc_RuntimeError, "gradckpt: a tensor was resized or moved while gradckpt read it; do not "
        "change tensors in torch-function modes or other threads"));
}

/* 1 when the layout is strided and no lazy negation is pending; 0 or -1. */
static int is_plain(const gck_py *py, PyObject *x)
{
    GCK_SCOPED PyObject *layout = PyObject_GetAttr(x, py->names.layout);
    const int strided = layout == NULL ? -1 : layout == py->strided;
    const int neg = strided > 0 ? gck_is_true(PyObject_CallMethodObjArgs(x, py->names.is_neg, NULL)) : 1;

    return strided < 0 || neg < 0 ? -1 : !neg;
}

/* 1 when x carries a tangent of forward-mode differentiation; 0 or -1. */
static int is_dual(const gck_py *py, PyObject *x)
{
    PyObject *globals = PyModule_GetDict(py->forward_ad);
    /* borrowed; -1: none is active */
    PyObject *level = PyDict_GetItemWithError(globals, py->names._current_level);

    if (level != NULL ? PyLong_AsLong(level) < 0 : PyErr_Occurred() != NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return gck_is_true(PyObject_CallFunction(py->call.is_dual, "O", x));
}

/* ---- facts ---- */

int gck_input_storage(const gck_py *py, const gck_input *in, const void **address)
{
    int64_t offset;

    if (!(in->known & GCK_FACT_SHAPE) || in->reason != GCK_COMPRESS || in->view.numel == 0) {
        return gck_storage_of(py, in->x, address);
    }
    offset = gck_as_int64(PyObject_CallMethodObjArgs(in->x, py->names.storage_offset, NULL));
    *address = offset >= 0 ? (const char *)in->view.data - offset * (int64_t)gck_itemsize(in->view.dtype) : NULL;
    return PyErr_Occurred() ? gck_clear_refusal() : 0;
}

gck_input gck_input_of(PyObject *x) { return (gck_input){.x = Py_NewRef(x)}; }

void gck_input_clear(gck_input *in) { Py_CLEAR(in->x); }

static int read_view(gck_py *py, gck_input *in, int shape_only)
{
    const int exact = gck_is_plain_tensor(py, in->x);
    const int plain = exact && !shape_only ? is_plain(py, in->x) : 1;
    int reason = plain < 0 ? -1 : GCK_SKIP_LAYOUT;

    if (plain > 0) {
        const int dual = exact ? is_dual(py, in->x) : 0;
        reason = dual < 0 ? -1 : dual ? GCK_SKIP_DUAL : gck_view_of(py, in->x, &in->view);
    }
    in->reason = reason < 0 ? GCK_SKIP_LAYOUT : (gck_skip_reason)reason;
    return reason < 0 ? -1 : 0;
}

int gck_input_read(gck_py *py, gck_input *in, int facts)
{
    const int missing = facts & ~in->known, view = missing & GCK_FACT_VIEW;

    if (((missing & GCK_FACT_GRAD) && (in->requires_grad = gck_attr_is_true(in->x, py->names.requires_grad)) < 0)
        || ((missing & GCK_FACT_LEAF) && (in->leaf = gck_attr_is_true(in->x, py->names.is_leaf)) < 0)
        || ((missing & GCK_FACT_VERSION) && gck_version_of(py, in->x, &in->version) < 0)
        || ((missing & (GCK_FACT_VIEW | GCK_FACT_SHAPE)) && read_view(py, in, !view) < 0)) {
        return -1;                               /* last, because it expires */
    }
    in->known |= facts | (view ? GCK_FACT_SHAPE : 0);
    return 0;
}

static int reason_of(const gck_input *in, const gck_codec *codec, int64_t min_numel)
{
    return in->reason != GCK_COMPRESS                     ? in->reason
         : !(codec->dtypes & GCK_BIT(in->view.dtype)) ? GCK_SKIP_DTYPE
         : in->view.numel < min_numel                 ? GCK_SKIP_SMALL : GCK_COMPRESS;
}

int gck_input_skip_reason(gck_py *py, gck_input *in, const gck_codec *codec, int64_t min_numel)
{
    return gck_input_read(py, in, GCK_FACT_VERSION | GCK_FACT_VIEW) < 0 ? -1 : reason_of(in, codec, min_numel);
}

int gck_input_skip_reason_of_shape(gck_py *py, gck_input *in, const gck_codec *codec, int64_t min_numel)
{
    return gck_input_read(py, in, GCK_FACT_SHAPE) < 0 ? -1 : reason_of(in, codec, min_numel);
}

int gck_memory_of(const gck_py *py, PyObject *x, const char **data, int64_t *nbytes)
{
    gck_dl_tensor dl;
    int64_t last = 0;

    *data = NULL;
    *nbytes = 0;
    const int plain = gck_is_plain_tensor(py, x);
    const int shown = plain ? gck_read_dlpack(py, x, &dl) : 0;

    if (shown <= 0) {
        return shown;
    }
    for (int d = 0; d < dl.ndim; d++) {
        if (dl.shape[d] == 0) {
            return 0;
        }
        last += (dl.shape[d] - 1) * dl.strides[d];
    }
    *data = (const char *)dl.data + dl.byte_offset;
    *nbytes = (last + 1) * ((dl.dtype.bits * dl.dtype.lanes + 7) / 8);
    return 0;
}
