/* codecs_encode.c: gradckpt.codecs.encode(), which makes a payload that the user holds. */
#include "engine/payload/codecs_encode.h"

#include "gradckpt.h"
#include "torch/calls.h"
#include "torch/input.h"
#include "torch/objects.h"
#include "torch/tensor.h"
#include "engine/state.h"
#include "engine/payload/payload.h"

static const char *accepted_dtypes(uint32_t dtypes)
{
    if (dtypes == GCK_BIT(GCK_BOOL)) {
        return "bool";
    }
    return dtypes == GCK_BIT(GCK_F32) ? "float32" : "float32, float16 and bfloat16";
}

/* GCK_COMPRESS, the reason why the tensor cannot be encoded, or -1. */
static int why_not_encoded(gck_py *py, gck_input *in, const gck_codec *codec)
{
    const int tracing = gck_tracing(py);

    if (tracing != 0) {
        return tracing < 0 ? -1 : GCK_SKIP_TRACING;
    }
    return gck_input_read(py, in, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0 ? -1 : gck_input_skip_reason(py, in, codec, 0);
}

PyObject *gck_encode_py(PyObject *module, PyObject *args)
{
    gck_state *state = gck_state_of(module);
    PyObject *x, *key = Py_None;
    const char *name;
    unsigned long long seed = 0;
    unsigned int step = 0, tensor = 0;

    if (!PyArg_ParseTuple(args, "Os|O:encode", &x, &name, &key)
        || (key != Py_None && !PyArg_ParseTuple(key, "KII:encode", &seed, &step, &tensor))) {
        return NULL;
    }
    const gck_codec *codec = gck_codec_find(name);       /* gradckpt.codecs.encode() has checked the name */
    const int is_tensor = gck_is_tensor(&state->py, x);
    if (is_tensor <= 0) {
        return is_tensor < 0 ? NULL
             : PyErr_Format(PyExc_TypeError, "gradckpt: encode() takes a tensor, not %R", Py_TYPE(x));
    }
    GCK_CLEARED_BY(gck_input_clear) gck_input in = gck_input_of(x);
    const int reason = why_not_encoded(&state->py, &in, codec);
    const gck_dither dither = {seed, step, tensor};
    gck_skip_reason skip;

    if (reason != GCK_COMPRESS) {
        GCK_SCOPED PyObject *dtype = reason > 0 ? PyObject_GetAttr(x, state->py.names.dtype) : NULL;
        return dtype == NULL ? NULL
             : PyErr_Format(PyExc_TypeError,
                            "gradckpt: encode() cannot take this %s of dtype %S with codec '%s' (%s); it takes "
                            "plain strided %s tensors on CPU and CUDA",
                            (PyObject *)Py_TYPE(x) == state->py.Tensor ? "tensor" : "tensor subclass", dtype,
                            codec->name, gck_reason_text[reason], accepted_dtypes(codec->dtypes));
    }
    PyObject *payload = gck_payload_new(state, codec, &in, NULL, key != Py_None ? &dither : NULL, GCK_FOR_USER, NULL,
                                        NULL, &skip);
    return payload != NULL || skip == GCK_COMPRESS ? payload
         : skip == GCK_SKIP_FLAG
         ? PyErr_Format(PyExc_RuntimeError,
                        "gradckpt: codec '%s' has no flag left in which a device reports overflow; encode outside of "
                        "captures, or choose 'int8'", codec->name)
         : PyErr_Format(PyExc_ValueError, "gradckpt: codec '%s' cannot hold these values; choose another, as 'int8'",
                        codec->name);
}
