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
#include "engine/payload/packed.h"
#include "engine/selective/op_storage.h"

typedef struct gck_frame gck_frame;

/* One per saved tensor of the region: what autograd keeps in its place. */
typedef struct {
    PyObject_HEAD
    gck_frame *frame;              /* borrowed; NULL once the frame is gone              */
    Py_ssize_t index;              /* of its slot                                        */
} gck_holder;

/* The determinism check compares shape, dtype and device.  Plain tensors are read through DLPack
 * into the numbers.  For any other tensor `objects` is (shape, dtype, device), or (value,) with the
 * result of the user's own check. */
enum { GCK_METADATA_INLINE = 4 };
typedef struct {
    PyObject     *objects;         /* owned; NULL: the numbers count                     */
    gck_dl_dtype  dtype;
    gck_dl_device device;
    int32_t       ndim;
    int64_t       sizes[GCK_METADATA_INLINE];
} gck_metadata;

/* One per saved tensor. */
typedef struct {
    gck_holder *holder;            /* borrowed; NULL: that part of the graph is freed    */
    gck_metadata    meta;              /* when check_metadata                                */
} gck_slot;

typedef enum { GCK_RESTORING = 1, GCK_FILLED, GCK_DRAINED } gck_recomputed_phase;

/* The recomputed tensors of one backward: of one graph task, GraphExecGroup, or access
 * from outside any backward. */
typedef struct {
    int64_t         task;          /* graph task id, or < -1: outside                    */
    PyObject       *group;         /* owned GraphExecGroup; then task does not count     */
    gck_recomputed_phase phase;
    int             watched;       /* freed at the end of its graph task                 */
    unsigned long   thread;        /* the recomputing thread, while RESTORING            */
    PyObject       *gate;          /* a lock, held until the recompute is over; NULL: no thread waits */
    Py_ssize_t      counter;       /* tensors packed by the recompute so far             */
    Py_ssize_t      left;          /* values not handed out yet                          */
    Py_ssize_t      size;          /* slots when the table was made: a region may record more */
    PyObject      **values;        /* `size`; NULL: absent or handed out; malloc         */
    unsigned char  *handed;        /* `size`                                             */
} gck_recomputed;

typedef enum { GCK_RECORDING, GCK_SAVED_PHASE } gck_frame_phase;

struct gck_frame {
    PyObject_HEAD
    gck_state      *state;         /* borrowed: the type keeps the module alive          */
    gck_frame_phase phase;
    PyObject       *function;
    gck_packed      *args;          /* nargs positional, then one per name in kwnames     */
    Py_ssize_t      nargs, nkwargs;
    PyObject       *kwnames;       /* tuple                                              */
    gck_ambient     ambient;
    PyObject       *recompute_context;   /* from context_fn; NULL: none                  */
    PyObject       *metadata_fn;         /* reads what the determinism check compares; NULL: the default */
    PyObject       *error_callback;      /* debug=True: gets the CheckpointError         */
    PyObject       *parameters;          /* debug=True: the region's parameters, with versions */
    int             early_stop, check_metadata, ignore_mismatch;
    int             compress_requested;         /* compression was requested                          */
    PyObject       *once;          /* modules whose statistics a recompute restores, as in gck_options */
    int             approximate;   /* the recompute gets other values than the forward   */
    gck_rounding    rounding;      /* where the noise of tensors encoded inside begins   */
    /* inputs may be restored approximately: which discrete outputs are kept, as in a gck_plan */
    int             replay_discrete;
    gck_op_storage      *store;         /* outputs that the recompute takes from the forward; NULL: none */
    PyObject       *policy_fn;     /* owned; NULL: the store's names are the policy      */
    /* Of a region that is one node of the graph (region_node.h): */
    int             reentrant;     /* as torch's reentrant form                          */
    PyObject       *parameters_in; /* list: inputs of the node after the arguments; NULL: not all are known */
    PyObject       *outputs;       /* (leaves, spec) until they are assembled; NULL: one tensor */
    gck_slot       *slots;
    Py_ssize_t      nslots, capacity;
    gck_recomputed     **tables;
    Py_ssize_t      ntables;
    gck_frame      *next;          /* borrowed: in the state's list while there are tables */
    gck_frame     **previous;      /* the pointer to this frame there; NULL: not in the list */
};

/* Stands for the frame in the hooks of a recompute, which may outlive it. */
typedef struct {
    PyObject_HEAD
    gck_frame *frame;              /* borrowed; NULL after the recompute                 */
    gck_recomputed *table;
} gck_recompute;

extern PyType_Spec gck_frame_spec, gck_holder_spec, gck_recompute_spec;

/* New reference, RECORDING, empty.  NULL with an exception. */
gck_frame *gck_frame_new(gck_state *state);

/* New reference: a Holder for the next slot; remembers x's metadata. */
PyObject *gck_frame_add(gck_frame *frame, PyObject *x);

/* 0, or -1 with an exception and *meta empty.  whole: as objects, also for a plain tensor. */
int gck_metadata_of(const gck_frame *frame, PyObject *x, int whole, gck_metadata *meta);
int gck_metadata_same(const gck_py *py, const gck_metadata *a, const gck_metadata *b);      /* 1, 0, -1 */
PyObject *gck_metadata_describe(const gck_metadata *meta);             /* new reference, for the message in Python */
void gck_metadata_clear(gck_metadata *meta);

/* Tables: borrowed; NULL when the frame has none for this key. */
gck_recomputed *gck_recomputed_find(gck_frame *frame, int64_t task, PyObject *group);
gck_recomputed *gck_recomputed_new(gck_frame *frame, int64_t task, PyObject *group);
void gck_recomputed_free(gck_frame *frame, gck_recomputed *table);
void gck_recomputed_clear(gck_frame *frame);
/* The recompute is over: threads that wait for it continue. */
void gck_recomputed_open(gck_recomputed *table);
/* Wait for the recomputing thread, with the GIL released.  0, or -1 when a signal handler raised. */
int gck_recomputed_wait(const gck_py *py, gck_recomputed *table);
/* Free the values; which slots were handed out stays known. */
void gck_recomputed_drain(gck_recomputed *table);

/* recompute.c: the unpack hook, self is the Frame; and the hooks of the recompute. */
PyObject *gck_unpack(PyObject *frame, PyObject *holder);

#endif
