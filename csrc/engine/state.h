/* state.h: what one import of gradckpt._C holds, and the heap types. */
#ifndef GRADCKPT_STATE_H
#define GRADCKPT_STATE_H

#include "gradckpt.h"
#include "engine/owned.h"
#include "torch/objects.h"
#include "torch/tensor.h"

enum {
    GCK_NPLANS = 4,                /* values of compress= that are remembered, parsed        */
    GCK_NRECENT = 8,               /* latest payloads, among which sharing.c searches        */
    GCK_NKINDS = 512,              /* kinds of regions that saved_samples.c judges           */
};

/* compress= after parsing. */
typedef struct {
    const gck_codec *codec;            /* NULL: no compression                               */
    int64_t          min_numel;
    int              fake_quantize;    /* the forward runs on the restored values            */
    int              floating;         /* include="floating": all but parameters             */
    int              replay_discrete;  /* replay discrete outputs, see replay_discrete.h; 2: casts too */
    int              stochastic;       /* round by noise keyed by `seed` and a gck_rounding  */
    uint64_t         seed;
    PyObject        *place;            /* borrowed, for as long as the caller needs the plan; NULL: payloads stay */
} gck_plan;

/* What happens where a recompute saves another tensor than the forward. */
typedef enum { GCK_CHECK_NOTHING, GCK_CHECK_RAISES, GCK_CHECK_WARNS } gck_check;

/* Every counter once: the field is also the key in the dict of _C.stats(). */
#define GCK_COUNTERS(COUNTER)                                                                                  \
    COUNTER(differing_saves)         /* tensors that a recompute saved and the forward did not */              \
    COUNTER(held_bytes)              /* originals of regions that stayed until the region around ended */      \
    COUNTER(steps)                   /* backwards that reached a region */                                     \
    COUNTER(regions)                 /* checkpoint calls with grad on */                                       \
    COUNTER(regions_eligible)        /* of those, with compression */                                          \
    COUNTER(regions_compressed)      /* of those, with a payload */                                            \
    COUNTER(regions_met)             /* regions that a backward has met, or that saved nothing for one */      \
    COUNTER(regions_dropped)         /* regions whose graph went without a backward */                         \
    COUNTER(recomputes)                                                                                        \
    COUNTER(eligible)                /* tensors that require grad, seen with compression on */                 \
    COUNTER(compressed)              /* of those, compressed into payloads (shared ones included) */           \
    COUNTER(encoded)                 /* payloads written */                                                    \
    COUNTER(shared)                  /* how often a payload served another region */                           \
    COUNTER(bytes_in)                /* bytes of encoded tensors ... */                                        \
    COUNTER(bytes_out)               /* ... and of their payloads */                                           \
    COUNTER(live_bytes)              /* payloads alive */                                                      \
    COUNTER(peak_live_bytes)                                                                                   \
    COUNTER(replay_bytes)            /* discrete outputs and random states alive */                            \
    COUNTER(peak_bytes)              /* of these and payloads, at the same time */                             \
    COUNTER(originals_alive)         /* alive at their restore: no memory was saved */                         \
    COUNTER(originals_alive_bytes)                                                                             \
    COUNTER(discrete_outputs)        /* copies of discrete outputs */                                          \
    COUNTER(discrete_bytes)                                                                                    \
    COUNTER(uncompressed_bytes)      /* bytes of those that require grad and are not parameters */             \
    COUNTER(policy_outputs)          /* outputs of operators that a policy keeps */                            \
    COUNTER(policy_bytes)            /* of those, bytes of the uncompressed ones */

typedef struct {
#define COUNTER(name) int64_t name;
    GCK_COUNTERS(COUNTER)
#undef COUNTER
    int64_t codecs[GCK_MAX_CODECS];       /* payloads written by codec, in the order of codecs.h        */
    int64_t uncompressed[GCK_NREASONS];   /* tensors that stayed uncompressed, by reason                */
} gck_stats;

/* Nodes that are held, see saved_pins.h. */
typedef struct {
    struct gck_pin { PyObject *node; int64_t number; } *held;   /* the nodes owned, the oldest first; malloc */
    Py_ssize_t n, room;
    int        due;                       /* what used one of them has been freed               */
} gck_pins;

/* A kind of region, see saved_samples.h. */
typedef struct {
    PyObject        *of, *method;      /* owned; method NULL: none                          */
    const gck_codec *codec;
    int              looks;            /* regions in which samples were taken; negative: judged */
    int              open;             /* samples of one of them wait for the recompute     */
} gck_kind;

/* The noise of the next tensor that is rounded stochastically.  A new step begins with the first
 * region or tensor after a restore, that is, after a backward. */
typedef struct {
    uint32_t step, tensor;
    int      restored;             /* a tensor was restored, or a region ran again, since the last encode */
    /* inside a region, see rounding.h: its number, and the count of tensors that are encoded
     * once */
    uint32_t region, once;
} gck_rounding;

/* The keywords of checkpoint(): torch's, then ours. */
#define GCK_TORCH_OPTIONS(OPTION)                                                        \
    OPTION(use_reentrant) OPTION(preserve_rng_state) OPTION(context_fn)                  \
    OPTION(determinism_check) OPTION(debug) OPTION(early_stop)                           \
    OPTION(respect_saved_tensors_hooks)
#define GCK_OPTIONS(OPTION) GCK_TORCH_OPTIONS(OPTION) OPTION(compress) OPTION(policy) OPTION(offload) OPTION(buffers)

/* Room for the payloads of one codec and number of values, see payload_sizes.h. */
typedef struct {
    const gck_codec *codec;            /* NULL: free                                         */
    gck_dtype        dtype;
    int64_t          numel;
    int64_t          restores;         /* when its step began                                */
    uint32_t         level, latest;    /* parts of all values: of earlier steps, and the most of this one */
} gck_room;
enum { GCK_NROOMS = 64 };

typedef struct {
    gck_py        py;
    PyTypeObject *Payload, *Frame, *Holder, *Recompute, *OpPolicy, *OpStorage, *OpOutput, *Context, *Place;
    PyTypeObject *SavedHooks, *SavedTensor;
    PyObject     *CheckpointFunction;  /* autograd Function of the reentrant form            */
    PyObject     *SelectiveRecompute;  /* autograd Function, public                          */
    PyObject     *selective_apply;     /* autograd's own apply of it                         */
    PyObject     *stateless;           /* known types of modules (parameters.h): no statistics */
    /* what saved_node.c knows: kinds by type and by name, the table's attributes; NULL before the first node */
    PyObject     *node_kinds, *node_names, *saved_attributes;
    int           nodes_tell;          /* nodes of this torch tell what they hold            */
    PyObject     *unknown_functions;   /* name of a node -> (tensors, bytes) that it saved exactly; NULL: none */
    PyObject     *closed;              /* known modules that use no leaves but parameters and arguments */
    gck_kind      kinds[GCK_NKINDS];
    int           nkinds, kinds_from;  /* those before kinds_from do not count now          */
    gck_stats     stats;
    gck_rounding  rounding;
    gck_room      rooms[GCK_NROOMS];   /* the latest used first                              */
    int64_t       restores;            /* tensors that were restored                         */
    const PyObject *random_state;      /* compared only: the state of a generator that was counted last; or NULL */
    int64_t       random_size;         /* bytes of a state of the CPU's generator; 0: not known yet */
    int64_t       last_step;           /* of `rounding`, at the last recompute               */
    int64_t       watched_task;        /* graph task at whose end our callback runs          */
    /* borrowed: first of the frames' tables, where there are any */
    struct gck_recomputed_tables *with_recomputed;
    gck_pins      pins;
    int64_t       saved_alive;         /* SavedTensors                                      */
    int64_t       looked;              /* nodes that were looked at while there were any    */
    int64_t       nodes_known;         /* types of nodes in the slots of frames, see origin.h */
    int64_t       outside;             /* counter for the ids of unpacks outside backward    */
    /* latest first */
    struct { PyObject *key; gck_plan plan; } plans[GCK_NPLANS];
    struct { PyObject *offload, *place; } latest_place;   /* of regions; NULL before the first */
    /* borrowed: a dying payload removes itself */
    struct gck_payload *recent[GCK_NRECENT];
    struct gck_payload *pending;       /* borrowed: the first of those with a pending flag   */
    /* OpPolicy objects, without casts and with; NULL before the first region that needs them */
    PyObject     *replay_discrete[2];
    /* torch's checkpoint, see replay_discrete.c; NULL before the first exchange */
    PyObject     *torch_checkpoint;
    int           replacements;        /* how many regions need ours in its place            */
    struct gck_active *active;         /* borrowed: stores that catch operators, see active_storage.h */
    PyObject     *observer;            /* called with each Frame that has kept its arguments; or NULL */
    int           by_mode;             /* tests: only modes catch operators                  */
    int64_t       late_overflow;       /* tests: see payload_overflow.h; nanoseconds         */
    int64_t       epoch;               /* times the counters were reset                      */
} gck_state;

gck_state *gck_state_of(PyObject *module);

/* Python's add_device(): a kind of device that is torch's PrivateUse1, from now on the accelerator, by a capsule
 * "gck_device_kind".  None. */
PyObject *gck_add_device(PyObject *module, PyObject *capsule);

int gck_state_traverse(gck_state *state, visitproc visit, void *arg);
void gck_state_clear(gck_state *state);

/* Add to the live bytes in stats(): of payloads; of discrete outputs that are kept for a recompute. */
void gck_count_live(gck_state *state, int64_t nbytes);
void gck_count_replay(gck_state *state, int64_t nbytes);

#endif
