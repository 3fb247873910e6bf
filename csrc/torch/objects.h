/* objects.h: the Python objects of torch that C calls, each looked up once. */
#ifndef GRADCKPT_OBJECTS_H
#define GRADCKPT_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "torch/abi.h"
#include "torch/objects.h"
#include "torch/rng.h"

/* Python objects of torch that the hot paths call: looked up once, owned. */
#define GCK_PY_OBJECTS(OBJECT)                                                                     \
    OBJECT(Tensor, "torch", "Tensor")                                                              \
    OBJECT(Parameter, "torch.nn", "Parameter")                                                     \
    OBJECT(Module, "torch.nn", "Module")                                                           \
    OBJECT(Function, "torch.autograd", "Function")                                                 \
    OBJECT(backward, "torch.autograd", "backward")                                                 \
    OBJECT(cache_enabled, "torch", "is_autocast_cache_enabled")                                    \
    OBJECT(autocast_dtype, "torch", "get_autocast_dtype")                                          \
    OBJECT(autocast_enabled, "torch", "is_autocast_enabled")                                       \
    OBJECT(autocast_increment, "torch", "autocast_increment_nesting")                              \
    OBJECT(autocast_decrement, "torch", "autocast_decrement_nesting")                              \
    OBJECT(set_autocast_cache, "torch", "set_autocast_cache_enabled")                              \
    OBJECT(set_autocast_enabled, "torch", "set_autocast_enabled")                                  \
    OBJECT(set_autocast_dtype, "torch", "set_autocast_dtype")                                      \
    OBJECT(clear_autocast_cache, "torch", "clear_autocast_cache")                                  \
    OBJECT(empty, "torch", "empty")                                                                \
    OBJECT(empty_strided, "torch", "empty_strided")                                                \
    OBJECT(strided, "torch", "strided")                                                            \
    OBJECT(preserve_format, "torch", "preserve_format")                                            \
    OBJECT(scalar_tensor, "torch", "scalar_tensor")                                                \
    OBJECT(uint8, "torch", "uint8")                                                                \
    OBJECT(float32, "torch", "float32")                                                            \
    OBJECT(float16, "torch", "float16")                                                            \
    OBJECT(bfloat16, "torch", "bfloat16")                                                          \
    OBJECT(boolean, "torch", "bool")                                                               \
    OBJECT(device, "torch", "device")                                                              \
    OBJECT(size, "torch", "Size")                                                                  \
    OBJECT(checkpoint_module, "torch.utils", "checkpoint")                                         \
    OBJECT(is_compiling, "torch.compiler", "is_compiling")                                         \
    OBJECT(forward_ad, "torch.autograd", "forward_ad")                                             \
    OBJECT(CheckpointError, "torch.utils.checkpoint", "CheckpointError")                           \
    OBJECT(noop_context_fn, "torch.utils.checkpoint", "noop_context_fn")                           \
    OBJECT(new_lock, "_thread", "allocate_lock")                                                   \
    OBJECT(partial, "functools", "partial")                                                        \
    OBJECT(FunctionType, "types", "FunctionType")                                                  \
    OBJECT(MethodType, "types", "MethodType")                                                      \
    OBJECT(defaultdict, "collections", "defaultdict")                                              \
    OBJECT(count, "itertools", "count")                                                            \
    /* Private names of torch; torch_private.py says what each is, and what is lost without it: */ \
    OBJECT(is_checkpoint_valid, "gradckpt._engine.torch_private", "is_checkpoint_valid")           \
    OBJECT(push_hooks, "gradckpt._engine.torch_private", "push_hooks")                             \
    OBJECT(pop_hooks, "gradckpt._engine.torch_private", "pop_hooks")                               \
    OBJECT(top_hooks, "gradckpt._engine.torch_private", "top_hooks")                               \
    OBJECT(hooks_disabled, "gradckpt._engine.torch_private", "hooks_disabled")                     \
    OBJECT(next_node_number, "gradckpt._engine.torch_private", "next_node_number")                 \
    OBJECT(graph_task_id, "gradckpt._engine.torch_private", "graph_task_id")                       \
    OBJECT(running_node, "gradckpt._engine.torch_private", "running_node")                         \
    OBJECT(keeps_graph, "gradckpt._engine.torch_private", "keeps_graph")                           \
    OBJECT(graph_exec_group, "gradckpt._engine.torch_private", "graph_exec_group")                 \
    OBJECT(any_autocast, "gradckpt._engine.torch_private", "any_autocast")                         \
    OBJECT(accelerator_stream, "gradckpt._engine.torch_private", "accelerator_stream")             \
    OBJECT(autocast_types, "gradckpt._engine.torch_private", "autocast_types")                     \
    OBJECT(fx_tracing, "gradckpt._engine.torch_private", "fx_tracing")                             \
    OBJECT(set_fx_tracing, "gradckpt._engine.torch_private", "set_fx_tracing")                     \
    OBJECT(function_stack_len, "gradckpt._engine.torch_private", "function_stack_len")             \
    OBJECT(push_function_mode, "gradckpt._engine.torch_private", "push_function_mode")             \
    OBJECT(pop_function_mode, "gradckpt._engine.torch_private", "pop_function_mode")               \
    OBJECT(dispatch_stack_len, "gradckpt._engine.torch_private", "dispatch_stack_len")             \
    OBJECT(is_tracing_checkpoint, "gradckpt._engine.torch_private", "is_tracing_checkpoint")       \
    OBJECT(StopRecomputation, "gradckpt._engine.torch_private", "StopRecomputation")               \
    OBJECT(tree_flatten, "gradckpt._engine.torch_private", "tree_flatten")                         \
    OBJECT(tree_unflatten, "gradckpt._engine.torch_private", "tree_unflatten")                     \
    OBJECT(supported_nodes, "gradckpt._engine.torch_private", "supported_nodes")                   \
    OBJECT(set_included, "gradckpt._engine.torch_private", "set_included")                         \
    OBJECT(set_excluded, "gradckpt._engine.torch_private", "set_excluded")                         \
    OBJECT(is_included, "gradckpt._engine.torch_private", "is_included")                           \
    OBJECT(is_excluded, "gradckpt._engine.torch_private", "is_excluded")                           \
    OBJECT(FakeTensor, "gradckpt._engine.torch_private", "FakeTensor")                             \
    OBJECT(guards, "gradckpt._engine.torch_private", "guards")                                     \
    OBJECT(frame_callback, "gradckpt._engine.torch_private", "frame_callback")                     \
    OBJECT(set_frame_callback, "gradckpt._engine.torch_private", "set_frame_callback")             \
    OBJECT(ignored_ops, "gradckpt._engine.torch_private", "ignored_ops")                           \
    OBJECT(run_backward, "gradckpt._engine.torch_private", "run_backward")                         \
    OBJECT(queue_callback, "gradckpt._engine.torch_private", "queue_callback")                     \
    OBJECT(peek_functorch, "gradckpt._engine.torch_private", "peek_functorch")                     \
    /* Described there: */                                                                         \
    OBJECT(make_saved_tensor, "gradckpt._engine.torch_objects", "make_saved_tensor")               \
    OBJECT(as_non_leaf, "gradckpt._engine.torch_objects", "as_non_leaf")                           \
    OBJECT(error_node, "gradckpt._engine.torch_objects", "error_node")                             \
    OBJECT(saved_tensor_type, "gradckpt._engine.torch_private", "SavedTensor")                     \
    OBJECT(cpu_device, "gradckpt._engine.torch_objects", "cpu_device")                             \
    OBJECT(accelerator, "gradckpt._engine.torch_objects", "accelerator")                           \
    OBJECT(adopt_tensor, "gradckpt._engine.torch_objects", "adopt_tensor")                         \
    OBJECT(recompute_mark, "gradckpt._engine.torch_objects", "recompute_mark")                     \
    OBJECT(consumed_mark, "gradckpt._engine.torch_objects", "consumed_mark")                       \
    OBJECT(cast, "gradckpt._engine.torch_objects", "cast")                                         \
    OBJECT(draws, "gradckpt._engine.torch_objects", "draws")                                       \
    OBJECT(unseen_views, "gradckpt._engine.torch_objects", "unseen_views")                         \
    OBJECT(key, "gradckpt._engine.torch_objects", "key")                                           \
    OBJECT(key_inplace, "gradckpt._engine.torch_objects", "key_inplace")                           \
    OBJECT(key_python, "gradckpt._engine.torch_objects", "key_python")                             \
    OBJECT(key_snapshot, "gradckpt._engine.torch_objects", "key_snapshot")                         \
    OBJECT(node_classes, "gradckpt._engine.torch_objects", "node_classes")

/* Python functions that C calls: gradckpt/_engine/callbacks.py gives each to bind(). */
#define GCK_PY_CALLBACKS(CALLBACK)                                                                            \
    CALLBACK(are_alike) CALLBACK(are_members) CALLBACK(ask) CALLBACK(attention_again) CALLBACK(barred)        \
    CALLBACK(buffer_roots) CALLBACK(call_negated) CALLBACK(call_within) CALLBACK(candidate)                   \
    CALLBACK(capture) CALLBACK(check_aliases) CALLBACK(check_buffers) CALLBACK(check_leaves)                  \
    CALLBACK(check_reentrant) CALLBACK(container_state) CALLBACK(contexts) CALLBACK(copy_candidates)          \
    CALLBACK(debug_contexts) CALLBACK(decorate) CALLBACK(determinism_check) CALLBACK(device_context)          \
    CALLBACK(device_plan) CALLBACK(device_rng_capture) CALLBACK(device_rng_swap) CALLBACK(discrete_rules)     \
    CALLBACK(enter_buffers) CALLBACK(copy_original) CALLBACK(find_candidate) CALLBACK(finish_calls)               \
    CALLBACK(generator_of) CALLBACK(give_container_state) CALLBACK(has_buffer_rule) CALLBACK(is_dual)         \
    CALLBACK(may_change_places) CALLBACK(metadata) CALLBACK(mixing_of) CALLBACK(nodes_behind)                 \
    CALLBACK(note_create_graph) CALLBACK(note_keyword) CALLBACK(note_step) CALLBACK(original_of)              \
    CALLBACK(parse_plan) CALLBACK(payload_repr) CALLBACK(pinning_refused) CALLBACK(place_again)               \
    CALLBACK(place_of)                                                                                        \
    CALLBACK(plain_attributes) CALLBACK(policy_contexts) CALLBACK(raise_ambiguous)                            \
    CALLBACK(raise_fewer_saved) CALLBACK(raise_metadata) CALLBACK(raise_mixing) CALLBACK(raise_modified)      \
    CALLBACK(raise_more_saved) CALLBACK(raise_origins) CALLBACK(raise_overwritten) CALLBACK(raise_torchs)     \
    CALLBACK(recompute_within)                                                                                \
    CALLBACK(record_traced) CALLBACK(remat_enter) CALLBACK(remat_imported) CALLBACK(remat_leave)              \
    CALLBACK(remat_region) CALLBACK(rows_are_alike) CALLBACK(same_metadata) CALLBACK(saved_samples)           \
    CALLBACK(selective_key) CALLBACK(selective_mode) CALLBACK(selective_policy) CALLBACK(stays_on_device)     \
    CALLBACK(straight_through) CALLBACK(tensors_of) CALLBACK(through_modes) CALLBACK(together)                \
    CALLBACK(torchs_checkpoint) CALLBACK(traced_value) CALLBACK(tracing_mode_active) CALLBACK(warn_mixing)    \
    CALLBACK(warn_torchs) CALLBACK(warn_unnamed) CALLBACK(with_tensors) CALLBACK(without_modes)

/* Attribute and method names, interned. */
#define GCK_PY_NAMES(NAME)                                                                                           \
    NAME(shape) NAME(dtype) NAME(device) NAME(layout) NAME(requires_grad)                                            \
    NAME(is_leaf) NAME(is_cpu) NAME(is_neg) NAME(requires_grad_) NAME(detach) NAME(unpack) NAME(to)                  \
    NAME(_version) NAME(_op) NAME(_parameters) NAME(_modules) NAME(__self__) NAME(__module__) NAME(func) NAME(frame) \
    NAME(_backward_hooks) NAME(saved_tensors) NAME(save_for_backward) NAME(set_materialize_grads)                    \
    NAME(_current_level) NAME(_enable_checkpoint_early_stop) NAME(_checkpoint_debug_enabled)                         \
    NAME(grad_fn) NAME(next_functions) NAME(_sequence_nr) NAME(cpu) NAME(untyped_storage) NAME(data_ptr) NAME(_base) \
    NAME(nbytes) NAME(data) NAME(packed) NAME(_input_metadata) NAME(torch_remat) NAME(output_nr)                  \
    NAME(storage_offset) NAME(_saved_exponent) NAME(_raw_saved_output) NAME(tracing_context) NAME(__dict__)   \
    NAME(_raw_saved_tensors) NAME(_forward_cls)                                                               \
    NAME(get_state) NAME(set_state)                                                                           \
    NAME(__code__) NAME(torch) NAME(_initialized) NAME(default_generators) NAME(record_stream) NAME(raw)      \
    /* keywords of checkpoint(): */                                                                           \
    NAME(function) NAME(use_reentrant) NAME(preserve_rng_state) NAME(context_fn) NAME(determinism_check)      \
    NAME(debug) NAME(early_stop) NAME(respect_saved_tensors_hooks) NAME(compress) NAME(policy) NAME(offload)  \
    NAME(buffers)

typedef struct {
#define OBJECT(field, module, attribute) PyObject *field;
    GCK_PY_OBJECTS(OBJECT)
#undef OBJECT
    PyObject *ignored;              /* ignored_ops as a tuple; NULL before the first look */
    struct {
#define CALLBACK(name) PyObject *name;
        GCK_PY_CALLBACKS(CALLBACK)
#undef CALLBACK
    } call;
    struct {
#define NAME(name) PyObject *name;
        GCK_PY_NAMES(NAME)
#undef NAME
    } names;
    gck_rng rng;                    /* the CPU's generator                              */
    const gck_dl_exchange *dlpack;  /* borrowed: static in torch                        */
    int adopt_copies;               /* adopt_tensor leaves the handle to us             */
    unsigned checked;               /* bit k: the codecs can run on devices of kind k    */
} gck_py;

/* 0, or -1 with an exception.  Imports torch. */
int gck_py_load(gck_py *py);
/* Bind the callbacks from a dict by name.  0, or -1 with a KeyError for a missing one. */
int gck_py_bind(gck_py *py, PyObject *table);
int gck_py_traverse(gck_py *py, visitproc visit, void *arg);
void gck_py_clear(gck_py *py);

/* Raise torch's own error of a kind, see gradckpt/_engine/torch_errors.py.  -1. */
int gck_raise_torchs(const gck_py *py, const char *kind);

/* ---- autograd's nodes ---- */

/* The sequence number of a node; INT64_MAX for nodes without one; -1 with an exception.  Numbers
 * grow within a thread. */
int64_t gck_node_number(const gck_py *py, PyObject *node);

/* The number of the node that this thread made last, -1 with an exception. */
int64_t gck_last_node_number(const gck_py *py);

#endif
