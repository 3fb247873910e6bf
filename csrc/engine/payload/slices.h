/* slices.h: arguments of a region that lie in one memory, as q, k and v of a projection.
 *
 * Each is restored with its strides, so alone it takes memory for its whole reach.  Where reaches
 * meet, one buffer serves all, as in the forward: restored arguments never take more than the
 * storages of the originals. */
#ifndef GRADCKPT_SLICES_H
#define GRADCKPT_SLICES_H

#include "torch/objects.h"
#include "engine/payload/batch.h"
#include "engine/payload/payload_bytes.h"

/* Where the restored tensor lies; all zero: in memory of its own. */
typedef struct {
    int     group;                 /* number of the buffer                              */
    int64_t offset, span;          /* values before it in the buffer; those of the buffer */
} gck_slice;

/* One argument that became a payload. */
typedef struct {
    const gck_payload *payload;    /* borrowed                                          */
    gck_slice         *slice;      /* borrowed, out                                     */
    uintptr_t          begin;      /* of its memory; 0: it stays alone                  */
} gck_sliced;

/* Find what lies together among n payloads of one region.  rows: those of its gck_input_aliasing, of
 * which the payloads are in the same order.  Changes the order of `of`.  0 or -1. */
int gck_slices_find(gck_py *py, PyObject *rows, gck_sliced *of, Py_ssize_t n);

/* New reference: memory for the values of the payload, in the recompute that the batch belongs to.
 * NULL without an exception: it has its own. */
PyObject *gck_slice_memory(const gck_slice *slice, const gck_payload *payload, gck_batch *batch);

#endif
