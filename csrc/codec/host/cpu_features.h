/* cpu_features.h: the host kernels of the group codecs, one table per instruction set. */
#ifndef GRADCKPT_CPU_FEATURES_H
#define GRADCKPT_CPU_FEATURES_H

#include "codec/format/group.h"

#define GCK_FLOAT_BYTES(dtype) ((dtype) == GCK_F32 ? 4 : 2)

/* Encode `ngroups` whole groups: 128 x ngroups contiguous values at x (aligned only to their own
 * size), codes 16-byte aligned; side: GCK_SIDE_WORDS for each group.
 * `first`: the index of the first group in its tensor.
 * `streaming`: the output is too large to stay in cache, so non-temporal stores are faster.
 * The bytes are those of gck_encode_group() / gck_decode_group(), to the last bit.
 * It is called with the default floating-point environment (nearest, no FTZ, no DAZ). */
typedef void gck_encode_groups(const void *x, int64_t ngroups, uint8_t *codes, uint16_t *side, int64_t first,
                               int streaming);
typedef void gck_decode_groups(const uint8_t *codes, const uint16_t *side, int64_t ngroups, void *x, int64_t first,
                               int streaming);

/* The same with stochastic rounding. */
typedef void gck_encode_noisy_groups(const void *x, int64_t ngroups, uint8_t *codes, uint16_t *side,
                                     const gck_dither *dither, int64_t first) __attribute__((nonnull(5)));

/* NULL: the entry of gck_isa_scalar is used. */
typedef struct {
    const char              *name;
    gck_encode_groups       *encode[GCK_NFORMATS][GCK_NFLOATS];
    gck_encode_noisy_groups *encode_noisy[GCK_NFORMATS][GCK_NFLOATS];
    gck_decode_groups       *decode[GCK_NFORMATS][GCK_NFLOATS];
} gck_isa;

extern const gck_isa gck_isa_scalar;     /* group_portable.c: group.h in a loop; the oracle */
#if defined(__x86_64__)
extern const gck_isa gck_isa_avx2;       /* needs AVX2, FMA, F16C                   */
extern const gck_isa gck_isa_avx512;     /* needs AVX-512 F, BW, DQ, VL             */
#endif

/* The one in use: chosen at the first call, and changed only by gck_isa_force(). */
const gck_isa *gck_isa_current(void);

#endif
