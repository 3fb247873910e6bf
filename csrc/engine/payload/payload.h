/* payload.h: one encoded tensor as a Python object. */
#ifndef GRADCKPT_PAYLOAD_H
#define GRADCKPT_PAYLOAD_H

#include "torch/input.h"
#include "engine/payload/batch.h"
#include "engine/payload/layout.h"

extern PyType_Spec gck_payload_spec;

typedef enum {
    GCK_FOR_USER,            /* gradckpt.codecs.encode(): not counted, never shared                  */
    GCK_FOR_REGION,          /* may be shared with other regions                              */
    GCK_FOR_REGION_SAVED,    /* outer saved-tensor hooks see the bytes, and keep them         */
    GCK_FOR_REGION_READ,     /* the same, after the forward has read them: gck_payload_hand_over() */
} gck_payload_use;

/* For payload.c, batch.c and payload_overflow.c. */
struct gck_payload {
    PyObject_HEAD
    PyObject        *weakrefs;
    gck_state       *state;        /* borrowed: the type keeps the module alive          */
    const gck_codec *codec;
    PyObject        *buffer;       /* uint8 tensor; NULL when `saved` has it             */
    PyObject        *saved;        /* torch's SavedTensor of the buffer; else NULL       */
    PyObject        *original;     /* weak reference                                     */
    int64_t          version;      /* of the original when encoded; -1: it has none and is never shared */
    gck_dtype        dtype;
    int              device;       /* -1: CPU                                            */
    int64_t          numel, nbytes, bytes_in;
    const gck_batch *waits;        /* the batch in which its bytes are pending; else NULL */
    int              requires_grad, leaf;
    int              stochastic;   /* rounded stochastically, with the noise of this key: */
    gck_dither       dither;
    int              counted;      /* counted in stats()                                 */
    int              live;         /* counted in live_bytes: outer hooks have not taken the bytes */
    int              ndim;
    int64_t         *sizes;        /* ndim sizes, then ndim strides; malloc              */
    int              layout;       /* see layout.h; 0: strides do not count              */
    void            *stream;       /* the stream that wrote the bytes                    */
    /* See payload_overflow.h. */
    uint32_t        *overflow;      /* not NULL: open, and this is in state->pending      */
    uint32_t         late;         /* tests: the word that the device would write        */
    int              timed_out;      /* a wait for the flag timed out                       */
    int              overflowed;      /* the codec overflowed; buffer and saved may be NULL then */
    int              again;        /* it serves two arguments of one region              */
    PyObject        *kept;         /* the original itself, while the flag is pending and after an overflow */
    gck_payload     *next_pending;
    int64_t          epoch;        /* of the counters below: reset_stats() begins a new epoch */
    int              uses, fresh;  /* regions that use it; encodes in this epoch         */
};

/* New reference: a payload of this same tensor, rounded as requested, that seems to hold its
 * present values; NULL when none exists, or with an exception.  The version does not prove it
 * (writes through .data, numpy or DLPack leave no trace); gck_payload_new() does.  A payload that
 * is pending in `batch` is finished first.  The input has been judged. */
gck_payload *gck_payload_find(gck_state *state, const gck_codec *codec, gck_input *in, int stochastic, gck_batch *batch);

/* New reference: a payload of the input, which has been judged.  first: the result of
 * gck_payload_find(), or NULL. When the bytes turn out to be equal, they are dropped and the result
 * is `first`, counted as shared.  dither: NULL rounds to nearest; with `first` its own noise
 * counts.  batch: where the work may be deferred, or NULL. NULL with *fits = 0 and no exception:
 * the codec overflows. */
PyObject *gck_payload_new(gck_state *state, const gck_codec *codec, gck_input *in, gck_payload *first,
                          const gck_dither *dither, gck_payload_use use, gck_batch *batch, int *fits);

/* From here on the saved-tensor hooks around the region have the bytes.  Reading them in the
 * forward would run those hooks, an enclosing region's recompute among them.  0 or -1. */
int gck_payload_hand_over(gck_payload *payload);

/* Record that it serves another argument of the same region. */
void gck_payload_again(gck_payload *payload);

/* The memory of its bytes, which are in `buffer`.  0 or -1. */
int gck_payload_view(gck_payload *payload, PyObject *buffer, void **data);

/* For batch.c: the operands of the codec.  Nothing may run Python between this and the work.  0 or
 * -1. */
int gck_payload_work(gck_payload *payload, PyObject *tensor, PyObject *buffer, gck_tensor *view, void **bytes, gck_how *how);

/* For batch.c: its bytes are written, or (`done` 0) never will be. */
void gck_payload_arrived(gck_payload *payload, int done);

/* Stop counting its bytes: other code owns them now. */
void gck_payload_uncount(gck_payload *payload);

/* The payload was made from a detached alias of x; from now on x itself finds it.  0 or -1. */
int gck_payload_adopt(gck_payload *payload, PyObject *x);

/* New reference: a fresh tensor of the shape, dtype, strides and device of the original. */
PyObject *gck_payload_decode(gck_payload *payload);

/* The same, counted as a restore.  Its values may be deferred in `batch`. */
PyObject *gck_payload_revive(gck_payload *payload, gck_batch *batch);

/* The same, requiring grad when the original did. */
PyObject *gck_payload_restore(gck_payload *payload, gck_batch *batch);

/* Add to the live bytes in stats(). */
void gck_count_live(gck_state *state, int64_t nbytes);

/* Return peak_live_bytes, which begins anew with what is alive now. */
PyObject *gck_restart_peak_py(PyObject *module, PyObject *unused);

/* gradckpt.codecs.encode(x, codec, (seed, step, tensor) or None). */
PyObject *gck_encode_py(PyObject *module, PyObject *args);

#endif
