/* role.h: what the node that saves a tensor needs of it. */
#ifndef GRADCKPT_ROLE_H
#define GRADCKPT_ROLE_H

#include "state.h"

/* Of those with `if` in their text, _shim.node_allows() says whether the condition holds. */
#define GCK_ROLES(ROLE)                                                                                      \
    ROLE(EXACT, "exactly")                                                                                   \
    ROLE(VALUES, "with the codec")                                                                           \
    ROLE(FACTOR, "with the codec, unless the other factor has more values")                                  \
    ROLE(CUT, "with the codec, cut off at -20 and 20 unless rows are a multiple of 128")                     \
    ROLE(FP16, "float32 as `fp16`")                                                                          \
    ROLE(BF16, "float32 as `bf16`")                                                                          \
    ROLE(POSITIVE, "one bit per value: is it positive")                                                      \
    ROLE(POSITIVE_OR_NAN, "one bit per value: is it positive or NaN")                                        \
    ROLE(MASK, "bool as bits")                                                                               \
    ROLE(CUT_OF_ONE, "with the codec if alpha or beta is 1, cut off at -20 and 20 unless rows are a multiple of 128") \
    ROLE(POWER, "with the codec if the exponent is 2, 3 or 4")                                               \
    ROLE(ROWS, "with the codec if the values of one mean and scale are a multiple of 128; on the CPU also if they "   \
               "are 32 or more and neighbours differ in size by less than 4 times (not inside regions and other "    \
               "hooks)")                                                                                            \
    ROLE(PLANES, "with the codec if the values of one mean and scale are 128 or more")                       \
    ROLE(LOGITS, "with the codec if no row of the scores sums to more than e^30 (on the CPU; there never inside "  \
               "regions and other hooks)")
typedef enum {
#define ROLE(name, text) GCK_ROLE_##name,
    GCK_ROLES(ROLE)
#undef ROLE
} gck_role;

/* The sequence number of a node; a number above all others for nodes without one; -1 with an
 * exception.  Numbers grow within a thread. */
int64_t gck_node_number(const gck_py *py, PyObject *node);

/* The number of the node that this thread made last, -1 with an exception. */
int64_t gck_last_node_number(const gck_py *py);

/* `packed` is what a pack hook gave this node for x, one of its inputs.  A gck_role or -1. */
int gck_role_of_input(const gck_py *py, PyObject *node, PyObject *packed, PyObject *x);

/* x comes out of this node, which is saving it at this moment.  A gck_role or -1. */
int gck_role_of_result(PyObject *node, PyObject *x);

/* 1 when x lies in the memory of a leaf, seen through views or casts; 0; -1.  node: its grad_fn. */
int gck_is_of_leaf(const gck_py *py, PyObject *x, PyObject *node);

/* *address := that of x's storage, NULL when it has none.  0 or -1. */
int gck_storage_of(PyObject *x, void **address);

/* New reference: a tuple (node, argument, text of the role) for each line of savers.def. */
PyObject *gck_savers(PyObject *module, PyObject *unused);

#endif
