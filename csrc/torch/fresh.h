/* fresh.h: a new tensor that no Python code knows.
 *
 * It comes from torch's allocator like those of torch.empty, in a seventh of the time, and making,
 * filling and freeing it runs no Python: its memory may be used until Python gets it; on a device, on the stream
 * that is current while it is made. */
#ifndef GRADCKPT_FRESH_H
#define GRADCKPT_FRESH_H

#include "torch/abi.h"
#include "torch/objects.h"

#include "gradckpt.h"

/* One that is all zero is empty. */
typedef struct {
    AtenTensorHandle handle;   /* owned */
    void            *data;
} gck_fresh;

/* Make it: uint8[nbytes]; or of this shape, strides NULL means contiguous.  1; 0: torch.empty has to
 * make it: it is large, a dispatch mode would see the call, or this torch has not what it takes; -1
 * with an exception. */
int gck_fresh_bytes(const gck_py *py, int64_t nbytes, int device, gck_fresh *fresh);
int gck_fresh_tensor(const gck_py *py, int ndim, const int64_t *sizes, const int64_t *strides, gck_dtype dtype,
                     int device, gck_fresh *fresh);

/* New reference: the tensor, which is Python's from now on.  *fresh is then empty, also with an
 * exception. */
PyObject *gck_fresh_object(const gck_py *py, gck_fresh *fresh);

/* New references: Python tensors of its first bytes and of those after them (NULL: there are none), which no mode
 * sees made.  0, or -1 with an exception. */
int gck_fresh_parts(const gck_py *py, const gck_fresh *fresh, int64_t first, int64_t second, PyObject *parts[2]);

void gck_fresh_free(gck_fresh *fresh);

#endif
