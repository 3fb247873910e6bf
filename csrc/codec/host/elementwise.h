/* elementwise.h: the host kernels of the codecs without a scale: casts, mask, lossless.  One table per
 * instruction set, beside that of cpu_features.h. */
#ifndef GRADCKPT_ELEMENTWISE_H
#define GRADCKPT_ELEMENTWISE_H

#include "codec/host/group_host.h"
#include "codec/format/lossless.h"

/* Values are contiguous and aligned to their own size, payloads to 16 bytes.  `streaming`: the
 * output is too large to stay in cache, so non-temporal stores are faster.  All write exactly the
 * bytes of the scalar kernels, and return GCK_OK or GCK_E_OVERFLOW. */

/* n float32 to 16 bits, and back.  A finite value that would become infinite becomes NaN:
 * GCK_E_OVERFLOW. */
typedef int gck_narrow(const float *x, int64_t n, uint16_t *to, int streaming);
typedef void gck_widen(const uint16_t *from, int64_t n, float *x, int streaming);

/* `ngroups` groups of 128 bools to 16 bytes each, and back. */
typedef void gck_mask_pack(const uint8_t *x, int64_t ngroups, uint8_t *to, int streaming);
typedef void gck_mask_unpack(const uint8_t *from, int64_t ngroups, uint8_t *x, int streaming);

/* `ngroups` groups from the first of a block on, and back.  A block that overflows has base 0 in
 * all its groups, and the first 64 exponents in its arena. */
typedef int gck_lossless_encode(const void *x, int64_t ngroups, gck_lossless_parts to, int streaming);
typedef void gck_lossless_decode(gck_lossless_parts from, int64_t ngroups, void *x, int streaming);

/* Encode one group of a block by the reference.  `used` exponents are in the arena already (some
 * may not have found room).  Returns the new number. */
int gck_lossless_encode_group(const void *x, gck_dtype dtype, uint8_t *words, uint8_t *base, uint8_t *arena, int used);
int gck_lossless_decode_group(const uint8_t *words, uint8_t base, const uint8_t *arena, int used, void *x,
                              gck_dtype dtype);

typedef struct {
    const char          *name;                             /* the name of the gck_isa */
    gck_narrow          *to_bf16, *to_f16;
    gck_widen           *from_bf16, *from_f16;
    gck_mask_pack       *mask_pack;
    gck_mask_unpack     *mask_unpack;
    gck_lossless_encode *lossless_encode[GCK_NFLOATS];
    gck_lossless_decode *lossless_decode[GCK_NFLOATS];
} gck_direct;

#define GCK_DIRECT_KERNELS(isa)                                                      \
    gck_narrow          gck_##isa##_to_bf16, gck_##isa##_to_f16;                     \
    gck_widen           gck_##isa##_from_bf16, gck_##isa##_from_f16;                 \
    gck_mask_pack       gck_##isa##_mask_pack;                                       \
    gck_mask_unpack     gck_##isa##_mask_unpack;                                     \
    gck_lossless_encode gck_##isa##_lossless_encode_f32, gck_##isa##_lossless_encode_f16, \
        gck_##isa##_lossless_encode_bf16;                                            \
    gck_lossless_decode gck_##isa##_lossless_decode_f32, gck_##isa##_lossless_decode_f16, \
        gck_##isa##_lossless_decode_bf16;
GCK_DIRECT_KERNELS(scalar)
#if defined(__x86_64__)
GCK_DIRECT_KERNELS(avx2)
GCK_DIRECT_KERNELS(avx512)
#endif

/* Prefetch the nbytes that lie 4 KiB beyond p.  One core then reads memory a fifth faster, because
 * the CPU's own prefetcher stops at every page (measured on Zen 3; 2 to 16 KiB perform alike). */
static inline void gck_ask_ahead(const void *p, size_t nbytes)
{
    for (size_t at = 0; at < nbytes; at += 64) {
        /* An integer: the address may lie beyond the tensor, where a pointer may not. */
        __builtin_prefetch((const void *)((uintptr_t)p + 4096 + at));
    }
}

/* The table for gck_isa_current(). */
const gck_direct *gck_direct_current(void);

/* Process the values of blocks [first, last) of a tensor in contiguous runs: whole blocks in place,
 * anything else through a buffer whose last group is padded with zeros. piece() gets the first
 * value's index, the number of values, and whether to stream.  Returns the status of the pieces:
 * GCK_OK or GCK_E_OVERFLOW. decode: piece() writes the values. */
typedef int gck_piece(void *values, int64_t first, int64_t count, int streaming, void *ctx);
int gck_encode_pieces(const gck_tensor *x, int64_t first, int64_t last, gck_piece *piece, void *ctx);
void gck_decode_pieces(const gck_tensor *out, int64_t first, int64_t last, gck_piece *piece, void *ctx);

#endif
