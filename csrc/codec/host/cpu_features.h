/* cpu_features.h: the instruction set in use. */
#ifndef GRADCKPT_CPU_FEATURES_H
#define GRADCKPT_CPU_FEATURES_H

#include "codec/portable/kernels.h"
#include "codec/portable/kernels_portable.h"

/* Chosen at the first call, and changed only by gck_isa_force(). */
const gck_kernels *gck_kernels_current(void);

/* A kernel of the instruction set in use, or the portable one where it has none.  The table is read
 * once: another thread may change it. */
#define GCK_KERNEL(field)                                             \
    __extension__({                                                   \
        const gck_kernels *in_use = gck_kernels_current();            \
        in_use->field ? in_use->field : gck_kernels_portable.field;   \
    })

#endif
