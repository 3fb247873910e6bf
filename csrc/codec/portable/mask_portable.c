/* mask_portable.c: the kernels of mask in portable C. */
#include "codec/portable/kernels_portable.h"

void gck_portable_mask_pack(const uint8_t *x, int64_t ngroups, uint8_t *to, int streaming)
{
    (void)streaming;
    for (int64_t i = 0; i < ngroups * GCK_GROUP / 8; i++) {
        unsigned byte = 0;
        for (int b = 0; b < 8; b++) {
            byte |= (x[8 * i + b] != 0u) << b;
        }
        to[i] = (uint8_t)byte;
    }
}

void gck_portable_mask_unpack(const uint8_t *from, int64_t ngroups, uint8_t *x, int streaming)
{
    (void)streaming;
    for (int64_t i = 0; i < ngroups * GCK_GROUP; i++) {
        x[i] = from[i / 8] >> (i % 8) & 1;
    }
}
