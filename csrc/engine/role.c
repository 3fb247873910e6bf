/* role.c: reads from the autograd graph which node saves a tensor, and whether it is a weight. */
#include "role.h"

#include "../torch/input.h"

#include <stdio.h>
#include <string.h>

enum { MAX_STEPS = 16 };               /* nodes between a weight and the view of it that is saved */

static const struct {
    const char *node, *argument;
    gck_role    role;
} savers[] = {
#define GCK_SAVER(node, argument, role) {#node, #argument, GCK_ROLE_##role},
#include "savers.def"
#undef GCK_SAVER
};

enum { NSAVERS = sizeof savers / sizeof savers[0] };

static const char *const role_name[] = {
#define ROLE(name, text) #name,
    GCK_ROLES(ROLE)
#undef ROLE
};

static const char *const role_text[] = {
#define ROLE(name, text) text,
    GCK_ROLES(ROLE)
#undef ROLE
};

/* A value comes out of these as it went in, at another place or in another dtype. */
static const char *const views[] = {
    "AliasBackward0", "AsStridedBackward0", "CloneBackward0", "DiagonalBackward0", "ExpandBackward0",
    "PermuteBackward0", "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0", "SplitBackward0",
    "SplitWithSizesBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "TBackward0",
    "ToCopyBackward0", "TransposeBackward0", "UnbindBackward0", "UnfoldBackward0", "UnsafeViewBackward0",
    "UnsqueezeBackward0", "ViewBackward0", NULL,
};

/* The name of its class in `name`, cut to its size.  0 or -1. */
static int name_of(PyObject *node, char *name, size_t size)
{
    PyObject *object = PyType_GetName(Py_TYPE(node));
    const char *text = object != NULL ? PyUnicode_AsUTF8AndSize(object, NULL) : NULL;

    name[0] = '\0';
    if (text != NULL) {
        strncat(name, text, size - 1);
    }
    Py_XDECREF(object);
    return text == NULL ? -1 : 0;
}

/* ---- who saves it ---- */

int64_t gck_node_number(const gck_py *py, PyObject *node)
{
    PyObject *value = PyObject_CallMethodObjArgs(node, py->names._sequence_nr, NULL);
    const unsigned long long number = value != NULL ? PyLong_AsUnsignedLongLong(value) : 0;

    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : number > INT64_MAX ? INT64_MAX : (int64_t)number;
}

int64_t gck_last_node_number(const gck_py *py)
{
    PyObject *value = PyObject_CallNoArgs(py->next_node_number);
    const int64_t next = value != NULL ? PyLong_AsLongLong(value) : 0;

    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : next - 1;
}

/* New reference to an attribute; NULL without an exception when the node has none, or freed it. */
static PyObject *attribute_of(PyObject *x, const char *name)
{
    PyObject *value = PyObject_GetAttrString(x, name);

    if (value == NULL) {
        gck_clear_refusal();
    }
    return value;
}

/* Does the node hold `packed` as this argument; or, without `packed`, nothing there yet?  1, also
 * when this torch does not tell (before 2.12); 0; -1. */
static int holds(PyObject *node, const char *argument, PyObject *packed)
{
    char name[64];
    PyObject *saved, *data, *value;
    int answer = 0;

    snprintf(name, sizeof name, "_raw_saved_%s", argument);
    saved = attribute_of(node, name);
    data = saved != NULL ? attribute_of(saved, "data") : NULL;
    if (saved != NULL && data == NULL) {
        answer = 1;
    } else if (saved != NULL && packed != NULL) {
        answer = data == packed;
    } else if (data == Py_None) {                /* nothing, or a tensor that no hook has seen */
        value = PyObject_CallMethod(saved, "unpack", NULL);
        answer = value == Py_None;
        Py_XDECREF(value);
        if (value == NULL) {
            gck_clear_refusal();                 /* it was freed */
        }
    }
    Py_XDECREF(saved);
    Py_XDECREF(data);
    return PyErr_Occurred() ? -1 : answer;
}

static int is_result(const char *argument)
{
    return strncmp(argument, "result", 6) == 0 || strcmp(argument, "output") == 0;
}

/* The role of the first listed argument of this node that is a result, or not, and holds `packed`. */
static int find_role(PyObject *node, int result, PyObject *packed)
{
    char name[64];
    int found = 0;

    if (name_of(node, name, sizeof name) < 0) {
        return -1;
    }
    for (int i = 0; i < NSAVERS; i++) {
        if (strcmp(savers[i].node, name) == 0 && is_result(savers[i].argument) == result
            && (found = holds(node, savers[i].argument, packed)) != 0) {
            return found < 0 ? -1 : (int)savers[i].role;
        }
    }
    return GCK_ROLE_EXACT;
}

int gck_role_of_input(const gck_py *py, PyObject *node, PyObject *packed, PyObject *x)
{
    const int role = find_role(node, 0, packed);
    PyObject *answer;
    int allowed;

    if (role < GCK_ROLE_CUT_OF_ONE) {
        return role;
    }
    answer = PyObject_CallMethod(py->shim, "node_allows", "OsO", node, role_name[role], x);
    allowed = answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return allowed < 0 ? -1 : !allowed ? GCK_ROLE_EXACT : role == GCK_ROLE_CUT_OF_ONE ? GCK_ROLE_CUT : GCK_ROLE_VALUES;
}

int gck_role_of_result(PyObject *node, PyObject *x)
{
    PyObject *value = PyObject_GetAttrString(x, "output_nr");
    const long nr = value != NULL ? PyLong_AsLong(value) : -1;

    Py_XDECREF(value);
    return nr < 0 ? -1 : nr > 0 ? GCK_ROLE_EXACT : find_role(node, 1, NULL);
}

PyObject *gck_savers(PyObject *module, PyObject *unused)
{
    PyObject *rows = PyTuple_New(NSAVERS);

    (void)module;
    (void)unused;
    for (int i = 0; rows != NULL && i < NSAVERS; i++) {
        PyObject *row = Py_BuildValue("(sss)", savers[i].node, savers[i].argument, role_text[savers[i].role]);
        if (row == NULL) {
            Py_CLEAR(rows);
        } else {
            PyTuple_SetItem(rows, i, row);
        }
    }
    return rows;
}

/* ---- is it a weight ---- */

/* New reference: the node behind the first input; NULL without an exception: none there. */
static PyObject *first_input(const gck_py *py, PyObject *node)
{
    PyObject *edges = PyObject_GetAttr(node, py->names.next_functions), *next = NULL;

    if (edges != NULL && PyTuple_Check(edges) && PyTuple_Size(edges) > 0) {
        next = PyTuple_GetItem(PyTuple_GetItem(edges, 0), 0);
        next = next == Py_None ? NULL : Py_XNewRef(next);
    }
    Py_XDECREF(edges);
    return next;
}

int gck_storage_of(PyObject *x, void **address)
{
    PyObject *storage = PyObject_CallMethod(x, "untyped_storage", NULL);
    PyObject *value = storage != NULL ? PyObject_CallMethod(storage, "data_ptr", NULL) : NULL;

    *address = value != NULL ? PyLong_AsVoidPtr(value) : NULL;
    Py_XDECREF(storage);
    Py_XDECREF(value);
    return PyErr_Occurred() ? gck_clear_refusal() : 0;       /* sparse, fake and other tensors without one */
}

/* 1 when `next` is a leaf in whose memory x lies; 0; -1. */
static int is_leaf_of(PyObject *x, PyObject *next)
{
    PyObject *leaf;
    char name[64];
    void *of_leaf = NULL, *of_x = NULL;
    int status;

    if (next == Py_None || name_of(next, name, sizeof name) < 0 || strcmp(name, "AccumulateGrad") != 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    leaf = PyObject_GetAttrString(next, "variable");
    status = leaf == NULL || gck_storage_of(leaf, &of_leaf) < 0 || gck_storage_of(x, &of_x) < 0 ? -1 : 0;
    Py_XDECREF(leaf);
    return status < 0 ? -1 : of_leaf != NULL && of_leaf == of_x;
}

/* The same for any leaf that the node takes: a Function may hand out its weight. */
static int lies_in_leaf(const gck_py *py, PyObject *x, PyObject *node)
{
    PyObject *edges = PyObject_GetAttr(node, py->names.next_functions);
    int found = edges == NULL || !PyTuple_Check(edges) ? -1 : 0;

    for (Py_ssize_t i = 0; found == 0 && i < PyTuple_Size(edges); i++) {
        found = is_leaf_of(x, PyTuple_GetItem(PyTuple_GetItem(edges, i), 0));
    }
    Py_XDECREF(edges);
    return found;
}

int gck_is_of_leaf(const gck_py *py, PyObject *x, PyObject *node)
{
    char name[64];
    int leaf = -1;

    Py_INCREF(node);
    for (int steps = 0; node != NULL && leaf < 0 && name_of(node, name, sizeof name) == 0; steps++) {
        const char *const *view = views;
        while (*view != NULL && strcmp(name, *view) != 0) {
            view++;
        }
        if (strcmp(name, "AccumulateGrad") == 0) {
            leaf = 1;
        } else if (steps < MAX_STEPS && *view != NULL) {
            PyObject *next = first_input(py, node);
            Py_DECREF(node);
            node = next;
        } else if ((leaf = lies_in_leaf(py, x, node)) < 0) {
            break;
        }
    }
    Py_XDECREF(node);
    return PyErr_Occurred() ? -1 : leaf > 0;     /* or the views begin at a tensor without a node */
}
