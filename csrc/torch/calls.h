/* calls.h: the results of Python calls, as C values. */
#ifndef GRADCKPT_CALLS_H
#define GRADCKPT_CALLS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

/* A local that this function clears, by its address, where its block ends, by whatever way. */
#define GCK_CLEARED_BY(function) __attribute__((cleanup(function)))

/* The same of a pointer to an object, or NULL, that owns its reference.  gck_give() takes it out of one. */
#define GCK_SCOPED GCK_CLEARED_BY(gck_release)

static inline void gck_release(void *local)
{
    PyObject *x;

    memcpy(&x, local, sizeof x);                 /* it may point to one of the engine's own types */
    Py_XDECREF(x);
}

static inline PyObject *gck_give(PyObject **local)
{
    PyObject *x = *local;

    *local = NULL;
    return x;
}

/* Consume a call's result; NULL: it raised.  0, or -1 with the exception. */
int gck_done(PyObject *result);

/* The result as C truth: 1, 0, -1 with an exception. */
int gck_is_true(PyObject *value);

/* The result of a getter without arguments, as C truth. */
int gck_ask(PyObject *getter);

/* The number of items of a tuple or a list; 0 for anything else.  Item i of one: borrowed. */
Py_ssize_t gck_items(PyObject *x);
PyObject *gck_item(PyObject *x, Py_ssize_t i);

/* visit(with, item) for x, or for each item of a tuple or a list, however deep, which is held meanwhile, until one
 * returns another result than 0: that, or 0. */
int gck_each_item(PyObject *x, int (*visit)(void *with, PyObject *item), void *with);

/* Append an item, taken over, to a list; NULL: making it raised.  0, or -1 with the exception. */
int gck_append(PyObject *list, PyObject *item);

/* The same where a failure clears *list, which is NULL from then on; for a value of a dict. */
void gck_add_item(PyObject **list, PyObject *item);
void gck_set_item(PyObject **dict, const char *key, PyObject *value);

/* A result, taken over, as a number, which may be -1; -1 with the exception: it raised, or is none. */
int64_t gck_as_int64(PyObject *value);

/* New reference: the result of the method.  args: a tuple, taken over; NULL: making it raised, and
 * nothing may be looked up meanwhile. */
PyObject *gck_invoke(PyObject *function, PyObject *args);
PyObject *gck_method(PyObject *of, const char *name, PyObject *args);

/* New reference: a list, taken over, as a tuple; NULL: making it raised. */
PyObject *gck_as_tuple(PyObject *list);

/* New reference: the objects as a tuple. */
PyObject *gck_tuple(PyObject *const *objects, Py_ssize_t n);

/* New reference; NULL without an exception: x has no such attribute. */
PyObject *gck_optional_attribute(PyObject *x, PyObject *name);

/* 1, 0, -1 with an exception other than AttributeError. */
int gck_has_attribute(PyObject *x, const char *name);

/* Attribute as C truth: 1, 0, -1 with an exception. */
int gck_attr_is_true(PyObject *x, PyObject *name);

#endif
