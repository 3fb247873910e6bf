/* abi.c: fills the table. torch opens its libraries RTLD_LOCAL, so dlsym(RTLD_DEFAULT) finds
 * nothing; opening them again by name with RTLD_NOLOAD finds them. */
#include "torch/abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* Callbacks from libtorch (boxed kernels, thread pool) carry no context of ours, and the addresses
 * are a fact about the process, so this table is static. */
gck_abi gck_torch;

static void *open_loaded(const char *name, const char *torch_lib)
{
    void *lib = dlopen(name, RTLD_NOLOAD | RTLD_LAZY);

    if (lib == NULL && torch_lib != NULL) {
        char path[4096];
        if (snprintf(path, sizeof path, "%s/%s", torch_lib, name) < (int)sizeof path) {
            lib = dlopen(path, RTLD_NOLOAD | RTLD_LAZY);
        }
    }
    return lib;                                 /* never closed: torch is never unloaded */
}

static void *find(void *cpu, void *cuda, const char *name)
{
    void *symbol = dlsym(cpu, name);

    return symbol == NULL && cuda != NULL ? dlsym(cuda, name) : symbol;
}

const char *gck_abi_load(gck_abi *abi, const char *torch_lib)
{
    enum { OPTIONAL, REQUIRED };
    void *cpu = open_loaded("libtorch_cpu.so", torch_lib);
    void *cuda = open_loaded("libtorch_cuda.so", torch_lib);

    if (cpu == NULL) {
        return "libtorch_cpu.so";
    }
    /* memcpy, because ISO C has no cast from an object pointer to a function pointer. */
#define SYMBOL(necessity, type, name, arguments)                \
    {                                                           \
        void *symbol = find(cpu, cuda, #name);                  \
        if (symbol == NULL && necessity == REQUIRED) {          \
            return #name;                                       \
        }                                                       \
        memcpy(&abi->name, &symbol, sizeof symbol);             \
    }
    GCK_ABI_SYMBOLS(SYMBOL)
#undef SYMBOL
    return NULL;
}

void gck_torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void *),
                            void *ctx)
{
    if (gck_torch.torch_parallel_for(begin, end, grain, body, ctx) != 0) {
        body(begin, end, ctx);                  /* the pool failed before any part ran: it reports no other case */
    }
}
