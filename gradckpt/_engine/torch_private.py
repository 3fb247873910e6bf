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
from typing import TYPE_CHECKING, Any

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


# ---- the table ----

MODES, FUNCTION_MODES = "a dispatch mode inside a region", "torch.device as a context"
KEYS, CATCHING = "policies and the replay of discrete operators", "catching operators without a dispatch mode"
CONTAINERS, HIGHER_ORDER = "tensors in containers", "higher order operators in regions"
SHARDED = "budgets of sharded models"

#: What is lost: the names here, and where torch has them.
TABLE: dict[str, dict[str, str]] = {
    EVERYTHING: {
        "push_hooks": "torch._C._autograd._push_saved_tensors_default_hooks",
        "pop_hooks": "torch._C._autograd._pop_saved_tensors_default_hooks",
        "top_hooks": "torch._C._autograd._top_saved_tensors_default_hooks",
        "graph_task_id": "torch._C._current_graph_task_id",
        "dispatch_stack_len": "torch._C._len_torch_dispatch_stack",
    },
    "disabled saved-tensor hooks": {
        "hooks_disabled": "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message"
    },
    "GraphExecGroup": {"graph_exec_group": "torch._C._get_graph_exec_group"},
    "compress_saved()": {"next_node_number": "torch._C._autograd._get_sequence_nr"},
    "refusing an operator that nothing follows in compress_saved()": {
        "running_node": "torch._C._current_autograd_node"
    },
    "a region that is one node": {
        "keeps_graph": "torch._C._autograd._get_current_graph_task_keep_graph",
        "engine": "torch.autograd.Variable._execution_engine",
    },
    "use_reentrant=True": {"is_checkpoint_valid": "torch.autograd._is_checkpoint_valid"},
    "autograd's text for an input that was changed": {"set_versions": "torch._C._autograd._unsafe_set_version_counter"},
    "direct calls of the hooks around a region": {"make_saved_tensor": "torch._C._autograd._make_saved_tensor"},
    # its attribute ``data`` tells what a node saved
    "reading what a node saved without unpacking it": {"SavedTensor": "torch._C._autograd.SavedTensor"},
    "noticing that torch.func transforms run": {"peek_functorch": "torch._C._functorch.peek_interpreter_stack"},
    "compress=": {"node_types": "torch._C._functions", "DelayedError": "torch._C._functions.DelayedError"},
    "the names of modules in residuals()": {"module_call": "torch.nn.Module._call_impl"},
    "making small CPU tensors without torch.empty": {
        "adopt_tensor": "torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr",
        "handle_of": "torch._C._aoti.unsafe_alloc_void_ptr_from_tensor",
    },
    "track_memory()": {
        "record_function": "torch._C._profiler._RecordFunctionFast",
        "profiler_active": "torch.autograd._profiler_enabled",
    },
    MODES: {
        "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
        "push_dispatch_mode": "torch._C._push_on_torch_dispatch_stack",
        "pop_dispatch_mode": "torch._C._pop_torch_dispatch_stack",
        "dispatch_modes": "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    },
    "a dispatch mode around a region": {
        "without_modes": "torch.utils._python_dispatch._disable_current_modes",
        "get_dispatch_mode": "torch._C._get_dispatch_mode",
        "mode_keys": "torch._C._TorchDispatchModeKey",
    },
    FUNCTION_MODES: {
        "function_stack_len": "torch._C._len_torch_function_stack",
        "push_function_mode": "torch._C._push_on_torch_function_stack",
        "pop_function_mode": "torch._C._pop_torch_function_stack",
        "function_modes": "torch.overrides._get_current_function_mode_stack",
    },
    "a function mode around a region": {"without_function_modes": "torch._C.DisableTorchFunction"},
    KEYS: {
        "key_of": "torch._C._dispatch_key_parse",
        "set_included": "torch._C._dispatch_tls_set_dispatch_key_included",
        "set_excluded": "torch._C._dispatch_tls_set_dispatch_key_excluded",
        "is_included": "torch._C._dispatch_tls_is_dispatch_key_included",
        "is_excluded": "torch._C._dispatch_tls_is_dispatch_key_excluded",
    },
    CATCHING: {
        "has_kernel": "torch._C._dispatch_has_kernel",
        "has_kernel_for_key": "torch._C._dispatch_has_kernel_for_dispatch_key",
        "has_fallback": "torch._C._dispatch_has_backend_fallback",
    },
    "kept outputs that torch writes into": {"all_op_names": "torch._C._dispatch_get_all_op_names"},
    "the CPU's convolutions in plan()": {"select_conv_backend": "torch._C._select_conv_backend"},
    "sums of gradients in place in plan()": {"storage_uses": "torch._C._storage_Use_Count"},
    "forward-mode differentiation, higher-order operators in policies and plan()": {
        "DispatchKey": "torch._C.DispatchKey"
    },
    "torch.ops.gradckpt inside autograd": {
        "BelowInplace": "torch._C._AutoDispatchBelowADInplaceOrView",
        "after_inplace": "torch._C._after_ADInplaceOrView_keyset",
    },
    "the quick look for autocast": {"any_autocast": "torch._C._is_any_autocast_enabled"},
    "memory that several streams use": {"accelerator_stream": "torch._C._accelerator_getStream"},
    "autocast": {"autocast_types": "torch._C._autocast_supported_devices"},
    "torch's class for the exception that ends a recompute": {
        "StopRecomputation": "torch.utils.checkpoint._StopRecomputationError"
    },
    "torch's list of operators that no policy is asked about": {
        "ignored_ops": "torch.utils.checkpoint.SAC_IGNORED_OPS"
    },
    "a policy that is a function": {
        "CachingMode": "torch.utils.checkpoint._CachingTorchDispatchMode",
        "CachedMode": "torch.utils.checkpoint._CachedTorchDispatchMode",
    },
    "subgraphs in keys of higher-order operators": {"storage_key": "torch.utils.checkpoint._sac_storage_key"},
    # torch before 2.13 traces with another kind of storage than ours
    "tracing with gradckpt's own contexts": {"consumed": "torch.utils.checkpoint._CONSUMED"},
    "noticing make_fx around a region": {"_is_compiling": "torch.utils.checkpoint._is_compiling"},
    ERRORS: {
        "CheckpointFrame": "torch.utils.checkpoint._CheckpointFrame",
        "CheckpointHolder": "torch.utils.checkpoint._Holder",
        "CheckpointHandle": "torch.utils.checkpoint._Handle",
        "CheckpointHook": "torch.utils.checkpoint._checkpoint_hook",
        "RecomputeHook": "torch.utils.checkpoint._recomputation_hook",
        "internal_assert": "torch.utils.checkpoint._internal_assert",
        "VersionWrapper": "torch.utils.checkpoint._VersionWrapper",
    },
    "torch's warning for several device types": {"infer_device_type": "torch.utils.checkpoint._infer_device_type"},
    "debug=True": {"debug_context": "torch.utils.checkpoint._get_debug_context_and_cb"},
    "determinism checks of your own": {
        "determinism_checks": "torch.utils.checkpoint._allowed_determinism_checks_to_fns"
    },
    CONTAINERS: {
        "tree_flatten": "torch.utils._pytree.tree_flatten",
        "tree_unflatten": "torch.utils._pytree.tree_unflatten",
        "tree_leaves": "torch.utils._pytree.tree_leaves",
    },
    "torch.compile": {"tree_map": "torch.utils._pytree.tree_map"},
    "negated views inside a region with a policy": {"tree_map_only": "torch.utils._pytree.tree_map_only"},
    "tensors in containers of your own": {"supported_nodes": "torch.utils._pytree.SUPPORTED_NODES"},
    "higher order operators in policies": {"HigherOrderOperator": "torch._ops.HigherOrderOperator"},
    HIGHER_ORDER: {
        # the keys that new ones ignore, and those there are, by name
        "higher_order_fallthrough": "torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS",
        "higher_order_operators": "torch._ops._higher_order_ops",
    },
    "flex_attention in save_attention": {"flex_attention": "torch.ops.higher_order.flex_attention"},
    "name(), torch.compile and regions of torch_remat": {
        "StorageWeakRef": "torch.multiprocessing.reductions.StorageWeakRef"
    },
    "running statistics of norms that are not derived from torch's public ones": {
        "NormBase": "torch.nn.modules.batchnorm._NormBase"
    },
    "fake tensors without a mode": {"FakeTensor": "torch._subclasses.fake_tensor.FakeTensor"},
    "the check that ranks compress alike": {"default_store": "torch.distributed.distributed_c10d._get_default_store"},
    "plan()": {"StorageBase": "torch._C.StorageBase"},
    SHARDED: {  # simulated collectives
        "FakeWork": "torch._C._distributed_c10d.FakeWork",
        "boxed_work": "torch._C._distributed_c10d.Work.boxed",
    },
    "noticing AOTAutograd around a region": {"guards": "torch._guards._TLS"},
    "keeping Dynamo out of a recompute": {
        "frame_callback": "torch._C._dynamo.eval_frame.get_eval_frame_callback",
        "set_frame_callback": "torch._C._dynamo.eval_frame.set_eval_frame",
    },
}


def _no_function_modes() -> int:
    """Return 0.

    The modes that count are those of ``torch.device``, which the default device shows.
    """
    if torch.get_default_device().type != "cpu":
        Missing("torch._C._len_torch_function_stack")()
    return 0


def _refusing(path: str) -> type:
    """Return a class to inherit from that raises when it is made."""
    refuses = dict.fromkeys(("__init__", "__enter__", "__exit__"), lambda self, *args, **kwargs: Missing(path)())
    return type(path.rpartition(".")[2], (), refuses)


#: What takes the place of a missing name; without an equivalent, a :class:`Missing` does.
INSTEAD: dict[str, Any] = {
    **dict.fromkeys(("hooks_disabled", "graph_exec_group", "running_node", "peek_functorch"), lambda: None),
    **dict.fromkeys(("make_saved_tensor", "SavedTensor", "engine", "node_types", "module_call", "adopt_tensor")),
    **dict.fromkeys(("handle_of", "consumed", "flex_attention")),
    "frame_callback": lambda: None,
    "TorchDispatchMode": object,
    "function_stack_len": _no_function_modes,
    "has_kernel": lambda name: True,
    "has_kernel_for_key": lambda name, key: True,
    "has_fallback": lambda key: False,
    "all_op_names": list,
    "select_conv_backend": lambda *how: "unknown",
    "storage_uses": lambda storage: 3,
    "any_autocast": lambda: True,
    "accelerator_stream": lambda index: torch.accelerator.current_stream(index),
    "autocast_types": lambda: ["cpu", "cuda"],
    "StopRecomputation": type("StopRecomputation", (Exception,), {}),
    "ignored_ops": {torch.ops.aten.detach.default, torch.ops.prim.device.default},
    "CachingMode": _refusing("torch.utils.checkpoint._CachingTorchDispatchMode"),
    "CachedMode": _refusing("torch.utils.checkpoint._CachedTorchDispatchMode"),
    "storage_key": lambda func, _: func,
    "_is_compiling": lambda *_: torch.compiler.is_compiling(),
    "determinism_checks": {},
    "tree_leaves": lambda tree: _found["tree_flatten"](tree)[0],
    "supported_nodes": dict.fromkeys((tuple, list, dict, collections.OrderedDict, collections.defaultdict)),
    "HigherOrderOperator": type(None),
    "higher_order_fallthrough": [],
    "higher_order_operators": {},
    "NormBase": (
        *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
        *(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d),
    ),
    "FakeTensor": type("FakeTensor", (), {}),
    "guards": types.SimpleNamespace(tracing_context=None),
}

#: What begins must be able to end: names that are missing where another one is.
TOGETHER = {
    "push_hooks": ("pop_hooks", "top_hooks"),
    "DelayedError": ("node_types",),
    "push_dispatch_mode": ("pop_dispatch_mode",),
    "pop_function_mode": ("push_function_mode",),
    "is_excluded": ("key_of",),
}

_found: dict[str, Any] = {
    name: _find(path, lost, INSTEAD.get(name, _REFUSE)) for lost, paths in TABLE.items() for name, path in paths.items()
}
_paths = {name: path for paths in TABLE.values() for name, path in paths.items()}
for _name, _others in TOGETHER.items():
    _lacking = [_paths[_other] for _other in _others if _paths[_other] in MISSING]
    _found[_name] = Missing(_lacking[0]) if _lacking else _found[_name]
if _paths["HigherOrderOperator"] in MISSING:  # policies then know none
    _found["flex_attention"] = None
globals().update(_found)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return what has a name of the table."""


# ---- what is made of them ----

_engine = _found["engine"]
run_backward = _engine.run_backward if _engine is not None else Missing(_paths["engine"])
queue_callback = _engine.queue_callback if _engine is not None else run_backward
device_context = _find_later("torch.utils._device.DeviceContext", FUNCTION_MODES)
#: The module whose CURRENT_DEVICE is set.
device_module = _find_later("torch.utils._device", FUNCTION_MODES)
#: The state that ``fully_shard`` keeps for a module, and what FSDP1 does before its first step.
fsdp2_state = _find_later("torch.distributed.fsdp._fully_shard._fsdp_state._get_module_fsdp_state", SHARDED)
fsdp1_lazy_init = _find_later("torch.distributed.fsdp._runtime_utils._lazy_init", SHARDED)
_find("torch.autograd.profiler._is_profiler_enabled", "noticing a profiler that is about to begin", False)


def profiler_entered() -> bool:
    """Return whether a torch profiler was entered, also one that waits for its schedule."""
    began = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)
    return bool(began or _found["profiler_active"]())


def tracing_context() -> Any:
    """Return what identifies the graph that is traced or compiled in this thread, or None."""
    return getattr(_found["guards"], "tracing_context", None)


#: torch since 2.15 keeps per thread whether torch.fx traces; its recompute sets the forward's.
fx_tracing = getattr(torch.fx._symbolic_trace, "_get_is_fx_tracing", None)
set_fx_tracing = getattr(torch.fx._symbolic_trace, "_set_is_fx_tracing", None)

# ---- torch.utils.checkpoint ----

#: torch before 2.12 asks a policy before the operator runs.
asks_policies_after = (
    "op_output" in inspect.signature(torch.utils.checkpoint.SelectiveCheckpointContext.__init__).parameters
)


def is_tracing_checkpoint() -> bool:
    """Return whether torch's selective contexts record a graph; it reads none of its arguments."""
    return bool(_found["_is_compiling"](None, None, None))


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
