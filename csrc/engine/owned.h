/* owned.h: what an object owns: its references, listed once, so that what the garbage collector visits is what is
 * cleared; and its arrays that grow. */
#ifndef GRADCKPT_OWNED_H
#define GRADCKPT_OWNED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>

/* The offset of each in its object, where NULL may stand; 0 ends the list. */
typedef size_t gck_owned;

/* Visit them.  Of an instance of a heap type, its type, too. */
int gck_owned_visit(const void *of, const gck_owned *owned, visitproc visit, void *arg);
int gck_object_visit(PyObject *op, const gck_owned *owned, visitproc visit, void *arg);

/* Let them go: each is NULL before anything runs.  0. */
int gck_owned_clear(void *of, const gck_owned *owned);

/* Make *array, a pointer to `room` items of this size (malloc), have room for more than n.  0 or -1. */
int gck_make_room(void *array, Py_ssize_t n, Py_ssize_t *room, size_t size);

/* End a dealloc: free the memory, and release the object's reference to its heap type. */
void gck_object_free(PyObject *op);

#endif
