/* philox.h: random bits that depend on (seed, step, tensor, index) only, and not on threads,
 * launches or torch's generators.
 *
 * Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
 * Counter: {block, block >> 32, tensor, step}, block = index / 8; key: the seed.  Value
 * 8 block + j of a tensor gets 16 bits: half j % 2, the lower first, of word j / 2. */
#ifndef GRADCKPT_PHILOX_H
#define GRADCKPT_PHILOX_H

#include "codec/format/float_bits.h"

#define GCK_PHILOX_M0 0xD2511F53u
#define GCK_PHILOX_M1 0xCD9E8D57u
#define GCK_PHILOX_W0 0x9E3779B9u
#define GCK_PHILOX_W1 0xBB67AE85u
enum { GCK_PHILOX_ROUNDS = 10, GCK_PHILOX_VALUES = 8 /* per call */ };

GCK_FN void gck_philox(const gck_dither *d, uint64_t block, uint32_t out[4])
{
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = d->tensor, c3 = d->step;
    uint32_t k0 = (uint32_t)d->seed, k1 = (uint32_t)(d->seed >> 32);

    for (int round = 0; round < GCK_PHILOX_ROUNDS; round++) {
        const uint64_t p0 = (uint64_t)GCK_PHILOX_M0 * c0, p1 = (uint64_t)GCK_PHILOX_M1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += GCK_PHILOX_W0;
        k1 += GCK_PHILOX_W1;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* The bits of the 128 values of group `group`. */
GCK_FN void gck_noise_of_group(const gck_dither *d, int64_t group, uint16_t noise[GCK_GROUP])
{
    for (int b = 0; b < GCK_GROUP / GCK_PHILOX_VALUES; b++) {
        uint32_t word[4];
        gck_philox(d, (uint64_t)group * (GCK_GROUP / GCK_PHILOX_VALUES) + (uint64_t)b, word);
        for (int j = 0; j < GCK_PHILOX_VALUES; j++) {
            noise[b * GCK_PHILOX_VALUES + j] = (uint16_t)(word[j / 2] >> (16 * (j % 2)));
        }
    }
}

/* The noise of one value where codes are made: this, to round to nearest, or 16 bits. */
static const int GCK_NEAREST = -1;

/* The middle of the noise's interval in (0, 1): exact. */
GCK_FN float gck_uniform(int noise) { return ((float)noise + 0.5f) * 0x1p-16f; }

#endif
