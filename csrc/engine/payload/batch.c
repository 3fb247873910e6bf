/* batch.c: codec work that waits to be done together. */
#include "engine/payload/batch.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/objects.h"
#include "torch/simulated.h"
#include "torch/stream.h"
#include "torch/tensor.h"

/* Nothing was queued that reads them.  -1, with the exception that is pending. */
static int let_place_go(gck_payload *payload, gck_arrays arrays, void *stream)
{
    gck_error error = gck_error_take();

    if (arrays.near != NULL) {
        gck_placed_let_go(&payload->placed, stream);
    }
    return gck_error_return(&error);
}

int gck_batch_add(gck_batch *b, gck_payload *payload, PyObject *tensor, gck_arrays arrays, void *stream)
{
    if ((b->n == GCK_BATCH || (b->n > 0 && b->codec != payload->codec)) && gck_batch_flush(b) < 0) {
        return let_place_go(payload, arrays, stream);
    }
    if (!b->decode && payload->device >= 0 && gck_stream_used(&b->state->py, tensor, payload->device) < 0) {
        return -1;                               /* it may die before its encode, under memory of another stream */
    }
    b->codec = payload->codec;
    b->payload[b->n] = (gck_payload *)Py_NewRef((PyObject *)payload);
    b->tensor[b->n] = Py_NewRef(tensor);
    b->stream[b->n] = stream;
    b->placed[b->n] = arrays.near != NULL ? gck_placed_again(&payload->placed) : (gck_placed){.place = NULL};
    b->arrays[b->n++] = gck_arrays_again(arrays);
    if (!b->decode) {
        payload->waits = b;
    }
    return 0;
}

/* The bytes of a payload are written (0), do not hold its values (1), or never will be written (-1). */
static void arrived(gck_payload *self, int status)
{
    self->waits = NULL;
    self->unwritten = status < 0;
    if (status != 0) {
        gck_payload_forget(self);
    }
}

/* Tell the places that the work is queued.  0 or -1. */
static int tell_places(gck_batch *b, int status)
{
    for (int i = 0; i < b->n; i++) {
        if (b->arrays[i].near != NULL) {
            status = gck_placed_let_go(&b->placed[i], b->stream[i]) < 0 ? -1 : status;
        } else if (status == 0 && !b->decode && gck_is_placed(&b->payload[i]->placed)) {
            status = gck_placed_written(&b->payload[i]->placed, b->stream[i]);
        }
    }
    return status;
}

/* status: as above.  Releasing references may run Python, which must find b empty. */
static void let_go(gck_batch *b, int status)
{
    const int n = b->n;

    for (int i = 0; i < n && !b->decode; i++) {
        arrived(b->payload[i], status);
    }
    b->n = 0;
    for (int i = 0; i < n; i++) {
        Py_DECREF((PyObject *)b->payload[i]);
        Py_DECREF(b->tensor[i]);
        gck_arrays_clear(&b->arrays[i]);
        Py_XDECREF(b->placed[i].place);
    }
}

/* The same, with an exception pending where status < 0. */
static int tell(gck_batch *b, int status)
{
    GCK_CLEARED_BY(gck_error_return) gck_error error = gck_error_take();

    return tell_places(b, status);
}

int gck_batch_flush(gck_batch *b)
{
    gck_py *py = &b->state->py;
    gck_tensor view[GCK_BATCH];
    gck_bytes bytes[GCK_BATCH];
    gck_how how[GCK_BATCH];
    int status = 0, n = 0;

    for (int i = 0; status == 0 && i < b->n; i++) {
        status = gck_payload_operands(b->payload[i], b->tensor[i], b->arrays[i], &view[n], &bytes[n], &how[n]);
        view[n].stream = b->stream[i];           /* not that of the flush */
        n += status == 0 && gck_has_values(view[n].data) && gck_has_values(bytes[n].codes);
    }
    if (status == 0 && n > 0) {
        status = b->decode ? gck_run_decode(py, b->codec, bytes, view, n)
                           : gck_run_encode(py, b->codec, view, bytes, how, n);
    }
    status = tell(b, status);
    let_go(b, status);
    return status;
}

void gck_batch_drop(gck_batch *b)
{
    GCK_CLEARED_BY(gck_error_return) gck_error error = gck_error_take();

    tell_places(b, -1);
    gck_error_keep(&error);
    let_go(b, -1);
}
