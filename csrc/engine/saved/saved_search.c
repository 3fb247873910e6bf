/* saved_search.c: finds the node that saves a tensor.
 *
 * A pack hook is called while the node is being made.  Nothing refers to the node yet, but its
 * sequence number is known.  As soon as a later tensor is seen, the graph behind it is searched for
 * nodes of these numbers.  The number alone is not proof (an autograd Function may make nodes
 * before it saves): saved_role.c compares what the node holds with what the hook returned. */
#include "engine/saved/saved_search.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/objects.h"
#include "torch/tensor.h"
#include "engine/payload/batch.h"
#include "engine/payload/payload.h"
#include "engine/saved/node_use.h"
#include "engine/saved/saved_functions.h"
#include "engine/saved/saved_pins.h"
#include "engine/saved/saved_held.h"
#include "engine/saved/saved_waiting.h"

#include <stdlib.h>
#include <string.h>

/* What a search has still to visit.  far: only open uses were on the path, too many to go on waiting for their
 * end.  pole: what amplifies. */
typedef struct { PyObject *node; int64_t number; gck_use use; int far; PyTypeObject *pole; } visit;

/* Nodes: no more than there are tensors that wait, and as many of Functions. */
enum { MAX_DECIDED = 2 * GCK_WAITING_TENSORS };

/* How a node's tensors are to be settled. */
typedef struct { PyObject *node; int64_t number; int exactly; } decision;

/* A search visits the newest node first, so a node comes after all that use it, and settles the oldest first: views
 * share the payload of a whole tensor that was saved before. */
typedef struct {
    gck_saved_hooks *self;
    gck_saved_list  *l;
    gck_batch        batch;
    int64_t          end, latest;                /* settle below; the latest number of all             */
    int              steep;                      /* follow only what amplifies or may, as in a backward */
    visit           *heap;                       /* owned; their nodes, too; the newest first */
    Py_ssize_t       n, room;
    decision         decided[MAX_DECIDED];       /* owned nodes                                        */
    int              n_decided;
} search;

static void swap(visit *a, visit *b)
{
    const visit c = *a;

    *a = *b;
    *b = c;
}

/* Visit a node, unless it is a leaf or too old to be remembered.  0 or -1. */
static int push(search *s, visit next)
{
    next.number = gck_node_number(&s->batch.state->py, next.node);
    if (next.number < 0 || next.number == INT64_MAX || next.number <= s->latest - GCK_WAITING_NODES) {
        return next.number < 0 ? -1 : 0;
    }
    if (gck_make_room(&s->heap, s->n, &s->room, sizeof *s->heap) < 0) {
        return -1;
    }
    Py_INCREF(next.node);
    s->heap[s->n++] = next;
    for (Py_ssize_t i = s->n - 1; i > 0 && s->heap[i].number > s->heap[(i - 1) / 2].number; i = (i - 1) / 2) {
        swap(&s->heap[i], &s->heap[(i - 1) / 2]);
    }
    return 0;
}

/* The newest; its reference is the caller's. */
static visit pop_one(search *s)
{
    const visit top = s->heap[0];

    s->heap[0] = s->heap[--s->n];
    for (Py_ssize_t i = 0, child; (child = 2 * i + 1) < s->n; i = child) {
        child += child + 1 < s->n && s->heap[child + 1].number > s->heap[child].number;
        if (s->heap[child].number <= s->heap[i].number) {
            break;
        }
        swap(&s->heap[child], &s->heap[i]);
    }
    return top;
}

/* The newest, with all uses of its result that this search has met. */
static visit pop(search *s)
{
    visit top = pop_one(s);

    while (s->n > 0 && s->heap[0].node == top.node) {
        const visit other = pop_one(s);
        const int closer = other.use >= GCK_OPEN && top.use >= GCK_OPEN ? other.use < top.use
                         : other.use >= GCK_OPEN ? top.use == GCK_USED
                         : top.use >= GCK_OPEN ? other.use != GCK_USED : other.use > top.use;
        if (closer) {
            top.use = other.use;
            top.pole = other.pole;
        }
        top.far = top.far || other.far;
        Py_DECREF(other.node);
    }
    return top;
}

/* Borrowed: the latest of those that wait for the node with this number; NULL: none.  decided 0: not of those that a
 * search will settle. */
static gck_saved_tensor *waiting_for(const gck_saved_list *l, int64_t number, int decided)
{
    for (int i = l->n, left = l->waits; left > 0 && i-- > 0;) {
        gck_saved_tensor *saved = l->known[i];
        left -= saved->hooks != NULL;
        if (saved->hooks != NULL && saved->number == number && (decided || !saved->decided)) {
            return saved;
        }
    }
    return NULL;
}

/* Settle what this node saves.  0 or -1. */
static int settle_one(search *s, const decision *d)
{
    gck_saved_tensor *saved;
    int status = 0;

    while (status == 0 && (saved = waiting_for(s->l, d->number, 1)) != NULL) {
        status = gck_saved_waiting_settle(saved, d->node, d->exactly, 0, &s->batch);
    }
    return status < 0 || !gck_is_function(d->node) ? status
         : gck_saved_function_settle(s->batch.state, d->node, d->exactly, &s->batch);
}

/* What the node of this number saves is to be settled; exactly: without error.  0 or -1. */
static int decide(search *s, PyObject *node, int64_t number, int exactly)
{
    gck_saved_tensor *saved;
    int found = gck_is_function(node);           /* it may have saved what does not wait */

    while ((saved = waiting_for(s->l, number, 0)) != NULL) {
        saved->decided = found = 1;
    }
    if (found && s->n_decided == MAX_DECIDED) {  /* very many Functions: the oldest need not be the first */
        return settle_one(s, &(decision){node, number, exactly});
    }
    if (found) {
        s->decided[s->n_decided++] = (decision){Py_NewRef(node), number, exactly};
    }
    return 0;
}

/* Settle what was decided; failed: nothing.  0 or -1. */
static int settle_decided(search *s, int failed)
{
    gck_saved_list *l = s->l;
    int status = failed ? -1 : 0;

    for (int i = 0; i < l->n; i++) {
        l->known[i]->decided = 0;
    }
    while (s->n_decided > 0) {
        const decision *d = &s->decided[--s->n_decided];
        status = status < 0 ? -1 : settle_one(s, d);
        Py_DECREF(d->node);
    }
    return status;
}

/* Return to the tensors of which this node, whose result turns out to be used by a pole, has stored payloads.
 * 0 or -1: one of them is gone, and the pole is known. */
static int recall(search *s, const visit *at, int kind)
{
    gck_state *state = s->batch.state;
    const gck_codec *codec;
    const gck_saved_row *row;
    int status = 0;

    for (int n = 0; state->nodes_tell && status == 0 && (row = gck_saved_row_of(kind, n)) != NULL; n++) {
        GCK_SCOPED gck_saved_tensor *saved = gck_node_saved(state, at->node, kind, n);
        status = saved == NULL ? (PyErr_Occurred() ? -1 : 0) : gck_saved_form_take_back(s->self, saved);
        codec = saved != NULL && status == 0 ? gck_saved_form_codec(&saved->form) : NULL;
        if (codec != NULL && codec->max_error > 0 && at->use == GCK_AMPLIFIED) {
            GCK_SCOPED PyObject *pole = PyType_GetName(at->pole);
            if (pole != NULL) {
                PyErr_Format(PyExc_RuntimeError, "gradckpt: %U amplifies the error of what %s has stored in %s; pass "
                             "compress={'operators': {'%s': None}}", pole, row->node, codec->name,
                             gck_family_name(row->family));
            }
            return -1;
        }
    }
    return status;
}

/* 1 when something steep made a factor of this product; 0; -1.  Found out once. */
static int made_steeply(search *s, const visit *at, int kind)
{
    const int64_t place = at->number % GCK_WAITING_NODES;
    int steep;

    if (s->l->asked[place] != at->number + 1) {
        if ((steep = gck_made_steeply(s->batch.state, at->node, kind)) < 0) {
            return -1;
        }
        s->l->asked[place] = at->number + 1;
        s->l->steep[place] = (unsigned char)steep;
    }
    return s->l->steep[place];
}

/* 1 when what saves the result of this node, or something made from it, still waits for its own node. */
static int is_awaited(const gck_saved_list *l, int64_t number)
{
    const int64_t at = number % GCK_WAITING_NODES;

    return l->open[at] == number + 1 && l->open_for[at] != number && waiting_for(l, l->open_for[at], 0) != NULL;
}

/* Visit what is behind the node next.  0 or -1. */
static int go_behind(search *s, const visit *at, int kind)
{
    gck_state *state = s->batch.state;
    GCK_SCOPED PyObject *edges = PyObject_GetAttr(at->node, state->py.names.next_functions);
    int status = edges == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; status == 0 && i < PyTuple_Size(edges); i++) {
        PyObject *edge = PyTuple_GetItem(edges, i), *next = PyTuple_GetItem(edge, 0);
        const int use = next != Py_None ? gck_use_behind(state, at->node, kind, edge, i, at->use) : 0;
        const int far = at->far || use >= GCK_OPEN_LAST;
        const visit to = {next, 0, use < GCK_OPEN ? (gck_use)use : far ? GCK_USED : (gck_use)(use + 1), far,
                          use == GCK_AMPLIFIED && at->use != GCK_AMPLIFIED ? Py_TYPE(at->node) : at->pole};
        status = use < 0 ? -1 : next == Py_None || (s->steep && use == GCK_USED) ? 0 : push(s, to);
    }
    return status;
}

/* Visit a node.  0 or -1. */
static int look_at(search *s, const visit *at)
{
    gck_state *state = s->batch.state;
    gck_saved_list *l = s->l;
    const int64_t number = at->number, place = number % GCK_WAITING_NODES;
    const int open = at->use >= GCK_OPEN;
    int kind, matters, exactly;

    if (l->seen[place] == number + 1 && (open || (gck_use)l->seen_use[place] >= at->use)) {
        return 0;
    }
    kind = gck_node_kind(state, at->node);
    matters = kind < GCK_NODE_LEAF ? -1 : at->use == GCK_USED ? 0 : gck_use_matters(state, at->node, kind);
    exactly = matters < 0 ? -1 : !open && matters ? 1 : made_steeply(s, at, kind);
    if (exactly < 0) {
        return -1;
    }
    if (open) {
        l->open[place] = number + 1;
        l->open_for[place] = s->end;
    } else if (at->use == GCK_USED && !at->far && is_awaited(l, number)) {
        return 0;
    } else {
        l->seen[place] = number + 1;
        l->seen_use[place] = (unsigned char)at->use;
    }
    if (number < s->end && (exactly || !open || !matters)) {
        if (decide(s, at->node, number, exactly) < 0) {
            return -1;
        }
        l->coded = kind >= 0 && !exactly && number > l->coded ? number : l->coded;
    }
    if ((!open && matters && recall(s, at, kind) < 0) || go_behind(s, at, kind) < 0) {
        return -1;
    }
    return s->steep ? 0 : gck_pins_looked(state, at->node);
}

/* As gck_saved_search(), for one node and what is behind it. */
static int look_from(search *s, PyObject *node, gck_use use)
{
    int status = push(s, (visit){node, 0, use, 0, Py_TYPE(node)});

    while (s->n > 0) {
        const visit at = pop(s);
        status = status < 0 ? -1 : look_at(s, &at);
        Py_DECREF(at.node);
    }
    return settle_decided(s, status < 0) < 0 ? -1 : status;
}

/* What was packed while searches were put off: what it was made from is used by nodes that are not known yet.
 * 0 or -1. */
static int look_from_late(search *s)
{
    const int64_t end = s->end;
    gck_saved_tensor *saved;
    int status = 0;

    for (int i = 0; status == 0 && (saved = gck_saved_list_known(s->self->waiting, i)) != NULL; i++) {
        const int late = saved->hooks != NULL && saved->late;
        GCK_SCOPED PyObject *node = !late ? Py_NewRef(Py_None)
                                  : PyObject_GetAttr(saved->form.entry.value, s->batch.state->py.names.grad_fn);
        if (node != NULL && node != Py_None) {
            saved->late = 0;
            s->end = saved->number;
            status = look_from(s, node, GCK_OPEN);
        }
        status = node == NULL ? -1 : status;
    }
    s->end = end;
    return status;
}

int gck_saved_search(gck_saved_hooks *self, PyObject *node, int64_t number, int64_t end, int *tracing)
{
    gck_state *state = self->packing.state;
    gck_saved_list *l = gck_saved_list_of(self->waiting);
    search s = {.self = self, .l = l, .end = end, .latest = end < INT64_MAX ? end : number};
    int status;

    if (l->waits == 0 && l->coded <= s.latest - GCK_WAITING_NODES && l->undecided <= s.latest - GCK_WAITING_NODES) {
        return 0;
    }
    if ((*tracing = gck_tracing(&state->py)) != 0) {     /* values cannot be read */
        return *tracing < 0 ? -1 : 0;
    }
    gck_batch_begin(&s.batch, state, 0);
    status = look_from_late(&s);
    status = status < 0 ? -1 : look_from(&s, node, GCK_OPEN);
    free(s.heap);
    if (status < 0) {                            /* who goes on none the less is to be told again */
        memset(l->seen, 0, sizeof l->seen);
    }
    gck_error error = gck_error_take();          /* what was settled before needs its bytes none the less */
    if (gck_batch_flush(&s.batch) < 0) {
        status = -1;
    }
    return gck_error_return(&error) < 0 ? -1 : status;
}

int gck_saved_search_in_backward(gck_saved_hooks *self, const gck_saved_tensor *saved)
{
    gck_state *state = self->packing.state;
    search s = {.self = self, .steep = 1};
    GCK_SCOPED PyObject *node = NULL, *list = NULL;

    if (!saved->unknown && saved->hooks == NULL) {
        return 0;
    }
    if ((node = PyObject_CallNoArgs(state->py.running_node)) == NULL) {
        return -1;
    }
    const int kind = node != Py_None ? gck_node_kind(state, node) : GCK_NODE_VIEW;
    if (kind < GCK_NODE_LEAF || !gck_node_may_amplify(kind)) {
        return kind < GCK_NODE_LEAF ? -1 : 0;
    }
    list = gck_saved_list_new();                 /* that of the thread knows other nodes */
    s.l = list != NULL ? gck_saved_list_of(list) : NULL;
    s.latest = list != NULL ? gck_node_number(&state->py, node) : -1;
    gck_batch_begin(&s.batch, state, 0);
    const int status = s.latest < 0 ? -1 : look_from(&s, node, GCK_USED);
    free(s.heap);
    return status;
}
