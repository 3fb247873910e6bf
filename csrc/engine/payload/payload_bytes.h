/* payload_bytes.h: what a payload is made of: its bytes, their codec, and the layout of the
 * original.  payload.c makes the type of it. */
#ifndef GRADCKPT_PAYLOAD_BYTES_H
#define GRADCKPT_PAYLOAD_BYTES_H

#include "gradckpt.h"
#include "torch/fresh.h"
#include "engine/place.h"
#include "engine/state.h"
#include "engine/payload/layout.h"

enum { GCK_FEW_DIMS = 4, GCK_ALIGNMENT = 64 };     /* bytes: torch's allocators align at least so */

/* The arrays of a payload as uint8 tensors; scales NULL: the codec has none.  Or, with `near`, memory of both that a
 * place has brought, until it is let go. */
typedef struct {
    PyObject *codes, *scales;
    void     *near;
} gck_arrays;

typedef struct gck_payload {
    PyObject_HEAD
    PyObject        *weakrefs;
    gck_state       *state;        /* borrowed: the type keeps the module alive          */
    const gck_codec *codec;
    gck_arrays       arrays;       /* owned; codes NULL when `own` or `saved` has them   */
    gck_fresh        own;          /* both in one, until Python asks for them; else empty */
    gck_arrays       saved;        /* torch's SavedTensors of the arrays; codes NULL: none */
    gck_placed       placed;       /* the bytes at a place; then none of those has them    */
    PyObject        *original;     /* weak reference                                     */
    int64_t          version;      /* of the original when encoded; -1: it has none and is never shared */
    gck_dtype        dtype;
    int              device;       /* -1: CPU                                            */
    int64_t          numel;        /* of the original                                    */
    int64_t          values;       /* that are encoded: fewer where elements share memory */
    gck_lengths      lengths;      /* bytes of the arrays                                */
    int64_t          nbytes, bytes_in;
    const void      *waits;        /* the batch in which its bytes are pending; else NULL */
    int              unwritten;    /* that batch failed: they never will be              */
    int              requires_grad, leaf;
    int              stochastic;   /* rounded stochastically, with the noise of this key: */
    gck_dither       dither;
    int              has_values;   /* 0 in a simulated step: the bytes were not written  */
    int              counted;      /* counted in stats()                                 */
    int              live;         /* counted in live_bytes: outer hooks have not taken the bytes */
    int              ndim;
    int64_t         *sizes;        /* ndim sizes, then ndim strides; malloc, or those:    */
    int64_t          few[2 * GCK_FEW_DIMS];
    gck_layout       layout;       /* PLAIN: the strides do not count                    */
    int              misaligned;   /* bytes from an aligned address to the first value of the original */
    int              shift;        /* values from such an address to the first one that is restored */
    int64_t         *once;         /* EXPANDED, RUN: the sizes of the values, each once; in `sizes`; else NULL */
    void            *stream;       /* the stream that wrote the bytes                    */
    /* See payload_overflow.h. */
    uint32_t        *overflow;     /* not NULL: open, and this is in state->pending      */
    uint32_t         late;         /* tests: the word that the device would write        */
    int              timed_out;    /* a wait for the flag timed out                      */
    int              overflowed;   /* the codec overflowed; buffer and saved may be NULL then */
    struct gck_payload *twin;      /* owned: a payload that may have the same bytes, see payload_overflow.h; or NULL */
    int              merged;       /* it has: then these are twin's                      */
    int              again;        /* it serves two arguments of one region              */
    PyObject        *kept;         /* the original itself, while the flag is pending and after an overflow */
    struct gck_payload *next_pending;
    int64_t          epoch;        /* of the counters below: reset_stats() begins a new epoch */
    int              uses, fresh;  /* regions that use it; encodes in this epoch         */
} gck_payload;

/* 1 when it has its bytes itself, and no outer hook; at a place, where they need not be moved to be read. */
static inline int gck_payload_has_bytes(const gck_payload *payload)
{
    return payload->arrays.codes != NULL || payload->own.handle != NULL || gck_placed_is_near(&payload->placed);
}

/* For reading at a place: *arrays, with `near`, until gck_placed_let_go(&payload->placed).  1; 0: it is at none, or
 * there is no room; -1. */
int gck_payload_bring(gck_payload *payload, void *stream, gck_arrays *arrays);

/* *arrays for gck_payload_view(), if it has its bytes itself, until gck_payload_has_read(), which returns the status,
 * or -1.  1; 0: it has not; -1. */
int gck_payload_read(gck_payload *payload, void *stream, gck_arrays *arrays);
int gck_payload_has_read(gck_payload *payload, void *stream, gck_arrays *arrays, int status);

/* New references, or their end. */
gck_arrays gck_arrays_again(gck_arrays arrays);
void       gck_arrays_clear(gck_arrays *arrays);

/* The memory of its bytes, which are in `arrays`; codes NULL: in the payload.  0 or -1. */
int gck_payload_view(gck_payload *payload, gck_arrays arrays, gck_bytes *bytes);

/* Record the layout of x, as gck_layout_of() does, and what the bytes will be.  0; 1 when no payload
 * can hold this layout; -1. */
int gck_payload_lay_out(gck_payload *payload, const gck_tensor *x, int exact);

/* The values as the codec sees them in the memory of a tensor with the payload's layout. */
gck_tensor gck_payload_values(const gck_payload *payload, void *data, void *stream);

/* New reference: uninitialized memory as the original's, without its values.  Kernels sum in another
 * order where the first value is not aligned, so a slice is restored as far from an aligned address. */
PyObject *gck_payload_memory(const gck_payload *payload);

/* New reference: a tensor with the payload's layout, so many values into a buffer. */
PyObject *gck_payload_within(const gck_payload *payload, PyObject *buffer, int64_t offset);

/* The operands of the codec.  Nothing may run Python between this and the work.  0 or -1. */
int gck_payload_operands(gck_payload *payload, PyObject *tensor, gck_arrays arrays, gck_tensor *view, gck_bytes *bytes,
                     gck_how *how);

/* New references: the arrays, through the outer hooks when those have them.  0 or -1. */
int gck_payload_arrays(gck_payload *payload, gck_arrays *arrays);

/* Count its encode in stats() (by 1), or no longer (-1); 0: nothing. */
void gck_payload_count_encoded(const gck_payload *payload, int by);

/* Stop counting its bytes: other code owns them now. */
void gck_payload_uncount(gck_payload *payload);

/* The latest payloads, borrowed: a dying payload removes itself. */
void gck_payload_remember(gck_payload *payload);
void gck_payload_forget(gck_payload *payload);

#endif
