/* call_kind.h: what tells one call of an operator from another: the operator and its operands. */
#ifndef GRADCKPT_CALL_KIND_H
#define GRADCKPT_CALL_KIND_H

#include "torch/objects.h"

/* Hashes.  `call`: the operator, the dtypes, devices, sizes and strides of tensors, and constants.
 * `floats`: the floating constants, which may come from values that a recompute restores
 * approximately. */
typedef struct {
    uint64_t call, floats;
} gck_call_kind;

/* Runs no Python and never fails.  What it cannot read counts by its type, a tensor that DLPack
 * cannot show as a tensor. */
gck_call_kind gck_call_kind_of(const gck_py *py, uint64_t op, PyObject *args, PyObject *kwargs);

#endif
