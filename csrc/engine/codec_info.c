/* codec_info.c: what Python asks about codecs. */
#include "engine/codec_info.h"

#include "gradckpt.h"
#include "torch/calls.h"

PyObject *gck_codecs_py(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *names = PyList_New(0);

    for (int i = 0; names != NULL && gck_codec_at(i) != NULL; i++) {
        gck_add_item(&names, PyUnicode_FromString(gck_codec_at(i)->name));
    }
    return names;
}

static const char *const dtype_names[GCK_NDTYPES] = {"float32", "float16", "bfloat16", "bool"};

/* {dtype: (bits per value, and gck_size)}, or NULL. */
static PyObject *sizes_of(const gck_codec *codec)
{
    PyObject *sizes = PyDict_New();

    for (int d = 0; sizes != NULL && d < GCK_NDTYPES; d++) {
        const gck_size size = codec->size[d];
        if (codec->dtypes & GCK_BIT(d)) {
            gck_set_item(&sizes, dtype_names[d],
                         Py_BuildValue("(diiiii)", gck_bits_per_value(codec, (gck_dtype)d), size.value, size.group,
                                       size.block, size.scales, size.row));
        }
    }
    return sizes;
}

/* Bits for bfloat16, where they depend on the dtype; 0 when they are the dtype's own. */
static double bits_per_value(const gck_codec *codec)
{
    const gck_dtype order[GCK_NDTYPES] = {GCK_BF16, GCK_F32, GCK_F16, GCK_BOOL};

    for (int i = 0; i < GCK_NDTYPES; i++) {
        if (codec->dtypes & GCK_BIT(order[i])) {
            const double bits = gck_bits_per_value(codec, order[i]);
            return bits == 16 && order[i] == GCK_BF16 ? 0 : bits;
        }
    }
    return 0;
}

PyObject *gck_codec_info_py(PyObject *Py_UNUSED(module), PyObject *arg)
{
    const char *name = PyUnicode_Check(arg) ? PyUnicode_AsUTF8AndSize(arg, NULL) : NULL;
    const gck_codec *codec = name != NULL ? gck_codec_find(name) : NULL;
    PyObject *accepted = NULL, *sizes = NULL;

    if (codec == NULL) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "gradckpt: unknown codec %R", arg);
    }
    sizes = sizes_of(codec);
    accepted = sizes != NULL ? PyDict_Keys(sizes) : NULL;
    return Py_BuildValue("{ss si ss sN sd sd sO sO sO sN}", "name", codec->name, "id", gck_codec_id(codec), "summary",
                         codec->summary, "dtypes", accepted, "bits_per_value", bits_per_value(codec), "max_error",
                         codec->max_error, "cuda", codec->encode != NULL ? Py_True : Py_False, "stochastic",
                         codec->stochastic ? Py_True : Py_False, "may_overflow",
                         codec->may_overflow ? Py_True : Py_False, "sizes", sizes);
}

/* ---- the instruction set ---- */

PyObject *gck_isa_py(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyUnicode_FromString(gck_isa_name());
}

PyObject *gck_force_isa_py(PyObject *Py_UNUSED(module), PyObject *arg)
{
    const char *name = arg == Py_None ? NULL : PyUnicode_AsUTF8AndSize(arg, NULL);

    if (name == NULL && arg != Py_None) {
        return NULL;
    }
    if (gck_isa_force(name) != 0) {
        return PyErr_Format(PyExc_ValueError, "gradckpt: instruction set %R is %s; use scalar, avx2 or avx512",
                            arg, gck_isa_supported(name) < 0 ? "not known" : "not supported by this CPU");
    }
    Py_RETURN_NONE;
}
