/* call_kind.h: what tells one call of an operator from another: the operator and its operands. */
#ifndef GRADCKPT_CALL_KIND_H
#define GRADCKPT_CALL_KIND_H

#include "engine/run.h"

/* Hashes.  `call`: the operator, the dtypes, devices and sizes of tensors, and constants.  Apart, because
 * both runs may not agree on them: `strides` (hooks lay arguments out anew), `floats` (constants that come
 * from values which are restored approximately), `given` (which argument of the region each tensor is: the
 * function may have it from elsewhere, too). */
typedef struct {
    uint64_t call, strides, floats, given;
} gck_call_kind;

/* run NULL: no tensor is known as an argument.  Runs no Python.  What it cannot read counts by its type, a
 * tensor that DLPack cannot show as a tensor.  0 or -1. */
int gck_call_kind_of(const gck_py *py, const gck_run *run, uint64_t op, PyObject *args, PyObject *kwargs,
                     gck_call_kind *kind);

#endif
