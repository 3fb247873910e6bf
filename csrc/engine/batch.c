/* batch.c: codec work that waits to be done together. */
#include "batch.h"

#include "payload.h"

int gck_batch_add(gck_batch *b, const gck_codec *codec, PyObject *x, const gck_tensor *view, PyObject *holder,
                  void *bytes, const gck_dither *dither)
{
    if ((b->n == GCK_BATCH || (b->n > 0 && b->codec != codec)) && gck_batch_flush(b) < 0) {
        return -1;
    }
    const int i = b->n++;

    b->codec = codec;
    b->view[i] = *view;
    b->view[i].sizes = b->view[i].strides = NULL;
    b->bytes[i] = bytes;
    b->how[i] = (gck_how){NULL, NULL};
    if (dither != NULL) {
        b->dither[i] = *dither;
        b->how[i].dither = &b->dither[i];
    }
    b->tensor[i] = Py_NewRef(x);
    b->holder[i] = Py_NewRef(holder);
    if (!b->decode) {
        gck_payload_wait((gck_payload *)holder, b);
    }
    return 0;
}

/* `done`: the bytes are there.  Letting go may run Python, which must find b empty. */
static void let_go(gck_batch *b, int done)
{
    const int n = b->n;

    for (int i = 0; i < n && !b->decode; i++) {
        gck_payload_arrived((gck_payload *)b->holder[i], done);
    }
    b->n = 0;
    for (int i = 0; i < n; i++) {
        Py_DECREF(b->tensor[i]);
        Py_DECREF(b->holder[i]);
    }
}

int gck_batch_flush(gck_batch *b)
{
    int status = 0;

    if (b->n > 0) {
        gck_py *py = &b->state->py;
        status = b->decode ? gck_run_decode(py, b->codec, (const void *const *)b->bytes, b->view, b->n)
                           : gck_run_encode(py, b->codec, b->view, b->bytes, b->how, b->n);
        let_go(b, status == 0);
    }
    return status;
}

void gck_batch_drop(gck_batch *b)
{
    PyObject *type, *value, *traceback;

    if (b->n > 0) {
        PyErr_Fetch(&type, &value, &traceback);
        let_go(b, 0);
        PyErr_Restore(type, value, traceback);
    }
}
