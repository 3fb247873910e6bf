/* recompute.c: the backward side.  The first unpack of a frame in a backward runs the function
 * again and fills a table.  Every unpack takes its value out of the table. */
#include "engine/region/recompute.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/input.h"
#include "torch/objects.h"
#include "engine/innermost_hooks.h"
#include "engine/state.h"
#include "engine/region/determinism.h"
#include "engine/region/exchanged.h"
#include "engine/region/frame.h"
#include "engine/region/recompute_env.h"
#include "engine/region/recomputed.h"
#include "engine/region/region.h"

#include <stdlib.h>

/* ---- which table ---- */

/* The key of this backward.  *group: new reference or NULL.  0 or -1. */
static int current_task(gck_frame *frame, int64_t *task, PyObject **group)
{
    gck_state *state = frame->state;
    GCK_SCOPED PyObject *value = NULL;

    *group = NULL;
    *task = gck_as_int64(PyObject_CallNoArgs(state->py.graph_task_id));
    if (*task == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (*task != -1 && gck_recomputed_find(&frame->recomputed, *task, NULL) != NULL) {
        return 0;                                /* there was no group at its first unpack */
    }
    if ((value = PyObject_CallNoArgs(state->py.graph_exec_group)) == NULL) {
        return -1;
    }
    if (value != Py_None) {
        *group = gck_give(&value);
        *task = 0;
        return 0;
    }
    if (*task == -1) {
        *task = -2 - state->outside++;           /* each access outside any backward has its own table */
    }
    return 0;
}

/* Two device threads of one backward can arrive here.  The second waits, with the GIL released and
 * no lock held, until the first has run the function. */
static int wait_for(gck_frame *frame, int64_t task, PyObject *group)
{
    for (;;) {
        gck_recomputed *t = gck_recomputed_find(&frame->recomputed, task, group);
        if (t == NULL || t->phase != GCK_RESTORING) {
            return 0;                            /* done, or failed and removed: then this thread tries */
        }
        if (t->thread == PyThread_get_thread_ident()) {
            return gck_done(PyErr_Format(
                PyExc_RuntimeError, "gradckpt: a tensor of a checkpointed region was unpacked by the "
                "recompute of that same region; move that backward out of the region"));
        }
        if (gck_recomputed_wait(&frame->state->py, t) < 0) {
            return -1;
        }
    }
}

/* ---- the hooks of the recompute ---- */

/* Stands for the frame in the hooks of a recompute, which may outlive it. */
typedef struct {
    PyObject_HEAD
    gck_state *state;              /* borrowed: the type keeps the module alive          */
    gck_frame *frame;              /* borrowed; NULL after the recompute                 */
    gck_recomputed *table;
    const gck_run *run;            /* borrowed: with the restored arguments; NULL after it */
    gck_origin *origins;           /* borrowed: one per slot; NULL: they are not compared */
} gck_recompute;

/* Called for every tensor saved while the function runs again.  Keep it for its slot; raise torch's
 * stop exception once all slots were filled. */
static PyObject *recompute_pack(PyObject *op, PyObject *x)
{
    gck_recompute *self = (gck_recompute *)op;
    const gck_py *py = &self->state->py;
    gck_origin origin = {.node = NULL};
    /* where arguments are laid out anew, operators on them may differ too: nothing is known */
    gck_origin *origins = self->run != NULL && !self->run->laid_anew ? self->origins : NULL;
    GCK_SCOPED PyObject *value = NULL;
    int64_t version = GCK_NO_VERSION;
    int grad = 0, status = 0;

    if (self->frame != NULL && origins != NULL) {
        const Py_ssize_t at = self->table->counter;
        const int look = at < self->frame->nslots && self->frame->slots[at].origin.looked;
        status = gck_origin_of(py, self->run, look, x, &origin, &grad);
    } else if (self->frame != NULL) {
        status = grad = gck_attr_is_true(x, py->names.requires_grad);
    }
    if (status >= 0) {
        value = grad ? PyObject_CallMethodObjArgs(x, py->names.detach, NULL) : Py_NewRef(x);
    }
    if (value != NULL && self->frame != NULL
        && (gck_version_of(py, value, &version) < 0
            || gck_samples_note(&self->frame->samples, "note_restored", self->table->counter, value) < 0)) {
        Py_CLEAR(value);
    }
    gck_frame *frame = self->frame;              /* read now: the calls above may have ended the recompute */
    gck_recomputed *table = self->table;

    if (value != NULL && frame != NULL && origins != NULL && table->counter < table->size) {
        origins[table->counter] = origin;
    } else {
        gck_origin_clear(&origin);
    }
    if (value == NULL || frame == NULL) {
        if (!PyErr_Occurred()) {
            gck_raise_torchs(py, "recompute_over");
        }
        return NULL;
    }
    const Py_ssize_t index = table->counter++;   /* surplus tensors count too, as in torch */
    if (index >= table->size) {
        if (frame->early_stop) {                 /* user code caught the stop exception and continued */
            gck_raise_torchs(py, "went_on");
            return NULL;
        }
        if (frame->phase == GCK_RECORDING) {     /* a backward inside the region, with early stop off */
            frame->ignore_mismatch = 1;
            return gck_give(&value);
        }
        return PyObject_CallFunction(frame->state->py.call.raise_more_saved, "i", frame->approximate);
    }
    if (frame->slots[index].holder != NULL) {           /* else that part of the graph is already freed */
        table->slots[index].value = Py_NewRef(value);
        table->slots[index].version = version;
        table->left++;
    }
    if (frame->early_stop && table->counter == table->size) {
        PyErr_SetNone(frame->state->py.StopRecomputation);
        return NULL;
    }
    return gck_give(&value);                     /* R6 */
}

static PyObject *recompute_call(PyObject *self, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *x;

    return PyArg_ParseTuple(args, "O:pack", &x) ? recompute_pack(self, x) : NULL;
}

static PyType_Slot recompute_slots[] = {
    {Py_tp_dealloc, gck_object_free},
    {Py_tp_call, recompute_call},
    {Py_tp_getset, gck_hook_getset},
    {0, NULL},
};

PyType_Spec gck_recompute_spec = {
    .name = "gradckpt._C.Recompute",
    .basicsize = sizeof(gck_recompute),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = recompute_slots,
};

static PyObject *recompute_unpack(PyObject *Py_UNUSED(op), PyObject *x)
{
    return Py_NewRef(x);                         /* R6 */
}

static PyMethodDef recompute_unpack_def = {"recompute_unpack", recompute_unpack, METH_O, NULL};

/* ---- running the function again ---- */

/* Run the function under its contexts, hooks on top.  0, or -1 with its exception. */
static int run_function(gck_frame *frame, gck_recompute *self, PyObject *args, PyObject *kwargs)
{
    const gck_hooks hooks = {(PyObject *)self, &recompute_unpack_def, &self->table->counter, &self->run};
    GCK_SCOPED PyObject *result = gck_region_call(frame, &hooks, frame->recompute_context, args, kwargs, 1);

    /* Raised for this region or one inside: torch swallows both. */
    if (result == NULL && !PyErr_ExceptionMatches(frame->state->py.StopRecomputation)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

/* Find what was changed in place after it was packed: a recompute hands it over as it is at the end.  Before
 * statistics of norms are put back, which changes them.  0 or -1. */
static int find_overwritten(const gck_frame *frame, const gck_recomputed *table)
{
    int status = 0;

    for (Py_ssize_t i = 0; i < table->size && status == 0; i++) {
        GCK_SCOPED PyObject *value = Py_XNewRef(table->slots[i].value);      /* reading a subclass runs Python */
        int64_t *version = &table->slots[i].version, now = GCK_NO_VERSION;
        if (value != NULL && *version >= 0 && (status = gck_version_of(&frame->state->py, value, &now)) == 0
            && now >= 0 && now != *version) {
            *version = GCK_OVERWRITTEN;
        }
    }
    return status;
}

/* Run one recompute into `table`, with ambient state and grad mode as in the forward.  origins: where
 * what it saves comes from, out; NULL: they are not compared. */
static int run_recompute(gck_frame *frame, gck_recomputed *table, gck_origin *origins)
{
    gck_state *state = frame->state;
    GCK_SCOPED gck_recompute *self = PyObject_New(gck_recompute, state->Recompute);
    GCK_SCOPED PyObject *args = NULL, *kwargs = NULL;
    gck_recompute_env env;
    int result = -1;

    if (self == NULL) {
        return -1;
    }
    self->state = state;
    self->frame = frame;
    self->table = table;
    self->origins = origins;
    self->run = NULL;
    if (gck_region_restore(frame, NULL, NULL, &args, &kwargs) == 0 && gck_recompute_env_begin(frame, &env) == 0) {
        result = run_function(frame, self, args, kwargs) < 0 ? -1 : find_overwritten(frame, table);
        result = gck_recompute_env_end(frame, &env) < 0 ? -1 : result;
    }
    self->frame = NULL;                          /* the graph of the recompute may outlive the frame */
    self->table = NULL;
    self->origins = NULL;
    return result;
}

/* ---- the determinism check ---- */

/* 1 when this slot got another tensor than in the forward, as far as its origin tells; 0; -1. */
static int is_another(const gck_frame *frame, const gck_origin *origins, Py_ssize_t n, Py_ssize_t i,
                      const gck_metadata *then, const gck_metadata *now)
{
    const gck_origin *was = &frame->slots[i].origin, *is = &origins[i];
    const int known = was->node != NULL && is->node != NULL;
    const int same = gck_origin_same(was, is);

    return same < 0 ? -1 : !same || (known && !gck_metadata_same_layout(then, now)) ? 1
         : gck_leaf_is_exchanged(frame, origins, n, i);
}

/* What the two runs have in a slot, for a message: [slot, metadata of both, strides and origins of both]. */
static PyObject *difference(const gck_frame *frame, const gck_origin *origins, Py_ssize_t i, const gck_metadata *then,
                            const gck_metadata *now)
{
    return Py_BuildValue("nNNNNNN", i, gck_metadata_describe(then), gck_metadata_describe(now),
                         gck_metadata_strides(then), gck_metadata_strides(now),
                         gck_origin_describe(&frame->slots[i].origin), gck_origin_describe(&origins[i]));
}

/* Compare slot i and add a difference to one of the lists: of metadata, as torch compares them, or of
 * origins.  origins NULL: those are not compared.  0 or -1. */
static int check_slot(gck_frame *frame, gck_recomputed *table, const gck_origin *origins, Py_ssize_t i,
                      PyObject *metadata, PyObject *others)
{
    /* reading a subclass runs Python, which may record more slots */
    GCK_SCOPED PyObject *value = Py_XNewRef(table->slots[i].value);
    GCK_CLEARED_BY(gck_metadata_clear) gck_metadata then = frame->slots[i].meta, now = {.objects = NULL};

    Py_XINCREF(then.objects);
    if (frame->slots[i].holder == NULL || value == NULL) {
        return 0;
    }
    if (gck_metadata_of(&frame->state->py, frame->metadata_fn, value, then.objects != NULL, &now) < 0) {
        return -1;
    }
    Py_CLEAR(value);
    const int same = gck_metadata_same(&frame->state->py, &then, &now);
    if (same == 0) {
        return gck_append(metadata, Py_BuildValue("nNN", i, gck_metadata_describe(&then), gck_metadata_describe(&now)));
    }
    const int another = same > 0 && origins != NULL ? is_another(frame, origins, table->size, i, &then, &now) : 0;
    return same < 0 ? -1 : another <= 0 ? another : gck_append(others, difference(frame, origins, i, &then, &now));
}

/* Raise for these differences, or warn.  0 or -1. */
static int report(const gck_frame *frame, PyObject *callback, PyObject *differences)
{
    const Py_ssize_t n = PyList_Size(differences);

    frame->state->stats.differing_saves += n;
    return n == 0 ? 0 : gck_done(PyObject_CallFunction(callback, "OOii", differences, frame->function,
                                                       frame->approximate, frame->check == GCK_CHECK_WARNS));
}

static int check_slots(gck_frame *frame, gck_recomputed *table, const gck_origin *origins)
{
    const gck_py *py = &frame->state->py;
    GCK_SCOPED PyObject *metadata = PyList_New(0), *others = PyList_New(0);
    int status = metadata == NULL || others == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; i < table->size && status == 0; i++) {
        status = check_slot(frame, table, origins, i, metadata, others);
    }
    if (status == 0 && (status = report(frame, py->call.raise_metadata, metadata)) == 0) {
        status = report(frame, py->call.raise_origins, others);
    }
    return status;
}

static int check(gck_frame *frame, gck_recomputed *table, const gck_origin *origins)
{
    if (frame->ignore_mismatch) {
        return 0;
    }
    if (table->counter != table->size) {
        Py_XDECREF(PyObject_CallFunction(frame->state->py.call.raise_fewer_saved, "nni", table->size,
                                       table->counter, frame->approximate));
        return -1;
    }
    return frame->check != GCK_CHECK_NOTHING ? check_slots(frame, table, origins) : 0;
}

/* Fill the table, then compare what it has with what the forward saved.  0; 1 with an exception: it
 * differs, or the comparison failed; -1: the recompute did. */
static int run_and_check(gck_frame *frame, gck_recomputed *table)
{
    const Py_ssize_t n = table->size;
    gck_origin *origins = gck_checks_origins(frame) ? calloc((size_t)n + 1, sizeof *origins) : NULL;
    int status = -1;

    if (origins == NULL && gck_checks_origins(frame)) {
        return gck_done(PyErr_NoMemory());
    }
    if (run_recompute(frame, table, origins) == 0) {
        /* both may run Python: no other thread sees the table yet */
        status = check(frame, table, origins) < 0 || (!frame->exact && gck_samples_decide(&frame->samples) < 0);
    }
    for (Py_ssize_t i = 0; origins != NULL && i < n; i++) {
        gck_origin_clear(&origins[i]);
    }
    free(origins);
    return status;
}

/* ---- unpack ---- */

/* Borrowed: the filled table of this backward.  It recomputes when the frame has none. */
static gck_recomputed *filled_table(gck_frame *frame, int64_t task, PyObject *group)
{
    gck_recomputed *table;

    /* First, because it may run Python: no other thread may run between the search for the table
     * and its creation. */
    if (gck_region_note_step(frame->state) < 0 || (task >= -1 && gck_region_note_create_graph(frame) < 0)
        || wait_for(frame, task, group) < 0) {
        return NULL;
    }
    table = gck_recomputed_find(&frame->recomputed, task, group);
    if (table != NULL) {
        return table;
    }
    table = gck_recomputed_new(&frame->recomputed, frame->nslots, task, group);
    if (table == NULL) {
        return NULL;
    }
    const int status = run_and_check(frame, table);
    if (status < 0) {
        gck_recomputed_free(&frame->recomputed, table);      /* a later unpack tries again, as in torch */
        return NULL;
    }
    table->phase = GCK_FILLED;                   /* also after a failed check, as in torch */
    gck_recomputed_open(table);
    return status > 0 ? NULL : table;
}

static PyObject *take(gck_frame *frame, gck_recomputed *table, Py_ssize_t index)
{
    PyObject *value = index < table->size ? table->slots[index].value : NULL;

    if (value != NULL && table->slots[index].version == GCK_OVERWRITTEN) {      /* as autograd does it */
        return PyObject_CallFunction(frame->state->py.call.raise_overwritten, "O", value);
    }
    if (value != NULL) {
        table->slots[index].value = NULL;        /* R4: autograd's reference is the last */
        table->slots[index].handed = 1;
        if (--table->left == 0) {
            gck_recomputed_drain(table);
        }
        return value;
    }
    gck_raise_torchs(&frame->state->py, index < table->size && table->slots[index].handed ? "unpacked_twice" : "lost");
    return NULL;
}

static PyObject *unpack(gck_frame *frame, Py_ssize_t index)
{
    int64_t task;
    GCK_SCOPED PyObject *group = NULL;

    if (current_task(frame, &task, &group) < 0) {
        return NULL;
    }
    gck_recomputed *table = filled_table(frame, task, group);
    PyObject *value = table != NULL ? take(frame, table, index) : NULL;
    if (task < -1 && (table = gck_recomputed_find(&frame->recomputed, task, group)) != NULL) {
        gck_recomputed_free(&frame->recomputed, table);      /* outside a backward every access has its own */
    }
    return value;
}

PyObject *gck_unpack(PyObject *op, PyObject *holder)
{
    gck_frame *frame = (gck_frame *)op;

    if (Py_TYPE(holder) != frame->state->Holder || ((gck_holder *)holder)->frame != frame) {
        return PyErr_Format(PyExc_TypeError,
                            "gradckpt: unpack was called with something that this region did not pack");
    }
    if (frame->args == NULL || frame->function == NULL) {
        return PyErr_Format(PyExc_RuntimeError, "gradckpt: this checkpointed region was already collected as garbage; "
                                                "keep its output");
    }
    GCK_SCOPED PyObject *held = Py_NewRef(op), *error = NULL;      /* user code in the recompute may drop the graph */
    /* The holder may be freed with it, so its index is read now. */
    PyObject *value = unpack(frame, ((gck_holder *)holder)->index);
    if (value != NULL || frame->error_callback == NULL || !PyErr_ExceptionMatches(frame->state->py.CheckpointError)) {
        return value;
    }
    error = gck_error_object();
    return PyObject_CallFunctionObjArgs(frame->error_callback, error, NULL);
}
