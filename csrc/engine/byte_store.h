/* byte_store.h: bytes of tensors in host memory and a file, for Python: _C.ByteStore and _C.StoredBytes. */
#ifndef GRADCKPT_BYTE_STORE_H
#define GRADCKPT_BYTE_STORE_H

#include "engine/state.h"

/* Make both types and add them to the module.  0 or -1. */
int gck_byte_store_types(PyObject *module, gck_state *state);

#endif
