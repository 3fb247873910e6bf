/* saved_formats.c: the codecs that users give to operators, to nodes, and to what a node saves. */
#include "engine/saved/saved_formats.h"

#include "gradckpt.h"
#include "torch/calls.h"
#include "torch/error.h"
#include "torch/tensor.h"
#include "engine/saved/saved_held.h"
#include "engine/saved/saved_node.h"

/* A tensor with fewer values than this part of its Function's result is a statistic: a mean, or a scale per row. */
enum { STATISTIC = 16 };

void gck_saved_as_clear(gck_saved_as *as)
{
    as->codec = NULL;
    Py_CLEAR(as->part);
    Py_CLEAR(as->rows);
    Py_CLEAR(as->again);
}

gck_saved_formats gck_saved_formats_of(const gck_codec *codec)
{
    gck_saved_formats formats = {.rules = NULL};

    for (int f = 0; f < GCK_NFAMILIES; f++) {
        formats.of[f] = codec;
    }
    formats.of[GCK_SOFTMAX] = gck_codec_find("bf16");
    formats.of[GCK_LOG_SOFTMAX] = gck_codec_find("fp16");
    return formats;
}

/* ---- what users write ---- */

int gck_saved_rule(const gck_saved_formats *formats, PyObject *node, const char *argument, const gck_codec **codec)
{
    GCK_SCOPED PyObject *name = formats->rules != NULL ? PyType_GetName(Py_TYPE(node)) : NULL, *key = NULL;
    PyObject *rule = NULL;
    const char *written;
    int whole = 0;

    if (name != NULL && (key = PyUnicode_FromFormat("%U.%s", name, argument)) != NULL) {
        rule = PyDict_GetItemWithError(formats->rules, key);
        if (rule == NULL && !PyErr_Occurred()) {
            rule = PyDict_GetItemWithError(formats->rules, name);
            whole = 1;
        }
    }
    *codec = NULL;
    if (rule != NULL && rule != Py_None && (written = PyUnicode_AsUTF8AndSize(rule, NULL)) != NULL) {
        *codec = gck_codec_find(written);
    }
    return PyErr_Occurred() ? -1 : rule == NULL ? 0 : 1 + whole;
}

/* 1 when the tensor has few values beside the Function's largest result; 0; -1. */
static int is_statistic(gck_state *state, PyObject *node, gck_input *in)
{
    gck_tensor view;
    GCK_SCOPED PyObject *results = PyObject_GetAttr(node, state->py.names._input_metadata);
    const Py_ssize_t n = results != NULL ? PySequence_Size(results) : -1;
    int64_t whole = n < 0 ? -1 : 0;
    int reason;

    for (Py_ssize_t i = 0; whole >= 0 && i < n; i++) {
        const int64_t own = gck_node_numel(&state->py, node, i);
        if (own < 0 && gck_clear_refusal() < 0) {
            whole = -1;
        } else if (own > whole) {
            whole = own;
        }
    }
    reason = whole < 0 ? -1 : gck_view_of(&state->py, in->x, &view);
    return reason < 0 ? -1 : reason != GCK_COMPRESS || view.numel < whole / STATISTIC;
}

int gck_saved_rule_of_function(gck_state *state, const gck_saved_formats *formats, PyObject *node,
                               const gck_saved_tensor *packed, gck_input *in, gck_saved_as *as)
{
    const Py_ssize_t place = formats->rules != NULL ? gck_function_place(state, node, packed) : -1;
    const gck_codec *codec = NULL;
    char argument[24];
    int rule = place < -1 ? -1 : 0, small = 0;

    if (place >= 0) {
        PyOS_snprintf(argument, sizeof argument, "%zd", place);
        rule = gck_saved_rule(formats, node, argument, &codec);
        small = rule == 2 ? is_statistic(state, node, in) : 0;
    }
    as->unknown = rule == 0;
    as->codec = small ? NULL : codec;
    return rule < 0 || small < 0 ? -1 : 0;
}

/* 0 or -1. */
static int give(gck_saved_formats *formats, const char *name, const char *codec)
{
    const int family = gck_family_of(name);

    if (family >= 0) {
        formats->of[family] = codec != NULL ? gck_codec_find(codec) : NULL;
        return 0;
    }
    if (formats->rules == NULL && (formats->rules = PyDict_New()) == NULL) {
        return -1;
    }
    GCK_SCOPED PyObject *value = codec != NULL ? PyUnicode_FromString(codec) : Py_NewRef(Py_None);
    return value != NULL ? PyDict_SetItemString(formats->rules, name, value) : -1;
}

int gck_saved_formats_read(PyObject *pairs, gck_saved_formats *formats)
{
    int status = 0;

    for (Py_ssize_t i = 0; status == 0 && i < PyTuple_Size(pairs); i++) {
        const char *name, *codec;
        status = PyArg_ParseTuple(PyTuple_GetItem(pairs, i), "sz", &name, &codec) ? 0 : -1;
        if (status == 0) {
            status = give(formats, name, codec);
        }
    }
    return status;
}
