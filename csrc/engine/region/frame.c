/* frame.c: heap types Frame and Holder: slots, tables, lifetimes. */
#include "engine/region/frame.h"

#include "engine/innermost_hooks.h"
#include "engine/rounding.h"
#include "engine/payload/stats.h"
#include "engine/selective/op_mixing.h"
#include "engine/selective/selective_mode.h"

#include <stdlib.h>
#include <string.h>

gck_frame *gck_frame_new(gck_state *state)
{
    gck_frame *frame = (gck_frame *)PyType_GenericAlloc(state->Frame, 0);

    if (frame != NULL) {
        frame->state = frame->recomputed.state = frame->samples.state = state;
        frame->rounding = gck_rounding_of_region(state);
    }
    return frame;
}

gck_op_storage *gck_frame_store(const gck_frame *frame)
{
    gck_op_storage *of_contexts = gck_context_store(frame->state, frame->recompute_context);

    return of_contexts != NULL ? of_contexts : frame->store;
}

/* New reference: a Holder for the next slot; remembers x's metadata. */
static PyObject *add_slot(gck_frame *frame, PyObject *x)
{
    const gck_py *py = &frame->state->py;
    gck_holder *holder = NULL;
    gck_metadata meta = {.objects = NULL};
    gck_origin origin = {.node = NULL};
    const int look = frame->state->nodes_known < GCK_NODES;
    gck_op_storage *store = gck_frame_store(frame);
    int grad;

    /* First, because this may run Python, which may record more slots. */
    if ((store == NULL || gck_op_watch_save(store, x) == 0)
        && (frame->check == GCK_CHECK_NOTHING || gck_metadata_of(py, frame->metadata_fn, x, 0, &meta) == 0)
        && (!gck_checks_origins(frame) || gck_origin_of(py, frame->run, look, x, &origin, &grad) == 0)
        && gck_make_room(&frame->slots, frame->nslots, &frame->capacity, sizeof *frame->slots) == 0) {
        holder = PyObject_New(gck_holder, frame->state->Holder);
    }
    if (holder == NULL) {
        gck_metadata_clear(&meta);
        gck_origin_clear(&origin);
        return NULL;
    }
    holder->frame = frame;
    holder->index = frame->nslots;
    frame->state->nodes_known += origin.node != NULL;
    frame->slots[frame->nslots++] = (gck_slot){holder, meta, origin};
    if (gck_samples_note(&frame->samples, "note_saved", holder->index, x) < 0) {
        Py_DECREF((PyObject *)holder);
        return NULL;
    }
    return (PyObject *)holder;
}

int gck_frame_remember(gck_frame *frame, const gck_run *run)
{
    frame->layouts = run->layouts;
    for (int i = 0; i < run->n; i++) {
        Py_CLEAR(frame->originals[i]);           /* of a node's forward that was called twice */
        if ((frame->originals[i] = PyWeakref_NewRef(run->given[i], NULL)) == NULL) {
            return -1;
        }
    }
    return 0;
}

/* ---- Frame ---- */

#define OF(field) offsetof(gck_frame, field)
static const gck_owned frame_owned[] = {
    OF(function), OF(once), OF(kwnames), OF(recompute_context), OF(metadata_fn), OF(error_callback), OF(store),
    OF(calls), OF(remat), OF(samples.taken), OF(node.policy_fn), OF(node.parameters_in), OF(node.outputs),
    OF(ambient.cpu_rng), OF(ambient.device_rng), OF(ambient.autocast.types), OF(ambient.autocast.cpu_dtype),
    OF(ambient.autocast.device_dtype), OF(ambient.device), 0,
};
#undef OF

static int frame_traverse(PyObject *op, visitproc visit, void *arg)
{
    gck_frame *frame = (gck_frame *)op;

    for (Py_ssize_t i = 0; frame->args != NULL && i < frame->nargs + frame->nkwargs; i++) {
        int result = gck_packed_traverse(&frame->args[i], visit, arg);
        if (result != 0) {
            return result;
        }
    }
    for (Py_ssize_t i = 0; i < frame->nslots; i++) {
        Py_VISIT(frame->slots[i].meta.objects);
        Py_VISIT(frame->slots[i].origin.node);
        Py_VISIT(frame->slots[i].origin.through);
    }
    for (Py_ssize_t t = 0; t < frame->recomputed.n; t++) {
        const gck_recomputed *table = frame->recomputed.table[t];
        Py_VISIT(table->group);
        for (Py_ssize_t i = 0; i < table->size; i++) {
            Py_VISIT(table->slots[i].value);
        }
    }
    return gck_object_visit(op, frame_owned, visit, arg);
}

static int frame_clear(PyObject *op)
{
    gck_frame *frame = (gck_frame *)op;
    gck_packed *args = frame->args;

    gck_recomputed_clear(&frame->recomputed);
    for (Py_ssize_t i = 0; i < frame->nslots; i++) {
        gck_metadata_clear(&frame->slots[i].meta);
        frame->state->nodes_known -= frame->slots[i].origin.node != NULL;
        gck_origin_clear(&frame->slots[i].origin);
    }
    for (int i = 0; i < GCK_GIVEN; i++) {
        Py_CLEAR(frame->originals[i]);
    }
    frame->args = NULL;
    for (Py_ssize_t i = 0; args != NULL && i < frame->nargs + frame->nkwargs; i++) {
        gck_packed_clear(&args[i]);
    }
    free(args);
    gck_samples_clear(&frame->samples);
    gck_uncount_random(frame->state, frame->random_bytes);
    frame->random_bytes = 0;
    return gck_owned_clear(op, frame_owned);
}

static void frame_dealloc(PyObject *op)
{
    gck_frame *frame = (gck_frame *)op;

    PyObject_GC_UnTrack(op);
    /* Autograd drops the hooks before the holder of the same SavedVariable. */
    for (Py_ssize_t i = 0; i < frame->nslots; i++) {
        if (frame->slots[i].holder != NULL) {
            frame->slots[i].holder->frame = NULL;
        }
    }
    if (gck_frame_is_unmet(frame)) {             /* one that saved nothing had no need of a backward */
        const int met = frame->phase == GCK_SAVED_PHASE && frame->nslots == 0;
        frame->state->stats.regions_met += met;
        frame->state->stats.regions_dropped += !met;
    }
    frame_clear(op);
    free(frame->slots);
    free(frame->recomputed.table);
    gck_object_free(op);
}

static PyObject *frame_call(PyObject *self, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *x;

    return PyArg_ParseTuple(args, "O:pack", &x) ? add_slot((gck_frame *)self, x) : NULL;
}

static PyType_Slot frame_slots[] = {
    {Py_tp_dealloc, frame_dealloc},
    {Py_tp_traverse, frame_traverse},
    {Py_tp_clear, frame_clear},
    {Py_tp_call, frame_call},
    {Py_tp_getset, gck_hook_getset},
    {0, NULL},
};

PyType_Spec gck_frame_spec = {
    .name = "gradckpt._C.Frame",
    .basicsize = sizeof(gck_frame),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = frame_slots,
};

/* ---- Holder ---- */

/* Take the value of a slot out of the table that has one; NULL when none has. */
static PyObject *take_value(gck_frame *frame, Py_ssize_t index)
{
    for (Py_ssize_t i = 0; i < frame->recomputed.n; i++) {
        gck_recomputed *t = frame->recomputed.table[i];
        if (index < t->size && t->slots[index].value != NULL) {
            PyObject *value = t->slots[index].value;
            t->slots[index].value = NULL;
            if (--t->left == 0 && t->phase == GCK_FILLED) {
                gck_recomputed_drain(t);
            }
            return value;
        }
    }
    return NULL;
}

/* This part of the graph is gone, and so are its recomputed tensors.  Freeing one may free
 * anything, also the frame, which then has cleared holder->frame. */
static void holder_dealloc(PyObject *op)
{
    gck_holder *holder = (gck_holder *)op;
    PyObject *value;

    while (holder->frame != NULL && (value = take_value(holder->frame, holder->index)) != NULL) {
        Py_DECREF(value);
    }
    if (holder->frame != NULL) {
        holder->frame->slots[holder->index].holder = NULL;
    }
    gck_object_free(op);
}

/* (frame, index of the slot); None once the frame is gone. */
static PyObject *holder_slot(PyObject *op, void *Py_UNUSED(unused))
{
    const gck_holder *holder = (gck_holder *)op;

    return holder->frame != NULL ? Py_BuildValue("On", (PyObject *)holder->frame, holder->index) : Py_NewRef(Py_None);
}

static PyGetSetDef holder_getset[] = {
    {"slot", holder_slot, NULL, "The frame, and the index of the saved tensor in it.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot holder_slots[] = {
    {Py_tp_dealloc, holder_dealloc},
    {Py_tp_getset, holder_getset},
    {0, NULL},
};

PyType_Spec gck_holder_spec = {
    .name = "gradckpt._C.Holder",
    .basicsize = sizeof(gck_holder),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = holder_slots,
};
