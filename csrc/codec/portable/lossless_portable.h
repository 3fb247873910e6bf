/* lossless_portable.h: one group of lossless by the reference. */
#ifndef GRADCKPT_LOSSLESS_PORTABLE_H
#define GRADCKPT_LOSSLESS_PORTABLE_H

#include "codec/format/lossless.h"

/* Encode one group of a block, and back.  `used` exponents are in the arena already (some
 * may not have found room).  Returns the new number. */
int gck_lossless_encode_group(const void *x, gck_dtype dtype, uint8_t *words, uint8_t *base, uint8_t *arena, int used);
int gck_lossless_decode_group(const uint8_t *words, uint8_t base, const uint8_t *arena, int used, void *x,
                              gck_dtype dtype);

#endif
