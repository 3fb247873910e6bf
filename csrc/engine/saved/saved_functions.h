/* saved_functions.h: what is known of autograd Functions of libraries, which a Python class defines. */
#ifndef GRADCKPT_SAVED_FUNCTIONS_H
#define GRADCKPT_SAVED_FUNCTIONS_H

#include "engine/saved/saved_row.h"
#include "engine/state.h"

/* The most rows of a Function, and one more that ends them. */
enum { GCK_FUNCTION_ROWS = 6 };

typedef struct {
    const char   *package;         /* of the module that defines it: names repeat between packages */
    const char   *node;            /* the name of its nodes                                */
    int           nsaved;          /* how many tensors it saves, None included; 0: any number */
    int           kind;            /* without rows: a GCK_NODE_... of saved_node.h         */
    const char   *exact;           /* without rows: why all that it saves stays exact      */
    int           of_results;      /* the rows hold for a result of the Function, too      */
    gck_saved_row rows[GCK_FUNCTION_ROWS];   /* the argument is the place among what it saves, from 0 */
} gck_function;

/* The Function with this index; NULL behind the last. */
const gck_function *gck_function_at(int index);

/* 1 when the node is of a Function that a Python class defines; 0. */
int gck_is_function(PyObject *node);

/* The index of the Function that makes this node, of those with its name, of which `first` is the first; -1: none of
 * them is it; -2 with an exception. */
int gck_function_of(const gck_py *py, PyObject *node, int first);

/* Count a tensor that a Function of which nothing is known has saved exactly.  0 or -1. */
int gck_count_unknown_function(gck_state *state, PyObject *node, PyObject *x);

/* For Python: saved_functions(): a list of (package, node, places that a lossy codec encodes, why it stays exact or
 * None). */
PyObject *gck_saved_functions(PyObject *module, PyObject *unused);

#endif
