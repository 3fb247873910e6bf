"""Every private name of torch that gradckpt uses, and what is lost without it.

torch may rename any of them. A missing name turns off what needs it, never the import. An
equivalent takes its place where one exists, else a :class:`Missing`, which raises when it is used.
Names of Dynamo are looked up once something imports it (:func:`load_dynamo`). ``python -m
gradckpt`` lists the missing names.
"""

from __future__ import annotations

import collections
import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

#: Name -> what is lost without it: for all names, and for those that this torch does not have.
NAMES: dict[str, str] = {}
MISSING: dict[str, str] = {}

#: What is lost where nothing works without the name.
EVERYTHING = "checkpoint()"
ERRORS = "torch's own texts of errors, in place of ours"


class Missing:
    """Stand for a name that this torch does not have."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"gradckpt: torch {torch.__version__} has no {self._path}, which {NAMES.get(self._path, ERRORS)} needs; "
            "install a torch that gradckpt was tested with"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self()


def _look_up(path: str) -> Any:
    parts = path.split(".")
    value: Any = torch
    for i, name in enumerate(parts[1:], start=2):
        if not hasattr(value, name):
            importlib.import_module(".".join(parts[:i]))
        value = getattr(value, name)
    return value


_REFUSE = object()


def _find(path: str, lost: str, instead: Any = _REFUSE) -> Any:
    NAMES[path] = lost
    try:
        return _look_up(path)
    except (ImportError, AttributeError):
        MISSING[path] = lost
        return Missing(path) if instead is _REFUSE else instead


def _find_later(path: str, lost: str) -> Callable[[], Any]:
    """Return a function that looks the name up at its first call, for modules that are not imported
    yet.
    """
    NAMES[path] = lost
    return functools.cache(functools.partial(_find, path, lost))


def _find_mode(path: str, lost: str) -> Any:
    """Return a class to inherit from.

    A missing one is replaced by a class that raises when it is made.
    """
    refusal = Missing(path)
    replacement = type(path.rpartition(".")[2], (object,), {"__init__": lambda self, *args, **kwargs: refusal()})
    return _find(path, lost, replacement)


# ---- autograd ----

push_hooks = _find("torch._C._autograd._push_saved_tensors_default_hooks", EVERYTHING)
pop_hooks = _find("torch._C._autograd._pop_saved_tensors_default_hooks", EVERYTHING)
top_hooks = _find("torch._C._autograd._top_saved_tensors_default_hooks", EVERYTHING)
hooks_disabled = _find(
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", "disabled saved-tensor hooks", lambda: None
)
graph_task_id = _find("torch._C._current_graph_task_id", EVERYTHING)
graph_exec_group = _find("torch._C._get_graph_exec_group", "GraphExecGroup", lambda: None)
next_node_number = _find("torch._C._autograd._get_sequence_nr", "compress_saved()")
running_node = _find(
    "torch._C._current_autograd_node", "refusing an operator that nothing follows in compress_saved()", lambda: None
)
keeps_graph = _find("torch._C._autograd._get_current_graph_task_keep_graph", "a region that is one node")
is_checkpoint_valid = _find("torch.autograd._is_checkpoint_valid", "use_reentrant=True")
set_versions = _find("torch._C._autograd._unsafe_set_version_counter", "autograd's text for an input that was changed")
make_saved_tensor = _find("torch._C._autograd._make_saved_tensor", "direct calls of the hooks around a region", None)
#: Its attribute ``data`` tells what a node saved without unpacking it.
SavedTensor = _find("torch._C._autograd.SavedTensor", "reading what a node saved without unpacking it", None)
engine = _find("torch.autograd.Variable._execution_engine", "a region that is one node", None)
run_backward = engine.run_backward if engine is not None else Missing("torch.autograd.Variable._execution_engine")
queue_callback = engine.queue_callback if engine is not None else run_backward
peek_functorch = _find(
    "torch._C._functorch.peek_interpreter_stack", "noticing that torch.func transforms run", lambda: None
)


def _together(first: Any, *paths: str) -> Any:
    """Return the first of several names that need each other.

    It is missing if any of them is: what begins must be able to end.
    """
    missing = [path for path in paths if path in MISSING]
    return Missing(missing[0]) if missing else first


node_types = _find("torch._C._functions", "compress=", None)
DelayedError = _together(_find("torch._C._functions.DelayedError", "compress="), "torch._C._functions")
push_hooks = _together(
    push_hooks,
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._top_saved_tensors_default_hooks",
)

module_call = _find("torch.nn.Module._call_impl", "the names of modules in residuals()", None)

# ---- tensors that C made ----

adopt_tensor = _find(
    "torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr", "making small CPU tensors without torch.empty", None
)
handle_of = _find(
    "torch._C._aoti.unsafe_alloc_void_ptr_from_tensor", "making small CPU tensors without torch.empty", None
)

# ---- the profiler ----

record_function = _find("torch._C._profiler._RecordFunctionFast", "track_memory()")
profiler_active = _find("torch.autograd._profiler_enabled", "track_memory()")
_find("torch.autograd.profiler._is_profiler_enabled", "noticing a profiler that is about to begin", False)


def profiler_entered() -> bool:
    """Return whether a torch profiler was entered, also one that waits for its schedule."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", False) or profiler_active())


# ---- modes, keys ----

TorchDispatchMode = _find("torch.utils._python_dispatch.TorchDispatchMode", "a dispatch mode inside a region", object)
dispatch_stack_len = _find("torch._C._len_torch_dispatch_stack", EVERYTHING)
push_dispatch_mode = _find("torch._C._push_on_torch_dispatch_stack", "a dispatch mode inside a region")
pop_dispatch_mode = _find("torch._C._pop_torch_dispatch_stack", "a dispatch mode inside a region")
push_dispatch_mode = _together(push_dispatch_mode, "torch._C._pop_torch_dispatch_stack")
dispatch_modes = _find(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "a dispatch mode inside a region"
)
without_modes = _find("torch.utils._python_dispatch._disable_current_modes", "a dispatch mode around a region")
get_dispatch_mode = _find("torch._C._get_dispatch_mode", "a dispatch mode around a region")
mode_keys = _find("torch._C._TorchDispatchModeKey", "a dispatch mode around a region")


def _no_function_modes() -> int:
    """Return 0.

    The modes that count are those of ``torch.device``, which the default device shows.
    """
    if torch.get_default_device().type != "cpu":
        Missing("torch._C._len_torch_function_stack")()
    return 0


function_stack_len = _find("torch._C._len_torch_function_stack", "torch.device as a context", _no_function_modes)
push_function_mode = _find("torch._C._push_on_torch_function_stack", "torch.device as a context")
pop_function_mode = _find("torch._C._pop_torch_function_stack", "torch.device as a context")
pop_function_mode = _together(pop_function_mode, "torch._C._push_on_torch_function_stack")
function_modes = _find("torch.overrides._get_current_function_mode_stack", "torch.device as a context")
device_context = _find_later("torch.utils._device.DeviceContext", "torch.device as a context")
#: The module whose CURRENT_DEVICE is set.
device_module = _find_later("torch.utils._device", "torch.device as a context")
without_function_modes = _find("torch._C.DisableTorchFunction", "a function mode around a region")

key_of = _find("torch._C._dispatch_key_parse", "policies and the replay of discrete operators")
set_included = _find(
    "torch._C._dispatch_tls_set_dispatch_key_included", "policies and the replay of discrete operators"
)
set_excluded = _find(
    "torch._C._dispatch_tls_set_dispatch_key_excluded", "policies and the replay of discrete operators"
)
is_included = _find("torch._C._dispatch_tls_is_dispatch_key_included", "policies and the replay of discrete operators")
is_excluded = _find("torch._C._dispatch_tls_is_dispatch_key_excluded", "policies and the replay of discrete operators")
is_excluded = _together(is_excluded, "torch._C._dispatch_key_parse")
#: Without these nothing is caught on the key.
has_kernel = _find("torch._C._dispatch_has_kernel", "catching operators without a dispatch mode", lambda name: True)
all_op_names = _find("torch._C._dispatch_get_all_op_names", "kept outputs that torch writes into", list)
has_kernel_for_key = _find(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "catching operators without a dispatch mode",
    lambda name, key: True,
)
has_fallback = _find(
    "torch._C._dispatch_has_backend_fallback", "catching operators without a dispatch mode", lambda key: False
)
select_conv_backend = _find("torch._C._select_conv_backend", "the CPU's convolutions in plan()", lambda *how: "unknown")
storage_uses = _find("torch._C._storage_Use_Count", "sums of gradients in place in plan()", lambda storage: 3)
DispatchKey = _find(
    "torch._C.DispatchKey", "forward-mode differentiation, higher-order operators in policies and plan()"
)
BelowInplace = _find("torch._C._AutoDispatchBelowADInplaceOrView", "torch.ops.gradckpt inside autograd")
after_inplace = _find("torch._C._after_ADInplaceOrView_keyset", "torch.ops.gradckpt inside autograd")

any_autocast = _find("torch._C._is_any_autocast_enabled", "the quick look for autocast", lambda: True)
accelerator_stream = _find(
    "torch._C._accelerator_getStream",
    "memory that several streams use",
    lambda index: torch.accelerator.current_stream(index),
)
autocast_types = _find("torch._C._autocast_supported_devices", "autocast", lambda: ["cpu", "cuda"])

#: torch since 2.15 keeps per thread whether torch.fx traces; its recompute sets the forward's.
fx_tracing = getattr(torch.fx._symbolic_trace, "_get_is_fx_tracing", None)
set_fx_tracing = getattr(torch.fx._symbolic_trace, "_set_is_fx_tracing", None)

# ---- torch.utils.checkpoint ----

StopRecomputation = _find(
    "torch.utils.checkpoint._StopRecomputationError",
    "torch's class for the exception that ends a recompute",
    type("StopRecomputation", (Exception,), {}),
)
ignored_ops = _find(
    "torch.utils.checkpoint.SAC_IGNORED_OPS",
    "torch's list of operators that no policy is asked about",
    {torch.ops.aten.detach.default, torch.ops.prim.device.default},
)
CachingMode = _find_mode("torch.utils.checkpoint._CachingTorchDispatchMode", "a policy that is a function")
CachedMode = _find_mode("torch.utils.checkpoint._CachedTorchDispatchMode", "a policy that is a function")
storage_key = _find(
    "torch.utils.checkpoint._sac_storage_key", "subgraphs in keys of higher-order operators", lambda func, _: func
)
#: Torch before 2.13 traces with another kind of storage than ours.
consumed = _find("torch.utils.checkpoint._CONSUMED", "tracing with gradckpt's own contexts", None)
#: torch before 2.12 asks a policy before the operator runs.
asks_policies_after = (
    "op_output" in inspect.signature(torch.utils.checkpoint.SelectiveCheckpointContext.__init__).parameters
)
_is_compiling = _find(
    "torch.utils.checkpoint._is_compiling",
    "noticing make_fx around a region",
    lambda *_: torch.compiler.is_compiling(),
)


def is_tracing_checkpoint() -> bool:
    """Return whether torch's selective contexts record a graph; it reads none of its arguments."""
    return bool(_is_compiling(None, None, None))


_registry = types.SimpleNamespace(_data={})
if hasattr(torch.utils.checkpoint, "_is_cacheable_effect"):  # torch keeps what such operators return: 2.15
    _registry = _find("torch._library.simple_registry.singleton", "keeping operators with an effect", _registry)


def operator_effects() -> list[Any]:
    """Return the effects of all operators, None for most, where torch minds effects."""
    return [entry.effect._effect for entry in _registry._data.values()]  # without a call for each


def names_with_effect() -> list[str]:
    return [name for name in _registry._data if has_effect(name)]


def has_effect(name: str) -> bool:
    return name in _registry._data and _registry._data[name].effect.effect is not None


CheckpointFrame = _find("torch.utils.checkpoint._CheckpointFrame", ERRORS)
CheckpointHolder = _find("torch.utils.checkpoint._Holder", ERRORS)
CheckpointHandle = _find("torch.utils.checkpoint._Handle", ERRORS)
CheckpointHook = _find("torch.utils.checkpoint._checkpoint_hook", ERRORS)
RecomputeHook = _find("torch.utils.checkpoint._recomputation_hook", ERRORS)
internal_assert = _find("torch.utils.checkpoint._internal_assert", ERRORS)
VersionWrapper = _find("torch.utils.checkpoint._VersionWrapper", ERRORS)


def is_of_checkpoint(function: Any) -> bool:
    """Return whether it is a function of torch.utils.checkpoint, not another in its place."""
    function = inspect.unwrap(function)
    return getattr(function, "__globals__", None) is vars(torch.utils.checkpoint) and not function.__closure__


def copied(function: types.FunctionType, **globals_: Any) -> types.FunctionType:
    """Return a copy that keeps its body when the function gets another, with other global names."""
    where = {**function.__globals__, **globals_} if globals_ else function.__globals__
    copy = types.FunctionType(function.__code__, where, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    return copy


def _copy_of(name: str, **globals_: Any) -> Any:
    function = inspect.unwrap(getattr(torch.utils.checkpoint, name))
    return copied(function, **globals_) if is_of_checkpoint(function) else Missing(f"torch.utils.checkpoint.{name}")


#: What the function that torch's decorator makes calls, since 2.14; None before.
INNER = "_checkpoint_impl" if hasattr(torch.utils.checkpoint, "_checkpoint_impl") else None
_inner = {} if INNER is None else {INNER: _copy_of(INNER)}
torchs_checkpoint = _copy_of("checkpoint", **_inner)
torchs_sequential = _copy_of("checkpoint_sequential")
#: Both as they were imported: what Dynamo knows, and what a script may have replaced by ours since.
imported_checkpoint: Any = torch.utils.checkpoint.checkpoint
imported_contexts: Any = torch.utils.checkpoint.create_selective_checkpoint_contexts
#: Whether torch's selective contexts can show saved-tensor hooks what they keep: 2.14.
hooks_see_kept = "respect_saved_tensors_hooks" in (getattr(torchs_checkpoint, "__kwdefaults__", None) or ())


def generator_with(**globals_: Any) -> Callable[..., Any]:
    """Return what torch's checkpoint is inside, ``f(function)``, with other global names."""
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(torch.utils.checkpoint, f"{name}_impl"):
        whole = _copy_of(f"{name}_impl", **globals_)
        return lambda function: whole(function, (), {})
    return _copy_of(name, **globals_)  # type: ignore[no-any-return]


infer_device_type = _find("torch.utils.checkpoint._infer_device_type", "torch's warning for several device types")
debug_context = _find("torch.utils.checkpoint._get_debug_context_and_cb", "debug=True")
determinism_checks = _find(
    "torch.utils.checkpoint._allowed_determinism_checks_to_fns", "determinism checks of your own", {}
)

# ---- the rest ----

_CONTAINERS: dict[type, Any] = dict.fromkeys((tuple, list, dict, collections.OrderedDict, collections.defaultdict))
tree_flatten = _find("torch.utils._pytree.tree_flatten", "tensors in containers")
tree_unflatten = _find("torch.utils._pytree.tree_unflatten", "tensors in containers")
tree_leaves = _find("torch.utils._pytree.tree_leaves", "tensors in containers", lambda tree: tree_flatten(tree)[0])
tree_map = _find("torch.utils._pytree.tree_map", "torch.compile")
tree_map_only = _find("torch.utils._pytree.tree_map_only", "negated views inside a region with a policy")
supported_nodes = _find("torch.utils._pytree.SUPPORTED_NODES", "tensors in containers of your own", _CONTAINERS)
HigherOrderOperator = _find("torch._ops.HigherOrderOperator", "higher order operators in policies", type(None))
#: The keys that new ones ignore, and those there are, by name.
higher_order_fallthrough = _find(
    "torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS", "higher order operators in regions", []
)
higher_order_operators: dict[str, Any] = _find("torch._ops._higher_order_ops", "higher order operators in regions", {})
flex_attention = _find("torch.ops.higher_order.flex_attention", "flex_attention in save_attention", None)
if "torch._ops.HigherOrderOperator" in MISSING:  # policies then know none
    flex_attention = None
StorageWeakRef = _find(
    "torch.multiprocessing.reductions.StorageWeakRef", "name(), torch.compile and regions of torch_remat"
)
NormBase = _find(
    "torch.nn.modules.batchnorm._NormBase",
    "running statistics of norms that are not derived from torch's public ones",
    (*(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
     *(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)),
)  # fmt: skip
FakeTensor = _find(
    "torch._subclasses.fake_tensor.FakeTensor", "fake tensors without a mode", type("FakeTensor", (), {})
)
default_store = _find("torch.distributed.distributed_c10d._get_default_store", "the check that ranks compress alike")
StorageBase = _find("torch._C.StorageBase", "plan()")
#: Simulated collectives, the state that ``fully_shard`` keeps for a module, and what FSDP1 does
#: before its first step.
FakeWork = _find("torch._C._distributed_c10d.FakeWork", "budgets of sharded models")
boxed_work = _find("torch._C._distributed_c10d.Work.boxed", "budgets of sharded models")
fsdp2_state = _find_later(
    "torch.distributed.fsdp._fully_shard._fsdp_state._get_module_fsdp_state", "budgets of sharded models"
)
fsdp1_lazy_init = _find_later("torch.distributed.fsdp._runtime_utils._lazy_init", "budgets of sharded models")
guards = _find(
    "torch._guards._TLS", "noticing AOTAutograd around a region", types.SimpleNamespace(tracing_context=None)
)


def tracing_context() -> Any:
    """Return what identifies the graph that is traced or compiled in this thread, or None."""
    return getattr(guards, "tracing_context", None)


frame_callback = _find(
    "torch._C._dynamo.eval_frame.get_eval_frame_callback", "keeping Dynamo out of a recompute", lambda: None
)
set_frame_callback = _find("torch._C._dynamo.eval_frame.set_eval_frame", "keeping Dynamo out of a recompute")

# ---- Dynamo, looked up when it is there ----

#: Attributes by the names of :func:`load_dynamo`.
dynamo = types.SimpleNamespace()

DYNAMO = {
    "graph_break": "torch._dynamo.graph_break",
    "guard_scalar": "torch.fx.experimental.symbolic_shapes.guard_scalar",
    "guard_or_true": "torch.fx.experimental.symbolic_shapes.guard_or_true",
    "statically_known_true": "torch.fx.experimental.symbolic_shapes.statically_known_true",
    "get_proxy_mode": "torch.fx.experimental.proxy_tensor.get_proxy_mode",
    "get_proxy_slot": "torch.fx.experimental.proxy_tensor.get_proxy_slot",
    "FunctionalTensor": "torch._subclasses.functional_tensor.FunctionalTensor",
    "from_functional_tensor": "torch._from_functional_tensor",
    "InstructionTranslator": "torch._dynamo.symbolic_convert.InstructionTranslator",
    "skip_code": "torch._dynamo.eval_frame.skip_code",
    "UserError": "torch._dynamo.exc.UserError",
    "UserErrorType": "torch._dynamo.exc.UserErrorType",
    "GuardBuilder": "torch._dynamo.guards.GuardBuilder",
    "install_guard": "torch._dynamo.guards.install_guard",
    "AttrSource": "torch._dynamo.source.AttrSource",
    "counters": "torch._dynamo.utils.counters",
    "PolyfilledFunctionVariable": "torch._dynamo.variables.PolyfilledFunctionVariable",
}


def load_dynamo() -> list[str]:
    """Look up the names of Dynamo. Return the missing ones: without them regions run uncompiled."""
    for name, path in DYNAMO.items():
        setattr(dynamo, name, _find(path, "torch.compile"))
    return [path for path in DYNAMO.values() if path in MISSING]


@functools.cache
def load_cut() -> Any:
    """Look up the function that tells hooks at which node AOTAutograd cuts; None without it."""
    return _find(
        "torch._functorch._aot_autograd.graph_compile._get_saved_tensor_hook_context",
        "compressed tensors in compiled code",
        None,
    )


@functools.cache
def load_joint_passes() -> tuple[Any, Any, Any] | None:
    """Look up where passes over joint graphs are set, AOTAutograd's and Inductor's, and the class
    of the latter; None if one is missing.
    """
    lost = "exact outputs of compiled regions"
    names = [_find(f"torch._functorch.config{attribute}", lost) for attribute in ("", ".joint_custom_pass")] + [
        _find(f"torch._inductor.{name}", lost)
        for name in ("config", "config.joint_custom_pre_pass", "config.joint_custom_post_pass")
    ]
    graph_pass = _find("torch._inductor.custom_graph_pass.CustomGraphPass", lost)
    return None if any(isinstance(name, Missing) for name in (*names, graph_pass)) else (names[0], names[2], graph_pass)
