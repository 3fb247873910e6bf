/* saved_waiting.c: finds the node that saves a tensor.
 *
 * A pack hook is called while the node is being made.  Nothing refers to the node yet, but its
 * sequence number is known.  As soon as a later tensor is seen, the graph behind it is searched for
 * nodes of these numbers.  The number alone is not proof (an autograd Function may make nodes
 * before it saves): saved_role.c compares what the node holds with what the hook returned. */
#include "engine/saved/saved_waiting.h"

#include "torch/error.h"
#include "torch/graph_nodes.h"
#include "torch/input.h"
#include "torch/tensor.h"
#include "engine/payload/batch.h"
#include "engine/saved/saved_form.h"
#include "engine/saved/saved_node.h"
#include "engine/saved/saved_pins.h"
#include "engine/saved/saved_role.h"

/* ---- what the saving node needs ---- */

/* What waited was counted as uncompressed for a reason that no longer holds. */
static void uncount(const gck_saved_tensor *saved)
{
    gck_stats *s = &saved->state->stats;

    if (saved->epoch == saved->state->epoch) {
        s->uncompressed[GCK_SKIP_UNKNOWN]--;
        s->uncompressed_bytes -= saved->waits;
        s->eligible--;
    }
}

/* Settle a waiting tensor in the form that this node needs.  node NULL: it is not known; reason: why it then
 * stays.  0 or -1. */
static int settle(gck_saved_tensor *saved, PyObject *node, int reason, int go_on, gck_batch *batch)
{
    gck_state *state = saved->state;
    PyObject *op = saved->hooks;
    const gck_saved_hooks *self = (gck_saved_hooks *)op;
    gck_input in = gck_input_of(saved->form.entry.value);
    gck_saved_as as = {.codec = NULL};
    gck_saved_list *l = gck_saved_list_of(saved->waiting);
    int status = gck_input_read(&state->py, &in, GCK_FACT_VERSION);

    Py_INCREF((PyObject *)saved);
    saved->hooks = NULL;
    l->waits--;
    in.known |= GCK_FACT_GRAD | GCK_FACT_LEAF;   /* faster: what waits was judged when it was packed */
    in.requires_grad = 1;
    if (status == 0 && in.version == saved->form.entry.version) {
        /* else unpack raises torch's error that the values are gone */
        uncount(saved);
        status = node == NULL ? 0 : gck_saved_as_input(state, &self->formats, node, (PyObject *)saved, &in, &as);
        status = status < 0 ? -1
               : gck_saved_form_become(self, saved, &as, &in, reason, batch);
        status = status < 0 ? -1 : gck_saved_form_hold(self, &saved->form);
    }
    if (go_on) {
        saved->hooks = Py_NewRef(op);
        l->waits++;
        saved->epoch = state->epoch;
        saved->form.storage = NULL;
    } else {
        state->stats.live_bytes -= saved->waits;
        saved->waits = 0;
    }
    gck_saved_as_clear(&as);
    Py_DECREF(op);
    Py_DECREF((PyObject *)saved);
    gck_input_clear(&in);
    return status;
}

int gck_saved_waiting_leave(gck_saved_tensor *saved, int go_on)
{
    return settle(saved, NULL, GCK_SKIP_UNKNOWN, go_on, NULL);
}

/* ---- the list ---- */

/* The number of the oldest tensor that waits; INT64_MAX: none waits. */
static int64_t oldest(const gck_saved_list *l)
{
    int64_t number = INT64_MAX;
    int left = l->waits;

    for (int i = l->n - 1; left > 0 && i >= 0; i--) {
        left -= l->known[i]->hooks != NULL;
        number = l->known[i]->hooks != NULL ? l->known[i]->number : number;
    }
    return number;
}

/* Limit the list to the latest of those that wait and of those that do not.  number: of the latest.
 * 0 or -1. */
static int trim(gck_saved_list *l, int64_t number)
{
    int status = 0;

    while (status == 0 && (l->waits >= GCK_WAITING_TENSORS || oldest(l) < number - GCK_WAITING_NODES)) {
        for (int i = 0; i < l->n; i++) {
            gck_saved_tensor *saved = l->known[i];
            if (saved->hooks != NULL
                && (l->waits >= GCK_WAITING_TENSORS || saved->number < number - GCK_WAITING_NODES)) {
                status = settle(saved, NULL, GCK_SKIP_UNKNOWN, 0, NULL);    /* Python runs, and may change the list */
                break;
            }
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
    l->waits += saved->hooks != NULL;
    return 0;
}

/* ---- the search ---- */

enum { FEW = 8, FEW_BYTES = 16 << 20 };

int gck_saved_waiting_may_last(PyObject *waiting)
{
    const gck_saved_list *l = gck_saved_list_of(waiting);
    int64_t bytes = 0;
    int n = 0;

    for (int i = l->n - 1; n < l->waits && i >= 0; i--) {
        const gck_saved_tensor *saved = l->known[i];
        if (saved->hooks != NULL) {
            bytes += saved->waits;
            if (!saved->on_device || ++n >= FEW || bytes > FEW_BYTES) {
                return 0;
            }
        }
    }
    return 1;
}

/* Settle what the node of this number saves; exactly: without a codec.  0 or -1. */
static int settle_of(gck_saved_list *l, PyObject *node, int64_t number, int exactly, gck_batch *batch)
{
    int status = 0;

    for (int i = l->n, left = l->waits; status == 0 && left > 0 && i-- > 0;) {
        left -= l->known[i]->hooks != NULL;
        if (l->known[i]->hooks != NULL && l->known[i]->number == number) {
            status = settle(l->known[i], exactly ? NULL : node, GCK_SKIP_EXACT, 0, batch);
            i = l->n;                            /* Python has run: the list may have changed */
            left = l->waits;
        }
    }
    return status;
}

/* What uses the result of a node: nothing that amplifies an error, value by value; something that does; or that is
 * not known yet, of so many nodes on one path. */
typedef enum { USED, AMPLIFIED, OPEN, OPEN_LAST = OPEN + 7 } use;

/* The use of a node, where its result is used so and has `numel` values there.  -1 with an exception. */
static int use_of(gck_state *state, PyObject *node, int kind, use above, int64_t numel)
{
    int64_t own;

    if (above == USED || !gck_node_passes_on(state, kind)) {
        return USED;
    }
    own = gck_node_numel(&state->py, node);
    return own < 0 ? -1 : own == numel && above <= OPEN_LAST ? (int)above : USED;
}

static int search(gck_saved_list *l, PyObject *node, int64_t number, int64_t end, use above, int64_t numel, int depth,
                  gck_batch *batch);

/* Search behind a node that is used so.  0 or -1. */
static int search_behind(gck_saved_list *l, PyObject *node, int kind, int64_t end, use found, int depth,
                         gck_batch *batch)
{
    gck_state *state = batch->state;
    PyObject *edges = PyObject_GetAttr(node, state->py.names.next_functions);
    int64_t numel = 0;
    int status = edges == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; status == 0 && l->waits > 0 && i < PyTuple_Size(edges); i++) {
        PyObject *next = PyTuple_GetItem(PyTuple_GetItem(edges, i), 0);
        const int amplifies = next != Py_None ? gck_node_amplifies(state, node, kind, i) : 0;
        const use behind = amplifies > 0 ? AMPLIFIED : found >= OPEN ? (use)(found + 1) : found;
        if (amplifies < 0 || (behind != USED && numel == 0 && (numel = gck_node_numel(&state->py, node)) < 0)) {
            status = -1;
        } else if (next != Py_None) {
            status = search(l, next, gck_node_number(&state->py, next), end, behind, numel, depth - 1, batch);
        }
    }
    Py_XDECREF(edges);
    return status;
}

/* As gck_saved_waiting_reach().  Numbers fall from step to step, so `depth` limits the nodes that
 * are being made now. */
static int search(gck_saved_list *l, PyObject *node, int64_t number, int64_t end, use above, int64_t numel, int depth,
                  gck_batch *batch)
{
    int64_t *seen = &l->seen[number >= 0 ? number % GCK_WAITING_NODES : 0];
    int kind, found, status = 0;

    if (number < 0 || number < oldest(l) || number == INT64_MAX || *seen == number + 1 || depth == 0) {
        return number < 0 ? -1 : 0;
    }
    kind = gck_node_kind(batch->state, node);
    found = kind < GCK_NODE_LEAF ? -1 : use_of(batch->state, node, kind, above, numel);
    if (found >= OPEN) {                         /* once a search, or two paths to each node double with every node */
        const int64_t at = number % GCK_WAITING_NODES;
        if (l->open[at] == number + 1 && l->open_in[at] == l->searches) {
            return 0;
        }
        l->open[at] = number + 1;
        l->open_in[at] = l->searches;
    } else if (found >= 0 && number < end) {
        *seen = number + 1;
        status = settle_of(l, node, number, found == AMPLIFIED, batch);
    }
    if (found < 0 || status < 0) {
        return -1;
    }
    /* faster: where none waits, nothing else is looked for */
    status = l->waits == 0 ? 0 : search_behind(l, node, kind, end, (use)found, depth, batch);
    return status < 0 ? -1 : gck_pins_looked(batch->state, node);
}

int gck_saved_waiting_reach(PyObject *waiting, gck_state *state, PyObject *node, int64_t number, int64_t end,
                            int open, int *tracing)
{
    gck_saved_list *l = gck_saved_list_of(waiting);

    gck_batch batch;
    gck_error error;
    int64_t numel;
    int status;

    if (l->waits == 0) {
        return 0;
    }
    if ((*tracing = gck_tracing(&state->py)) != 0) {     /* values cannot be read */
        return *tracing < 0 ? -1 : 0;
    }
    numel = open ? gck_node_numel(&state->py, node) : 0;
    if (numel < 0) {
        return -1;
    }
    l->searches++;
    gck_batch_begin(&batch, state, 0);
    status = search(l, node, number, end, open ? OPEN : USED, numel, 2 * GCK_WAITING_NODES, &batch);
    error = gck_error_take();                    /* what was settled before needs its bytes none the less */
    if (gck_batch_flush(&batch) < 0) {
        status = -1;
    }
    return gck_error_return(&error) < 0 ? -1 : status;
}
