/* determinism.h: the metadata that the determinism check compares. */
#ifndef GRADCKPT_DETERMINISM_H
#define GRADCKPT_DETERMINISM_H

#include "torch/abi.h"
#include "torch/objects.h"

/* The determinism check compares shape, dtype and device.  Plain tensors are read through DLPack
 * into the numbers.  For any other tensor `objects` is (shape, dtype, device), or (value,) with the
 * result of the user's own check. */
enum { GCK_METADATA_INLINE = 4 };
typedef struct {
    PyObject     *objects;         /* owned; NULL: the numbers count                     */
    gck_dl_dtype  dtype;
    gck_dl_device device;
    int32_t       ndim;
    int64_t       sizes[GCK_METADATA_INLINE], strides[GCK_METADATA_INLINE];
} gck_metadata;

/* Read x's metadata.  reader: what the user's own check reads it by, or NULL; whole: as objects,
 * also for a plain tensor.  0, or -1 with an exception and *meta empty. */
int gck_metadata_of(const gck_py *py, PyObject *reader, PyObject *x, int whole, gck_metadata *meta);

int gck_metadata_same(const gck_py *py, const gck_metadata *a, const gck_metadata *b);  /* 1, 0, -1 */

/* Of metadata that are the same: 1 when the values lie alike in memory, as far as the numbers tell; 0. */
int gck_metadata_same_layout(const gck_metadata *a, const gck_metadata *b);

/* New reference: the strides, or None where the numbers do not tell them. */
PyObject *gck_metadata_strides(const gck_metadata *meta);

/* New reference, for the message in Python. */
PyObject *gck_metadata_describe(const gck_metadata *meta);
void gck_metadata_clear(gck_metadata *meta);

#endif
