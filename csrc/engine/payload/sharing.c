/* sharing.c: finds the payload that another use of the same tensor may share. */
#include "engine/payload/sharing.h"

#include "torch/simulated.h"
#include "torch/stream.h"
#include "torch/tensor.h"
#include "engine/payload/layout.h"

#include <string.h>

enum { SCRATCH = 8192 };           /* bytes: up to so many are compared without a payload     */

/* 1 when it was read through the same view, and gives the layout that is requested. */
static int same_view(const gck_payload *p, const gck_tensor *view, int exact)
{
    int64_t strides[GCK_MAX_DIM];

    if (p->dtype != view->dtype || p->device != view->device || p->ndim != view->ndim
        || p->misaligned != (int)((uintptr_t)view->data % GCK_ALIGNMENT)
        || p->layout != gck_layout_of(view, exact, strides)) {
        return 0;
    }
    for (int d = 0; d < p->ndim; d++) {
        if (p->sizes[d] != view->sizes[d] || (p->layout && p->sizes[p->ndim + d] != strides[d])) {
            return 0;
        }
    }
    return 1;
}

static int same_bytes(gck_bytes a, gck_bytes b, gck_lengths lengths)
{
    return memcmp(a.codes, b.codes, (size_t)lengths.codes) == 0
        && (lengths.scales == 0 || memcmp(a.scales, b.scales, (size_t)lengths.scales) == 0);
}

/* Never across streams, never into a capture; and there is one late answer for each payload. */
static int may_share(const gck_payload *p, const gck_tensor *view)
{
    return !gck_counts_as_device(p->device)
        || (p->stream == view->stream && !p->codec->may_overflow && !gck_stream_is_captured(p->device, p->stream));
}

/* One that is far away gives its noise, so that values do not depend on where it is. */
static int may_give(const gck_payload *p)
{
    return gck_payload_has_bytes(p) || (p->stochastic && gck_is_placed(&p->placed));
}

/* Nothing in the loop runs Python, so entries are borrowed.  A dead original gives None. */
gck_payload *gck_sharing_find(gck_state *state, const gck_codec *codec, gck_input *in, int stochastic, int exact,
                              gck_batch *batch)
{
    const gck_tensor was = in->view;
    gck_payload *found = NULL;
    int view_read = 0;                           /* -1: it changed, with an exception */

    for (int i = 0; view_read >= 0 && i < GCK_NRECENT && found == NULL; i++) {
        gck_payload *p = state->recent[i];
        if (p == NULL || p->codec != codec || p->stochastic != stochastic || (p->waits != NULL && p->waits != batch)
            || !may_give(p) || p->overflow != NULL || PyWeakref_GetObject(p->original) != in->x
            || p->version != in->version || p->requires_grad != in->requires_grad || p->leaf != in->leaf
            || !may_share(p, &in->view)) {       /* last: it may ask the device */
            continue;
        }
        view_read = view_read > 0 ? 1 : gck_view_again(&state->py, in->x, &was, &in->view) < 0 ? -1 : 1;
        if (view_read > 0 && same_view(p, &in->view, exact)) {
            found = (gck_payload *)Py_NewRef((PyObject *)p);
            memmove(&state->recent[1], &state->recent[0], (size_t)i * sizeof p);       /* most recently used */
            state->recent[0] = p;
        }
    }
    if (found != NULL && found->waits != NULL && gck_batch_flush(batch) < 0) {
        Py_CLEAR(found);
    }
    return found;
}

int gck_sharing_proof(gck_payload *a, gck_payload *b)
{
    gck_arrays x = {.codes = NULL}, y = {.codes = NULL};
    gck_bytes left, right;
    int same = a->overflow != NULL || a->nbytes != b->nbytes ? 0 : gck_payload_read(a, NULL, &x);

    same = same > 0 ? gck_payload_read(b, NULL, &y) : same;
    if (same > 0 && gck_payload_view(a, x, &left) == 0 && gck_payload_view(b, y, &right) == 0) {
        Py_BEGIN_ALLOW_THREADS
        /* simulated, one tensor of one version has the same values */
        same = !a->has_values || same_bytes(left, right, a->lengths);
        Py_END_ALLOW_THREADS
    }
    same = PyErr_Occurred() ? -1 : same;
    same = gck_payload_has_read(b, NULL, &y, same);
    return gck_payload_has_read(a, NULL, &x, same);
}

int gck_sharing_holds(gck_payload *first, gck_input *in)
{
    _Alignas(GCK_PAYLOAD_ALIGNMENT) char scratch[SCRATCH];
    const gck_bytes piece = gck_in_one(scratch, first->lengths);
    gck_bytes bytes;
    gck_tensor view;
    gck_how how;
    int status;

    if (gck_counts_as_device(first->device) || gck_is_placed(&first->placed) || first->nbytes > SCRATCH
        || !gck_payload_has_bytes(first)
        || first->overflow != NULL) {
        return 0;
    }
    if (gck_payload_operands(first, in->x, first->arrays, &view, &bytes, &how) < 0) {
        return -1;
    }
    status = first->has_values ? gck_run_encode(&first->state->py, first->codec, &view, &piece, &how, 1) : 0;
    /* simulated, one tensor of one version has the same values */
    return status < 0 ? -1 : status == 0 && (!first->has_values || same_bytes(bytes, piece, first->lengths));
}
