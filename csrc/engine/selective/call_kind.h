/* call_kind.h: what tells one call of an operator from another: the operator and its operands. */
#ifndef GRADCKPT_CALL_KIND_H
#define GRADCKPT_CALL_KIND_H

#include "engine/run.h"

/* Hashes.  `call`: the operator, the dtypes, devices, sizes and strides of tensors, which argument of the
 * region each is, and constants.
 * `floats`: the floating constants, which may come from values that a recompute restores
 * approximately. */
typedef struct {
    uint64_t call, floats;
} gck_call_kind;

/* run NULL: no tensor is known as an argument.  Runs no Python.  What it cannot read counts by its type, a tensor that DLPack cannot show as a
 * tensor.  0 or -1. */
int gck_call_kind_of(const gck_py *py, const gck_run *run, uint64_t op, PyObject *args, PyObject *kwargs,
                     gck_call_kind *kind);

#endif
