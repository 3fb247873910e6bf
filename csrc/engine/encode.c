/* encode.c: gradckpt.encode(), a payload that the user holds. */
#include "payload.h"

static const char *accepted_dtypes(uint32_t dtypes)
{
    return dtypes == GCK_BIT(GCK_BOOL) ? "bool" : dtypes == GCK_BIT(GCK_F32) ? "float32"
                                                                             : "float32, float16 and bfloat16";
}

PyObject *gck_encode_py(PyObject *module, PyObject *args)
{
    gck_state *state = gck_state_of(module);
    PyObject *x, *key = Py_None;
    const char *name;
    gck_tensor view;
    unsigned long long seed;
    unsigned int step, tensor;

    if (!PyArg_ParseTuple(args, "Os|O:encode", &x, &name, &key)
        || (key != Py_None && !PyArg_ParseTuple(key, "KII:encode", &seed, &step, &tensor))) {
        return NULL;
    }
    const gck_codec *codec = gck_codec_find(name);
    if (codec == NULL) {
        return PyErr_Format(PyExc_ValueError, "gradckpt: unknown codec '%s'", name);
    }
    const int is_tensor = gck_is_tensor(&state->py, x);
    if (is_tensor <= 0) {
        return is_tensor < 0 ? NULL : PyErr_Format(PyExc_TypeError, "gradckpt.encode: expected a tensor, not %R", Py_TYPE(x));
    }
    int verdict = gck_tracing(&state->py);
    verdict = verdict < 0 ? -1 : verdict ? GCK_KEEP_TRACING : gck_tensor_view(&state->py, x, codec->dtypes, &view);
    if (verdict < 0) {
        return NULL;
    }
    if (verdict != GCK_COMPRESS) {
        PyObject *dtype = PyObject_GetAttr(x, state->py.names.dtype);
        PyErr_Format(PyExc_TypeError, "gradckpt.encode: cannot encode this %s of dtype %S with codec '%s': %s; it takes "
                     "plain strided %s tensors on CPU and CUDA",
                     ((PyTypeObject *)Py_TYPE(x)) == (PyTypeObject *)state->py.Tensor ? "tensor" : "tensor subclass",
                     dtype ? dtype : Py_None, codec->name, gck_reason_text[verdict], accepted_dtypes(codec->dtypes));
        Py_XDECREF(dtype);
        return NULL;
    }
    int fits;
    const gck_dither dither = key != Py_None ? (gck_dither){seed, step, tensor} : (gck_dither){0, 0, 0};
    PyObject *payload = gck_payload_new(state, codec, x, &view, key != Py_None ? &dither : NULL, GCK_FOR_USER, NULL,
                                        &fits);
    if (payload == NULL && !fits) {
        PyErr_Format(PyExc_ValueError, "gradckpt.encode: codec '%s' cannot hold these values", codec->name);
    }
    return payload;
}
