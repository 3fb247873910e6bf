/* frame.h: what a checkpointed region leaves behind between forward and backward.
 *
 * The semantics are those of torch.utils.checkpoint (its "Nestable Checkpoint" note):
 *   R1 the innermost region owns the tensors saved inside it;
 *   R2 the inputs of an inner region are saved tensors of the outer one;
 *   R3 a recompute starts with no region active, its own hooks on top;
 *   R4 a recomputed tensor is handed out once, and dies with its use;
 *   R5 the recompute stops when the last tensor is there (early stop);
 *   R6 the graph built during the recompute is usable.
 *
 * Who holds whom: autograd's SavedVariables hold the two hooks, which hold the Frame,
 * and one Holder each.  Frame and Holder know each other by borrowed pointers, cleared
 * by whichever dies first; either order happens. */
#ifndef GRADCKPT_FRAME_H
#define GRADCKPT_FRAME_H

#include "torch/ambient.h"
#include "engine/state.h"
#include "engine/payload/packed.h"
#include "engine/selective/op_storage.h"
#include "engine/region/determinism.h"
#include "engine/region/origin.h"
#include "engine/region/recomputed.h"
#include "engine/region/saved_samples.h"

typedef struct gck_frame gck_frame;

/* One per saved tensor of the region: what autograd keeps in its place. */
typedef struct {
    PyObject_HEAD
    gck_frame *frame;              /* borrowed; NULL once the frame is gone              */
    Py_ssize_t index;              /* of its slot                                        */
} gck_holder;

/* One per saved tensor. */
typedef struct {
    gck_holder  *holder;           /* borrowed; NULL: that part of the graph is freed    */
    gck_metadata meta;             /* unless `check` is GCK_CHECK_NOTHING                */
    gck_origin   origin;           /* with torch's default check                         */
} gck_slot;

typedef enum { GCK_RECORDING, GCK_SAVED_PHASE } gck_frame_phase;

struct gck_frame {
    PyObject_HEAD
    gck_state   *state;              /* borrowed: the type keeps the module alive          */

    /* ---- of every region ---- */
    PyObject    *function;
    gck_packed  *args;               /* nargs positional, then one per name in kwnames     */
    Py_ssize_t   nargs, nkwargs;
    PyObject    *kwnames;            /* tuple                                              */
    gck_ambient  ambient;
    PyObject    *once;               /* modules whose statistics a recompute restores, as in gck_options */
    gck_rounding rounding;           /* where the noise of tensors encoded inside begins   */
    int          approximate;        /* the recompute gets other values than the forward   */
    int64_t      unmet_in;           /* the epoch of the counters that count it, plus 1; 0: a backward has met it */
    int64_t      random_bytes;       /* counted for its state of the generator             */
    int          exact;              /* not now: a forward around it runs, see running.h   */
    uint64_t     layouts;            /* of the arguments in the forward, see run.h         */
    PyObject    *originals[GCK_GIVEN];   /* owned: weak references to these arguments; NULL: fewer */
    int          fake_quantized;     /* the forward, too, ran on the restored values       */
    /* inputs may be restored approximately: which discrete outputs are kept, as in a gck_plan */
    int          replay_discrete;
    gck_op_storage *store;           /* outputs that the recompute takes from the forward; NULL: none */
    PyObject    *calls;              /* dict: calls inside that do not run again, by name; NULL before the first */
    PyObject    *remat;              /* torch_remat's state for this region; NULL: it is not imported */

    /* ---- of a region whose saved tensors are holders: checkpoint(use_reentrant=False) ---- */
    gck_frame_phase phase;
    gck_check    check;
    int          early_stop, ignore_mismatch;
    const gck_run *run;              /* borrowed: of the forward, while it lasts; else NULL */
    PyObject    *recompute_context;  /* from context_fn; NULL: none                        */
    PyObject    *metadata_fn;        /* reads what the determinism check compares; NULL: the default */
    PyObject    *error_callback;     /* debug=True: gets the CheckpointError               */
    gck_slot    *slots;              /* one per saved tensor; malloc                       */
    Py_ssize_t   nslots, capacity;
    gck_recomputed_tables recomputed;
    gck_samples  samples;            /* until they are judged                              */

    /* ---- of a region that is one node of the graph (region_node.h) ---- */
    struct {
        int       reentrant;         /* 1: checkpoint(use_reentrant=True); 0: SelectiveRecompute */
        /* of SelectiveRecompute only: */
        PyObject *policy_fn;         /* owned; NULL: the store's names are the policy      */
        PyObject *parameters_in;     /* list: inputs of the node after the arguments; NULL: not all are known */
        PyObject *outputs;           /* (leaves, spec) until they are assembled; NULL: one tensor */
    } node;
};

extern PyType_Spec gck_frame_spec, gck_holder_spec;

/* 1 when each saved tensor is compared with the forward's by where it comes from, too. */
static inline int gck_checks_origins(const gck_frame *frame)
{
    return frame->check != GCK_CHECK_NOTHING && frame->metadata_fn == NULL;
}

/* 1 when the region is counted, and no backward has met it. */
static inline int gck_frame_is_unmet(const gck_frame *frame) { return frame->unmet_in == frame->state->epoch + 1; }

/* New reference, RECORDING, empty.  NULL with an exception. */
gck_frame *gck_frame_new(gck_state *state);

/* Borrowed: what the region keeps for its policy and of discrete outputs; NULL: nothing. */
gck_op_storage *gck_frame_store(const gck_frame *frame);

/* Remember the arguments of the forward for the recompute.  0 or -1. */
int gck_frame_remember(gck_frame *frame, const gck_run *run);

#endif
