/* abi.h: the symbols of libtorch that we use, found at run time.
 *
 * Nothing of torch is needed to build.  The prototypes below are those of
 * torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h, written as plain C; torch
 * promises them for two years after a release.  Each returns 0 or 1 (failure) unless noted; the
 * receiver releases handles named `owned`. */
#ifndef GRADCKPT_ABI_H
#define GRADCKPT_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
typedef struct StableListOpaque *StableListHandle;
typedef struct StringOpaque *StringHandle;
typedef uint64_t StableIValue;
typedef void gck_boxed_kernel(StableIValue *stack, uint64_t nargs, uint64_t nreturns);

/* Every symbol once: a missing REQUIRED one makes the import fail by name, an OPTIONAL one is NULL
 * when this torch lacks it.  SYMBOL(necessity, return type, name, arguments). */
#define GCK_ABI_SYMBOLS(SYMBOL)                                                                                  \
    SYMBOL(REQUIRED, uint64_t, aoti_torch_abi_version, (void))                                                   \
    SYMBOL(REQUIRED, bool, aoti_torch_grad_mode_is_enabled, (void))                                              \
    SYMBOL(REQUIRED, void, aoti_torch_grad_mode_set_enabled, (bool))                                             \
    SYMBOL(REQUIRED, int32_t, aoti_torch_device_type_cpu, (void))                                                \
    SYMBOL(REQUIRED, int32_t, aoti_torch_device_type_cuda, (void))                                               \
    SYMBOL(REQUIRED, int32_t, aoti_torch_dtype_float32, (void))                                                  \
    SYMBOL(REQUIRED, int32_t, aoti_torch_dtype_float16, (void))                                                  \
    SYMBOL(REQUIRED, int32_t, aoti_torch_dtype_bfloat16, (void))                                                 \
    SYMBOL(REQUIRED, int32_t, aoti_torch_dtype_bool, (void))                                                     \
    SYMBOL(REQUIRED, int32_t, aoti_torch_dtype_uint8, (void))                                                    \
    SYMBOL(REQUIRED, int32_t, aoti_torch_get_dim, (AtenTensorHandle, int64_t *))                                 \
    SYMBOL(REQUIRED, int32_t, aoti_torch_get_numel, (AtenTensorHandle, int64_t *))                               \
    SYMBOL(REQUIRED, int32_t, aoti_torch_get_sizes, (AtenTensorHandle, int64_t **))                              \
    SYMBOL(REQUIRED, int32_t, aoti_torch_get_strides, (AtenTensorHandle, int64_t **))                            \
    SYMBOL(REQUIRED, int32_t, aoti_torch_get_dtype, (AtenTensorHandle, int32_t *))                               \
    SYMBOL(REQUIRED, int32_t, aoti_torch_get_device_type, (AtenTensorHandle, int32_t *))                         \
    SYMBOL(REQUIRED, int32_t, aoti_torch_get_device_index, (AtenTensorHandle, int32_t *))                        \
    SYMBOL(REQUIRED, int32_t, aoti_torch_empty_strided, (int64_t ndim, const int64_t *sizes,                     \
           const int64_t *strides, int32_t dtype, int32_t device_type, int32_t device_index,                     \
           AtenTensorHandle *owned))                                                                             \
    SYMBOL(REQUIRED, int32_t, aoti_torch_delete_tensor_object, (AtenTensorHandle))                               \
    SYMBOL(REQUIRED, int32_t, aoti_torch__reinterpret_tensor, (AtenTensorHandle, int64_t, const int64_t *sizes,  \
           const int64_t *strides, int64_t, AtenTensorHandle *owned))                                            \
    SYMBOL(REQUIRED, int32_t, aoti_torch_library_init_fragment, (const char *ns, const char *file,               \
           uint32_t line, TorchLibraryHandle *owned))                                                            \
    SYMBOL(REQUIRED, int32_t, aoti_torch_library_init_impl, (const char *ns, const char *key,                    \
           const char *file, uint32_t line, TorchLibraryHandle *owned))                                          \
    SYMBOL(REQUIRED, int32_t, aoti_torch_library_def, (TorchLibraryHandle, const char *schema))                  \
    /* Throws a C++ exception when !condition: only for boxed kernels, which libtorch calls. */                  \
    SYMBOL(REQUIRED, void, aoti_torch_check, (bool condition, const char *function, const char *file,            \
           uint32_t line, const char *message))                                                                  \
    /* torch 2.11 and later: */                                                                                  \
    SYMBOL(REQUIRED, int32_t, torch_library_impl, (TorchLibraryHandle, const char *name, gck_boxed_kernel *,     \
           uint64_t build_version))                                                                              \
    SYMBOL(REQUIRED, int32_t, torch_get_const_data_ptr, (AtenTensorHandle, const void **))                       \
    SYMBOL(REQUIRED, int32_t, torch_get_mutable_data_ptr, (AtenTensorHandle, void **))                           \
    SYMBOL(REQUIRED, int32_t, torch_parallel_for, (int64_t begin, int64_t end, int64_t grain,                    \
           void (*body)(int64_t, int64_t, void *), void *ctx))                                                   \
    SYMBOL(REQUIRED, int32_t, torch_list_size, (StableListHandle, size_t *))                                     \
    SYMBOL(REQUIRED, int32_t, torch_list_get_item, (StableListHandle, size_t, StableIValue *))                   \
    SYMBOL(REQUIRED, int32_t, torch_new_list_reserve_size, (size_t, StableListHandle *owned))                    \
    SYMBOL(REQUIRED, int32_t, torch_list_push_back, (StableListHandle, StableIValue))                            \
    SYMBOL(REQUIRED, int32_t, torch_delete_list, (StableListHandle))                                             \
    SYMBOL(REQUIRED, int32_t, torch_string_c_str, (StringHandle, const char **borrowed))                         \
    SYMBOL(REQUIRED, int32_t, torch_delete_string, (StringHandle))                                               \
    SYMBOL(OPTIONAL, int32_t, aoti_torch_device_type_privateuse1, (void))                                        \
    /* libtorch_cuda.so; NULL on a CPU build of torch: */                                                        \
    SYMBOL(OPTIONAL, int32_t, aoti_torch_create_cuda_stream_guard, (void *stream, int32_t index, void **owned))  \
    SYMBOL(OPTIONAL, int32_t, aoti_torch_delete_cuda_stream_guard, (void *))                                     \
    SYMBOL(OPTIONAL, int32_t, aoti_torch_get_current_cuda_stream, (int32_t index, void **borrowed))

typedef struct {
#define SYMBOL(necessity, type, name, arguments) type(*name) arguments;
    GCK_ABI_SYMBOLS(SYMBOL)
#undef SYMBOL
} gck_abi;

/* Fill the table from the libtorch that is loaded in this process; `torch_lib` is the folder of its
 * libraries, for builds that dlopen cannot find by name.  NULL when good, else the name of the
 * missing symbol or library: borrowed, valid for ever. */
const char *gck_abi_load(gck_abi *abi, const char *torch_lib);

/* The table of this process, for callbacks that libtorch calls without a context.
 * Valid after gck_abi_load(). */
extern gck_abi gck_torch;

/* gck_parallel_for over torch's own thread pool. */
void gck_torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void *),
                            void *ctx);

/* The DLPack C exchange table, dlpack.h 1.3, by which C reads a torch tensor in 0.1 us. */
typedef struct { int32_t device_type, device_id; } gck_dl_device;
typedef struct { uint8_t code, bits; uint16_t lanes; } gck_dl_dtype;

typedef struct {
    void         *data;
    gck_dl_device device;
    int32_t       ndim;
    gck_dl_dtype  dtype;
    int64_t      *shape;          /* borrowed from the tensor */
    int64_t      *strides;        /* borrowed from the tensor */
    uint64_t      byte_offset;
} gck_dl_tensor;

enum { GCK_DL_CPU = 1, GCK_DL_UINT = 1, GCK_DL_FLOAT = 2, GCK_DL_BFLOAT = 4, GCK_DL_BOOL = 6 };

typedef struct gck_dl_exchange {
    struct { uint32_t major, minor; } version;
    struct gck_dl_exchange *prev_api;
    void *managed_tensor_allocator;
    void *managed_tensor_from_py_object_no_sync;
    void *managed_tensor_to_py_object_no_sync;
    int (*dltensor_from_py_object_no_sync)(void *py_object, gck_dl_tensor *out);
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out);
} gck_dl_exchange;

#endif
