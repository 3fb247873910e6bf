/* cpu_features.c: chooses the instruction set of the host codecs once, by asking the CPU; tests and
 * GRADCKPT_ISA force one.  The choice is a fact about the process, not about an interpreter, so it
 * is the only static that changes. */
#include "codec/host/cpu_features.h"

#include "codec/portable/kernels_portable.h"
#include "codec/x86/kernels_avx2.h"
#include "codec/x86/kernels_avx512.h"

#include <stdatomic.h>

static int supports_scalar(void) { return 1; }

#if defined(__x86_64__)
static int supports_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static int supports_avx512(void)
{
    return supports_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

/* Best first. */
static const struct { const gck_kernels *isa; int (*supported)(void); } isas[] = {
#if defined(__x86_64__)
    {&gck_kernels_avx512, supports_avx512},
    {&gck_kernels_avx2, supports_avx2},
#endif
    {&gck_kernels_portable, supports_scalar},
};

static const gck_kernels *_Atomic current;

int gck_isa_supported(const char *name)
{
    for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++) {
        if (strcmp(isas[i].isa->name, name) == 0) {
            return isas[i].supported();
        }
    }
    return -1;
}

int gck_isa_force(const char *name)
{
    for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++) {
        if ((name == NULL || strcmp(isas[i].isa->name, name) == 0) && isas[i].supported()) {
            atomic_store(&current, isas[i].isa);
            return 0;
        }
    }
    return -1;
}

const gck_kernels *gck_kernels_current(void)
{
    const gck_kernels *isa = atomic_load_explicit(&current, memory_order_relaxed);

    if (isa == NULL) {
        gck_isa_force(NULL);                 /* scalar is always supported */
        isa = atomic_load(&current);
    }
    return isa;
}

const char *gck_isa_name(void) { return gck_kernels_current()->name; }
