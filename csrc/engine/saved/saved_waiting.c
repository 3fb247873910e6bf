/* saved_waiting.c: the saved tensors of a block that wait for the node that saves them. */
#include "engine/saved/saved_waiting.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/device.h"
#include "torch/input.h"
#include "torch/stream.h"
#include "torch/tensor.h"
#include "engine/payload/batch.h"
#include "engine/saved/saved_functions.h"
#include "engine/saved/saved_held.h"
#include "engine/saved/saved_role.h"

/* ---- what the saving node needs ---- */

/* What has so many bytes was counted as uncompressed for a reason that no longer holds. */
static void uncount(const gck_saved_tensor *saved, int64_t nbytes, int reason)
{
    if (saved->epoch == saved->state->epoch) {
        gck_count_uncompressed_bytes(saved->state, nbytes, reason, -1);
    }
}

void gck_saved_waiting_at(gck_saved_tensor *saved, const gck_tensor *view)
{
    saved->device = view->device;
    saved->stream = view->stream;
    saved->captured = gck_stream_is_captured(view->device, view->stream);
}

/* Make the stream on which it was saved the current one: only there do the work that made its values and the node that
 * will read them lie before and behind its encode.  1; 0: nothing may be encoded: a capture has begun or ended since,
 * or torch cannot; -1. */
static int enter_stream(const gck_saved_tensor *saved, gck_stream_guard *guard)
{
    void *now;

    if (saved->device < 0) {
        return 1;
    }
    if (gck_stream_of(saved->state->py.dlpack, saved->device, &now) != 0) {
        return gck_stream_unknown();
    }
    return gck_stream_is_captured(saved->device, saved->stream) == saved->captured
        && (now == saved->stream || gck_stream_enter(saved->device, saved->stream, guard) == 0);
}

/* What a Function saves was kept as it is, so it stays so where the node needs it exactly; what waits gets a form in
 * any case. */
int gck_saved_waiting_settle(gck_saved_tensor *saved, PyObject *node, int exactly, int go_on, gck_batch *batch)
{
    gck_state *state = saved->state;
    const int waits = saved->hooks != NULL;
    GCK_SCOPED PyObject *op = waits ? saved->hooks : saved->packer;
    const gck_saved_hooks *self = (gck_saved_hooks *)op;
    GCK_CLEARED_BY(gck_input_clear) gck_input in = gck_input_of(saved->form.entry.value);
    GCK_CLEARED_BY(gck_saved_as_clear) gck_saved_as as = {.codec = NULL};
    GCK_SCOPED gck_saved_tensor *held = (gck_saved_tensor *)Py_NewRef((PyObject *)saved);
    gck_saved_list *l = waits ? gck_saved_list_of(saved->waiting) : NULL;
    int64_t nbytes = saved->waits;
    GCK_CLEARED_BY(gck_stream_leave) gck_stream_guard guard = {.kind = NULL};
    const int entered = enter_stream(saved, &guard);
    int status = entered < 0 ? -1 : gck_input_read(&state->py, &in, GCK_FACT_VERSION);

    node = entered ? node : NULL;
    saved->hooks = saved->packer = NULL;
    if (waits) {
        l->waits--;
    }
    in.known |= GCK_FACT_GRAD | GCK_FACT_LEAF;   /* faster: it was judged when it was packed, */
    in.requires_grad = 1;                        /* and is an activation where it is encoded */
    if (status == 0 && in.version == saved->form.entry.version) {
        /* else unpack raises torch's error that the values are gone */
        status = node == NULL ? 0 : gck_saved_as_input(state, &self->formats, node, saved, &in, &as);
        if (exactly && as.codec != NULL && as.codec->max_error > 0) {
            gck_saved_as_clear(&as);
        }
        if (as.unknown && status == 0) {
            status = gck_count_unknown_function(state, node, in.x);
        }
        if (!waits && as.codec != NULL && status == 0) {
            status = gck_count_bytes(&state->py, in.x, &nbytes);
        }
        if (waits || as.codec != NULL) {
            uncount(saved, nbytes, waits ? GCK_SKIP_UNKNOWN : saved->reason);
            status = status < 0 ? -1
                   : gck_saved_form_become(self, saved, &as, &in, node == NULL ? GCK_SKIP_UNKNOWN : GCK_SKIP_EXACT,
                                           batch);
            status = status < 0 || waits || saved->form.storage == NULL ? status
                   : gck_saved_waiting_add(self->waiting, saved);
            status = status < 0 ? -1 : gck_saved_form_hold(self, &saved->form);
        }
    }
    saved->unknown = waits && node == NULL;
    if (go_on) {
        saved->hooks = Py_NewRef(op);
        l->waits++;
        saved->epoch = state->epoch;
        saved->form.storage = NULL;
    } else {
        state->stats.live_bytes -= saved->waits;
        saved->waits = 0;
    }
    return status;
}

/* ---- what Functions save ---- */

int gck_saved_function_settle(gck_state *state, PyObject *node, int exactly, gck_batch *batch)
{
    GCK_SCOPED PyObject *all = gck_function_saves(state, node), *open = PyList_New(0);
    const Py_ssize_t n = all != NULL ? PyList_Size(all) : 0;
    int status = all != NULL && open != NULL ? 0 : -1;

    for (Py_ssize_t place = 0; status == 0 && place < n; place++) {
        GCK_SCOPED gck_saved_tensor *saved = gck_function_saved(state, all, place);
        status = saved == NULL ? (PyErr_Occurred() ? -1 : 0)
               : saved->packer != NULL ? PyList_Append(open, (PyObject *)saved) : 0;
    }
    Py_CLEAR(all);
    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(open); i++) {
        gck_saved_tensor *saved = (gck_saved_tensor *)PyList_GetItem(open, i);
        status = saved->packer != NULL ? gck_saved_waiting_settle(saved, node, exactly, 0, batch) : 0;
    }
    return status;
}

/* ---- the list ---- */

/* Limit the list to the latest of those that wait and of those that do not.  number: of the latest.
 * 0 or -1. */
static int trim(gck_saved_list *l, int64_t number)
{
    int status = 0;

    for (int i = 0; status == 0 && i < l->n; i++) {
        gck_saved_tensor *saved = l->known[i];
        if (saved->hooks != NULL && (l->waits >= GCK_WAITING_TENSORS || saved->number < number - GCK_WAITING_NODES)) {
            status = gck_saved_waiting_settle(saved, NULL, 0, 0, NULL);
            i = -1;                              /* Python may have changed the list */
        }
    }
    for (int i = 0; status == 0 && l->n - l->waits >= GCK_WAITING_TENSORS; i++) {
        if (l->known[i]->hooks == NULL) {
            gck_saved_list_forget(l->known[i--]);
        }
    }
    return status;
}

int gck_saved_waiting_add(PyObject *waiting, gck_saved_tensor *saved)
{
    gck_saved_list *l = gck_saved_list_of(waiting);

    if (trim(l, saved->number) < 0) {
        return -1;
    }
    saved->waiting = Py_NewRef(waiting);
    l->known[l->n++] = saved;
    l->on_device = saved->hooks != NULL ? saved->device >= 0 : l->on_device;
    l->waits += saved->hooks != NULL;
    return 0;
}

/* ---- when to search ---- */

enum { FEW = 8, FEW_BYTES = 16 << 20 };

int gck_saved_waiting_may_last(PyObject *waiting)
{
    const gck_saved_list *l = gck_saved_list_of(waiting);
    int64_t bytes = 0;
    int n = 0;

    for (int i = l->n - 1; l->on_device && n < l->waits && i >= 0; i--) {
        const gck_saved_tensor *saved = l->known[i];
        if (saved->hooks != NULL) {
            bytes += saved->waits;
            if (saved->device < 0 || ++n >= FEW || bytes > FEW_BYTES) {
                return 0;
            }
        }
    }
    return l->on_device;
}
