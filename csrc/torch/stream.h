/* stream.h: the streams of devices.  Codec work of a tensor is queued on the stream on which it was made or kept. */
#ifndef GRADCKPT_STREAM_H
#define GRADCKPT_STREAM_H

#include "gradckpt.h"
#include "torch/abi.h"
#include "torch/objects.h"

/* -1, with an exception: torch did not tell the current stream. */
int gck_stream_unknown(void);

/* Is what is queued on this stream captured in a graph?  1; 0, also on the host and where the device does not tell. */
int gck_stream_is_captured(int device, void *stream);

/* Make it torch's current one, until gck_stream_leave(), which does nothing for one that was not entered.  0; not 0:
 * this torch cannot. */
typedef struct {
    const gck_device_kind *kind;
    void *before;
    int   device;
} gck_stream_guard;

int  gck_stream_enter(int device, void *stream, gck_stream_guard *guard);
void gck_stream_leave(gck_stream_guard *guard);

/* Work that reads or writes x was queued on the current stream of its device: its memory is not used again before
 * that is done, whatever stream it came from.  No dispatch mode sees that.  0 or -1. */
int gck_stream_used(const gck_py *py, PyObject *x, int device);

#endif
