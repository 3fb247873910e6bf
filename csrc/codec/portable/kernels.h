/* kernels.h: the host kernels: what each does, and the table of them that an instruction set has.
 *
 * All kernels of a field write exactly the same bytes, and are called with the default
 * floating-point environment (nearest, no FTZ, no DAZ).  Values are contiguous and aligned to
 * their own size, payloads to 16 bytes.  `streaming`: the output is too large to stay in cache, so
 * non-temporal stores are faster. */
#ifndef GRADCKPT_KERNELS_H
#define GRADCKPT_KERNELS_H

#include "codec/format/formats.h"
#include "codec/format/lossless.h"
#include "codec/format/philox.h"

/* Encode `ngroups` whole groups as gck_encode_group() does: 128 x ngroups values at x;
 * side: gck_side_words() for each group.  `first`: the index of the first group in its tensor. */
typedef void gck_encode_groups(const void *x, int64_t ngroups, uint8_t *codes, uint16_t *side, int64_t first,
                               int streaming);
typedef void gck_decode_groups(const uint8_t *codes, const uint16_t *side, int64_t ngroups, void *x, int64_t first,
                               int streaming);

/* The same with stochastic rounding. */
typedef void gck_encode_noisy_groups(const void *x, int64_t ngroups, uint8_t *codes, uint16_t *side,
                                     const gck_dither *dither, int64_t first) __attribute__((nonnull(5)));

/* n float32 to 16 bits, and back.  A finite value that would become infinite becomes NaN:
 * GCK_E_OVERFLOW. */
typedef int gck_narrow(const float *x, int64_t n, uint16_t *to, int streaming);
typedef void gck_widen(const uint16_t *from, int64_t n, float *x, int streaming);

/* `ngroups` groups of 128 bools to 16 bytes each, and back. */
typedef void gck_mask_pack(const uint8_t *x, int64_t ngroups, uint8_t *to, int streaming);
typedef void gck_mask_unpack(const uint8_t *from, int64_t ngroups, uint8_t *x, int streaming);

/* `ngroups` groups from the first of a block on, and back.  A block that overflows has base 0 in
 * all its groups, and the first 64 exponents in its arena: GCK_E_OVERFLOW. */
typedef int gck_lossless_encode(const void *x, int64_t ngroups, gck_lossless_parts to, int streaming);
typedef void gck_lossless_decode(gck_lossless_parts from, int64_t ngroups, void *x, int streaming);

/* Of `runs` runs of 64 values: which are not zero (sparse.h), and those one after the other; their number,
 * or -1: they are more than `room`, which nothing is written beyond.  And back: `room` values are there,
 * no fewer than the bitmap has. */
typedef int64_t gck_pack_nonzeros(const void *x, int64_t runs, uint8_t *bitmap, void *to, int64_t room);
typedef void gck_unpack_nonzeros(const uint8_t *bitmap, const void *from, int64_t room, int64_t runs, void *x);

/* One instruction set.  NULL: the portable kernel is used. */
typedef struct {
    const char              *name;
    gck_encode_groups       *encode[GCK_NFORMATS][GCK_NFLOATS];
    gck_encode_noisy_groups *encode_noisy[GCK_NFORMATS][GCK_NFLOATS];
    gck_decode_groups       *decode[GCK_NFORMATS][GCK_NFLOATS];
    gck_narrow              *to_bf16, *to_f16;
    gck_widen               *from_bf16, *from_f16;
    gck_mask_pack           *mask_pack;
    gck_mask_unpack         *mask_unpack;
    gck_lossless_encode     *lossless_encode[GCK_NFLOATS];
    gck_lossless_decode     *lossless_decode[GCK_NFLOATS];
    gck_pack_nonzeros       *pack_nonzeros[GCK_NFLOATS];
    gck_unpack_nonzeros     *unpack_nonzeros[GCK_NFLOATS];
} gck_kernels;

/* The kernels of an instruction set for one format, by the column `simd` of codecs.h. */
#define GCK_SIMD(isa, what, format)                                                     \
    {gck_##isa##_##what##_##format##_GCK_F32, gck_##isa##_##what##_##format##_GCK_F16,  \
     gck_##isa##_##what##_##format##_GCK_BF16}
#define GCK_PORTABLE(isa, what, format) {NULL}

#define GCK_DECLARE_KERNELS_OF(isa, format, dtype)                       \
    gck_encode_groups       gck_##isa##_encode_##format##_##dtype;       \
    gck_encode_noisy_groups gck_##isa##_encode_noisy_##format##_##dtype; \
    gck_decode_groups       gck_##isa##_decode_##format##_##dtype;
#define GCK_DECLARE_SIMD(isa, format)             \
    GCK_DECLARE_KERNELS_OF(isa, format, GCK_F32)  \
    GCK_DECLARE_KERNELS_OF(isa, format, GCK_F16)  \
    GCK_DECLARE_KERNELS_OF(isa, format, GCK_BF16)
#define GCK_DECLARE_PORTABLE(isa, format)
#define GCK_DECLARE_ROW(isa, name, id, format, simd, ...) GCK_DECLARE_##simd(isa, format)

/* Those that are of no format: declarations, and fields of the table. */
#define GCK_DECLARE_OTHER_KERNELS(isa)                                                                      \
    gck_narrow          gck_##isa##_to_bf16, gck_##isa##_to_f16;                                            \
    gck_widen           gck_##isa##_from_bf16, gck_##isa##_from_f16;                                        \
    gck_mask_pack       gck_##isa##_mask_pack;                                                              \
    gck_mask_unpack     gck_##isa##_mask_unpack;                                                            \
    gck_lossless_encode gck_##isa##_lossless_encode_f32, gck_##isa##_lossless_encode_f16,                   \
        gck_##isa##_lossless_encode_bf16;                                                                   \
    gck_lossless_decode gck_##isa##_lossless_decode_f32, gck_##isa##_lossless_decode_f16,                   \
        gck_##isa##_lossless_decode_bf16;
#define GCK_DECLARE_NONZEROS_KERNELS(isa)                                                                   \
    gck_pack_nonzeros   gck_##isa##_pack_nonzeros32, gck_##isa##_pack_nonzeros16;                           \
    gck_unpack_nonzeros gck_##isa##_unpack_nonzeros32, gck_##isa##_unpack_nonzeros16;
#define GCK_OTHER_KERNELS(isa)                                                                              \
    .to_bf16 = gck_##isa##_to_bf16, .to_f16 = gck_##isa##_to_f16,                                           \
    .from_bf16 = gck_##isa##_from_bf16, .from_f16 = gck_##isa##_from_f16,                                   \
    .mask_pack = gck_##isa##_mask_pack, .mask_unpack = gck_##isa##_mask_unpack,                             \
    .lossless_encode = {gck_##isa##_lossless_encode_f32, gck_##isa##_lossless_encode_f16,                   \
                        gck_##isa##_lossless_encode_bf16},                                                  \
    .lossless_decode = {gck_##isa##_lossless_decode_f32, gck_##isa##_lossless_decode_f16,                   \
                        gck_##isa##_lossless_decode_bf16},
#define GCK_NONZEROS_KERNELS(isa)                                                                           \
    .pack_nonzeros = {gck_##isa##_pack_nonzeros32, gck_##isa##_pack_nonzeros16,                             \
                      gck_##isa##_pack_nonzeros16},                                                         \
    .unpack_nonzeros = {gck_##isa##_unpack_nonzeros32, gck_##isa##_unpack_nonzeros16,                       \
                        gck_##isa##_unpack_nonzeros16},

#endif
