/* stream.h: the stream on which the codec work of a tensor is queued: always the current one of its
 * device. */
#ifndef GRADCKPT_STREAM_H
#define GRADCKPT_STREAM_H

#include "torch/abi.h"

/* Of a CUDA device, for Python's tensors.  0, else an exception is set. */
int gck_stream_of_device(const gck_dl_exchange *dlpack, int device, void **stream);

/* The same for torch's operators, which run without the GIL.  0; not 0 where this torch does not
 * tell. */
int gck_stream_of_operator(int device, void **stream);

#endif
