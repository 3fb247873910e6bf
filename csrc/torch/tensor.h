/* tensor.h: torch's Python objects, cached once, and tensors as gck_tensor views. */
#ifndef GRADCKPT_TENSOR_H
#define GRADCKPT_TENSOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../gradckpt.h"
#include "abi.h"
#include "error.h"
#include "rng.h"

/* Python objects of torch that the hot paths call: looked up once, owned. */
#define GCK_PY_OBJECTS(OBJECT)                                             \
    OBJECT(Tensor, "torch", "Tensor")                                      \
    OBJECT(Parameter, "torch.nn", "Parameter")                             \
    OBJECT(Module, "torch.nn", "Module")                                   \
    OBJECT(Function, "torch.autograd", "Function")                         \
    OBJECT(backward, "torch.autograd", "backward")                         \
    OBJECT(cache_enabled, "torch", "is_autocast_cache_enabled")            \
    OBJECT(autocast_dtype, "torch", "get_autocast_dtype")                  \
    OBJECT(empty, "torch", "empty")                                        \
    OBJECT(empty_strided, "torch", "empty_strided")                        \
    OBJECT(strided, "torch", "strided")                                    \
    OBJECT(scalar_tensor, "torch", "scalar_tensor")                        \
    OBJECT(uint8, "torch", "uint8")                                        \
    OBJECT(float32, "torch", "float32")                                    \
    OBJECT(float16, "torch", "float16")                                    \
    OBJECT(bfloat16, "torch", "bfloat16")                                  \
    OBJECT(boolean, "torch", "bool")                                       \
    OBJECT(device, "torch", "device")                                      \
    OBJECT(size, "torch", "Size")                                          \
    OBJECT(checkpoint_module, "torch.utils", "checkpoint")                 \
    OBJECT(is_compiling, "torch.compiler", "is_compiling")                 \
    OBJECT(forward_ad, "torch.autograd", "forward_ad")                     \
    OBJECT(CheckpointError, "torch.utils.checkpoint", "CheckpointError")   \
    OBJECT(noop_context_fn, "torch.utils.checkpoint", "noop_context_fn")   \
    OBJECT(new_lock, "_thread", "allocate_lock")                            \
    OBJECT(partial, "functools", "partial")                                \
    OBJECT(defaultdict, "collections", "defaultdict")                      \
    OBJECT(count, "itertools", "count")                                    \
    /* Private names of torch: what each is, and what is lost without it, is said there. */ \
    OBJECT(is_checkpoint_valid, "gradckpt._torch_private", "is_checkpoint_valid")          \
    OBJECT(push_hooks, "gradckpt._torch_private", "push_hooks")                            \
    OBJECT(pop_hooks, "gradckpt._torch_private", "pop_hooks")                              \
    OBJECT(top_hooks, "gradckpt._torch_private", "top_hooks")                              \
    OBJECT(next_node_number, "gradckpt._torch_private", "next_node_number")                \
    OBJECT(graph_task_id, "gradckpt._torch_private", "graph_task_id")                      \
    OBJECT(keeps_graph, "gradckpt._torch_private", "keeps_graph")                          \
    OBJECT(graph_exec_group, "gradckpt._torch_private", "graph_exec_group")                \
    OBJECT(any_autocast, "gradckpt._torch_private", "any_autocast")                        \
    OBJECT(function_stack_len, "gradckpt._torch_private", "function_stack_len")            \
    OBJECT(push_function_mode, "gradckpt._torch_private", "push_function_mode")            \
    OBJECT(pop_function_mode, "gradckpt._torch_private", "pop_function_mode")              \
    OBJECT(dispatch_stack_len, "gradckpt._torch_private", "dispatch_stack_len")            \
    OBJECT(StopRecomputation, "gradckpt._torch_private", "StopRecomputation")              \
    OBJECT(tree_flatten, "gradckpt._torch_private", "tree_flatten")                        \
    OBJECT(tree_unflatten, "gradckpt._torch_private", "tree_unflatten")                    \
    OBJECT(supported_nodes, "gradckpt._torch_private", "supported_nodes")                  \
    OBJECT(set_included, "gradckpt._torch_private", "set_included")                        \
    OBJECT(set_excluded, "gradckpt._torch_private", "set_excluded")                        \
    OBJECT(is_included, "gradckpt._torch_private", "is_included")                          \
    OBJECT(is_excluded, "gradckpt._torch_private", "is_excluded")                          \
    OBJECT(FakeTensor, "gradckpt._torch_private", "FakeTensor")                            \
    OBJECT(guards, "gradckpt._torch_private", "guards")                                    \
    OBJECT(frame_callback, "gradckpt._torch_private", "frame_callback")                    \
    OBJECT(set_frame_callback, "gradckpt._torch_private", "set_frame_callback")            \
    OBJECT(ignored_ops, "gradckpt._torch_private", "ignored_ops")                          \
    OBJECT(run_backward, "gradckpt._torch_private", "run_backward")                        \
    OBJECT(queue_callback, "gradckpt._torch_private", "queue_callback")                    \
    OBJECT(peek_functorch, "gradckpt._torch_private", "peek_functorch")                    \
    /* What they are is said there: */                                     \
    OBJECT(make_saved_tensor, "gradckpt._objects", "make_saved_tensor")       \
    OBJECT(as_non_leaf, "gradckpt._objects", "as_non_leaf")                   \
    OBJECT(cpu_device, "gradckpt._objects", "cpu_device")                     \
    OBJECT(recompute_mark, "gradckpt._objects", "recompute_mark")             \
    OBJECT(consumed_mark, "gradckpt._objects", "consumed_mark")               \
    OBJECT(cast, "gradckpt._objects", "cast")                                 \
    OBJECT(draws, "gradckpt._objects", "draws")                               \
    OBJECT(key, "gradckpt._objects", "key")                                   \
    OBJECT(key_inplace, "gradckpt._objects", "key_inplace")

/* Attribute and method names, interned. */
#define GCK_PY_NAMES(NAME)                                                             \
    NAME(shape) NAME(dtype) NAME(device) NAME(layout) NAME(requires_grad)              \
    NAME(is_leaf) NAME(is_cpu) NAME(is_neg) NAME(requires_grad_) NAME(detach) NAME(unpack) NAME(to) \
    NAME(_version) NAME(_op) NAME(_parameters) NAME(_modules) NAME(__self__) NAME(func) NAME(frame) \
    NAME(_backward_hooks) NAME(saved_tensors) NAME(save_for_backward) NAME(set_materialize_grads) \
    NAME(_current_level) NAME(_enable_checkpoint_early_stop) NAME(_checkpoint_debug_enabled) \
    NAME(grad_fn) NAME(next_functions) NAME(_sequence_nr) NAME(cpu) NAME(untyped_storage) NAME(data_ptr) NAME(_base) \
    NAME(nbytes) NAME(form_of_input) NAME(form_when_packed)

/* Others, owned too. */
#define GCK_PY_MADE(OBJECT)                                                                           \
    OBJECT(ignored)              /* ignored_ops as a tuple; NULL before the first look */             \
    OBJECT(shim)                 /* gradckpt._shim: the rare paths, in Python */                      \
    OBJECT(selection)            /* gradckpt._selection: those of selective recompute */              \
    OBJECT(savers)               /* gradckpt._savers: those of compress_saved() */                     \
    OBJECT(buffers)              /* gradckpt.buffers: running statistics */

typedef struct {
#define OBJECT(field, module, attribute) PyObject *field;
    GCK_PY_OBJECTS(OBJECT)
#undef OBJECT
#define OBJECT(field) PyObject *field;
    GCK_PY_MADE(OBJECT)
#undef OBJECT
    struct {
#define NAME(name) PyObject *name;
        GCK_PY_NAMES(NAME)
#undef NAME
    } names;
    gck_rng rng;                   /* the CPU's generator                              */
    const gck_dl_exchange *dlpack; /* borrowed: static in torch                        */
    int has_accelerator;           /* this torch knows another device than the CPU    */
    int cuda_checked;              /* 1 after the driver was compared with the runtime */
} gck_py;

/* 0, or -1 with an exception.  Imports the rare paths, and with them torch. */
int gck_py_load(gck_py *py);
int gck_py_traverse(gck_py *py, visitproc visit, void *arg);
void gck_py_clear(gck_py *py);

/* Why a tensor is not encoded.  The texts are the keys of stats()["kept"]. */
#define GCK_REASONS(REASON)                                             \
    REASON(GCK_KEEP_LEAF, "leaf")                                       \
    REASON(GCK_KEEP_NO_GRAD, "does not require grad")                   \
    REASON(GCK_KEEP_DTYPE, "dtype the codec does not take")             \
    REASON(GCK_KEEP_FLOAT64, "float64, which no codec takes")           \
    REASON(GCK_KEEP_FIT, "values the codec cannot hold")                \
    REASON(GCK_KEEP_SMALL, "smaller than min_numel")                    \
    REASON(GCK_KEEP_EXACT, "backward needs it exactly")                 \
    REASON(GCK_KEEP_UNKNOWN, "not known which operator saves it")       \
    REASON(GCK_KEEP_SUBCLASS, "tensor subclass")                        \
    REASON(GCK_KEEP_LAYOUT, "not a plain strided tensor with data")     \
    REASON(GCK_KEEP_DEVICE, "device without kernels")                   \
    REASON(GCK_KEEP_DUAL, "carries a forward-mode tangent")             \
    REASON(GCK_KEEP_TRACING, "tracing, fake or functional mode active")
typedef enum {
    GCK_COMPRESS,
#define REASON(name, text) name,
    GCK_REASONS(REASON)
#undef REASON
    GCK_NREASONS
} gck_verdict;

extern const char *const gck_reason_text[GCK_NREASONS];

/* Tensor, Parameter or a subclass: 1; 0; or -1 with an exception. */
int gck_is_tensor(const gck_py *py, PyObject *x);

/* 1 when a mode is active under which tensors are not what they seem; 0; -1. */
int gck_tracing(const gck_py *py);

/* 1 inside a torch.func transform; 0; -1. */
int gck_functorch_active(const gck_py *py);

/* torch's objects for them: borrowed, lives for ever; new reference. */
PyObject *gck_dtype_object(const gck_py *py, gck_dtype dtype);
PyObject *gck_device_object(const gck_py *py, int device);

/* New reference: n integers as a tuple. */
PyObject *gck_sizes(int n, const int64_t *values);

/* New reference: uint8[nbytes], from torch's allocator. */
PyObject *gck_bytes_empty(const gck_py *py, int64_t nbytes, int device);

/* New reference: empty tensor; strides NULL means contiguous. */
PyObject *gck_empty(const gck_py *py, int ndim, const int64_t *sizes, const int64_t *strides, gck_dtype dtype, int device);

/* Encode or decode n tensors, whose owners the caller holds: the GIL is released for device work and for long host
 * work.  0, or -1 with an exception that names the codec; encode: 1 when the codec cannot hold these values. */
int gck_run_encode(gck_py *py, const gck_codec *codec, const gck_tensor *x, void *const *payloads, const gck_how *how,
                   int n);
int gck_run_decode(gck_py *py, const gck_codec *codec, const void *const *payloads, const gck_tensor *out, int n);

/* Make pack and unpack, bound to `self`, the saved-tensor hooks of this thread.  0 or -1. */
int gck_hooks_push(const gck_py *py, PyMethodDef *pack, PyMethodDef *unpack, PyObject *self);
/* Take the innermost ones off, also with an exception pending, which survives. */
void gck_hooks_pop(const gck_py *py);

/* What a call returned, taken over; NULL: it raised.  0, or -1 with the exception. */
int gck_done(PyObject *result);

/* The same as C truth: 1, 0, -1 with an exception. */
int gck_is_true(PyObject *value);

/* Result of a getter without arguments, likewise. */
int gck_ask(PyObject *getter);

/* An item, taken over, at the end of a list; NULL: making it raised.  0, or -1 with the exception. */
int gck_append(PyObject *list, PyObject *item);

/* New reference: what the method returns.  args: a tuple, taken over; NULL: making it raised, and nothing may be looked
 * up meanwhile. */
PyObject *gck_method(PyObject *of, const char *name, PyObject *args);

/* New reference: a list, taken over, as a tuple; NULL: making it raised. */
PyObject *gck_as_tuple(PyObject *list);

/* New reference: the objects as a tuple. */
PyObject *gck_tuple(PyObject *const *objects, Py_ssize_t n);

/* 1, 0, -1 with an exception other than AttributeError. */
int gck_has_attribute(PyObject *x, const char *name);

/* Attribute as C truth: 1, 0, -1 with an exception. */
int gck_attr_is_true(PyObject *x, PyObject *name);

#endif
