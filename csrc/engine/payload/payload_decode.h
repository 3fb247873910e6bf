/* payload_decode.h: the tensor that a payload gives back. */
#ifndef GRADCKPT_PAYLOAD_DECODE_H
#define GRADCKPT_PAYLOAD_DECODE_H

#include "engine/payload/batch.h"
#include "engine/payload/payload_bytes.h"

/* New reference: a fresh tensor of the shape, dtype, strides and device of the original. */
PyObject *gck_payload_decode(gck_payload *payload);

/* The same, counted as a restore.  into: a tensor like it that gets the values, or NULL.  They may be
 * deferred in `batch`. */
PyObject *gck_payload_revive(gck_payload *payload, PyObject *into, gck_batch *batch);

/* The same, requiring grad when the original did. */
PyObject *gck_payload_restore(gck_payload *payload, PyObject *into, gck_batch *batch);

#endif
