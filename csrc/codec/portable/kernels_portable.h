/* kernels_portable.h: the kernels in portable C, one for every field of the table.  Every other
 * instruction set is compared with them, byte by byte, and may call them. */
#ifndef GRADCKPT_KERNELS_PORTABLE_H
#define GRADCKPT_KERNELS_PORTABLE_H

#include "codec/portable/kernels.h"

extern const gck_kernels gck_kernels_portable;

#define GCK_DECLARE_PORTABLE_ROW(isa, name, id, format, ...) GCK_DECLARE_SIMD(isa, format)
GCK_GROUP_CODECS(GCK_DECLARE_PORTABLE_ROW, portable)
GCK_DECLARE_OTHER_KERNELS(portable)
GCK_DECLARE_NONZEROS_KERNELS(portable)

#endif
