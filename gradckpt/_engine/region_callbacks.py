"""Rare paths of the C engine, in Python: torch's own context managers and messages.

Only C calls them (csrc/torch, csrc/engine); nothing here is public.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.autograd import forward_ad

from gradckpt._compression import check_no_operators, parse_compress, warn_user
from gradckpt._engine import torch_errors
from gradckpt._engine import torch_private as private
from gradckpt._engine.argument_state import Watch
from gradckpt._engine.arguments import module_behind, name_of
from gradckpt._engine.selective import contexts_of

logger = logging.getLogger("gradckpt")


# ---- compress= ----


def parse_plan(compress: Any) -> tuple[str | None, int, bool, bool, int, bool, int]:
    """Return the fields of ``compress=`` that C needs, in the order of checkpoint_options.c."""
    config = parse_compress(compress)
    if config is None:
        return None, 0, False, False, 0, False, 0
    check_no_operators(config)
    floating = config.include == "floating"
    replay_discrete = (
        0
        if config.fake_quantize or not config.lossy
        else 2
        if config.replay_discrete == "casts"
        else int(config.replay_discrete)
    )
    return (
        config.codec,
        config.min_numel,
        config.fake_quantize,
        floating,
        replay_discrete,
        config.stochastic,
        config.seed,
    )


def determinism_check(value: Any, exact: int) -> Any:
    """Resolve ``determinism_check=``:

    True for the default, False for one that warns, None for no check, else the function that reads
    the values to compare.
    """
    ours = {"default": True, "none": None} | ({} if exact else {"warn": False})
    if isinstance(value, str) and value in ours:
        return ours[value]
    checks = private.determinism_checks
    if value not in checks:
        raise _unknown_check(value, checks, exact)
    return checks[value]


def _unknown_check(value: Any, checks: Any, exact: int) -> Exception:
    error: Exception = torch_errors.unknown_check(value, checks)
    if not exact:
        error.add_note("gradckpt also takes determinism_check='warn'")
    return error


def tracing_mode_active() -> bool:
    """Return whether a dispatch mode is active under which a plain tensor's memory is not its
    values.
    """
    keys = private.mode_keys
    return any(private.get_dispatch_mode(k) is not None for k in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))


def is_dual(x: torch.Tensor) -> bool:
    if private.is_excluded(private.DispatchKey.AutogradFunctionality):
        return False  # below autograd tangents do not exist
    return forward_ad.unpack_dual(x).tangent is not None


class StraightThrough(torch.autograd.Function):
    """Return the payload's values in forward; treat them as the original in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, payload: Any) -> torch.Tensor:
        restored: torch.Tensor = payload.decode()
        return restored

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


# ---- ambient state ----


def _devices_of(args: Any, kwargs: Any) -> list[tuple[str, int]]:
    """Return each (type, index) of a non-CPU tensor in the arguments, once, in order."""
    devices: dict[tuple[str, int], None] = {}
    for leaf in private.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta"):
            devices[(leaf.device.type, leaf.get_device())] = None
    return list(devices)


def _devices_as_torch(args: Any) -> list[tuple[str, int]]:
    """Return devices as torch does: one device type, from positional arguments only.

    It warns when there are more types.
    """
    kind = private.infer_device_type(*args)
    return [(kind, index) for kind_, index in _devices_of(args, None) if kind_ == kind]


def device_rng_capture(args: Any, kwargs: Any, preserve: int, exact: int) -> list[tuple[str, int, torch.Tensor]] | None:
    """Return the generator states of every device in use, of every type (torch looks at one type
    only).
    """
    found = []
    for kind, index in _devices_as_torch(args) if exact else _devices_of(args, kwargs) if preserve else ():
        module = getattr(torch, kind, None)
        if preserve and module is not None and getattr(module, "_initialized", False):
            with module.device(index):
                found.append((kind, index, module.get_rng_state()))
    return found or None


def device_rng_swap(states: list[tuple[str, int, torch.Tensor]]) -> list[tuple[str, int, torch.Tensor]]:
    """Set the states and return the previous ones."""
    previous = []
    for kind, index, state in states:
        module = getattr(torch, kind)
        with module.device(index):
            previous.append((kind, index, module.get_rng_state()))
            module.set_rng_state(state)
    return previous


Call = tuple[Callable[..., Any], tuple[Any, ...]]


def device_plan(device: Any, with_device: int, enter: list[Call], leave: list[Call]) -> tuple[Any, Any]:
    """Append how C enters and leaves ``torch.device`` as it was in the forward.

    Nothing is changed here. C calls these builtins one after the other, so that an interrupt cannot
    leave a context half entered.

    Returns:
        The torch function modes inside (None: no change) and around.
    """
    device_module = private.device_module()
    around = private.function_modes()
    leave.append((setattr, (device_module, "CURRENT_DEVICE", device_module.CURRENT_DEVICE)))
    if not with_device:
        return None, around
    enter.append((setattr, (device_module, "CURRENT_DEVICE", device.device)))
    return [device, *(m for m in around if not isinstance(m, private.device_context()))], around


def device_context() -> Any:
    """Return a context like the innermost ``torch.device`` (or ``torch.set_default_device``), or
    None. That one keeps what it found where it was entered, and is not entered again.
    """
    kind = private.device_context()
    return next((kind(m.device) for m in reversed(private.function_modes()) if isinstance(m, kind)), None)


def copy_original(out: torch.Tensor, original: torch.Tensor, only_nan: bool, once: Any) -> None:
    """Copy the original's values into ``out``: all, or only those that a rounding codec could not
    hold. ``once``: sizes and strides (None: contiguous) of the values where elements share memory.
    """
    with torch.no_grad():
        x = original.detach()
        if once is not None:
            sizes, strides = once
            x = x.as_strided(sizes, strides or (1,))
            out = out.as_strided(sizes, strides or (1,))
        out.copy_(torch.where(out.isnan(), x, out) if only_nan else x)


@functools.cache
def note_create_graph() -> None:
    logger.warning(
        "gradckpt: a backward with create_graph=True reads restored inputs of regions, so what is computed of its "
        "gradients is approximate; pass compress=None to these regions"
    )


def payload_repr(payload: Any, bytes_in: int) -> str:
    what = f"{payload.codec} of {payload.dtype} {payload.shape}"
    return f"<gradckpt.codecs.Payload {what}, {bytes_in} -> {payload.nbytes} bytes>"


# ---- contexts of the two runs ----


def contexts(context_fn: Callable[[], Any], hooks_see_kept: bool | None) -> tuple[Any, Any, None]:
    """``hooks_see_kept``: ``respect_saved_tensors_hooks=``."""
    forward, recompute = context_fn()
    if private.is_tracing_checkpoint():
        mode = private.TorchDispatchMode
        if not isinstance(forward, mode) or not isinstance(recompute, mode):
            raise torch_errors.no_modes(forward, recompute)
    if isinstance(forward, private.CachingMode):
        if hooks_see_kept and not hasattr(forward, "respect_saved_tensors_hooks"):
            raise ValueError(
                f"gradckpt: the selective contexts of torch {torch.__version__} show saved-tensor hooks nothing; pass "
                "policy=, or contexts of gradckpt.compat"
            )
        forward.respect_saved_tensors_hooks = hooks_see_kept
    return forward, recompute, None


def policy_contexts(policy: Any, hooks_see_kept: bool | None) -> tuple[Any, Any, None]:
    return contexts(contexts_of(policy), hooks_see_kept)  # type: ignore[arg-type]  # C calls this with a policy


def debug_contexts(function: Any, exact: bool) -> tuple[Any, Any, Any]:
    """Return torch's operator logs.

    Our mode also looks at what the region reads, to notice changes.
    """
    context_fn, callback = private.debug_context()
    forward, recompute = context_fn()
    if not exact:
        forward = recompute = Watch(function, forward, recompute)
    return forward, recompute, callback


def call_within(
    context: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, device: Any, frame: Any
) -> Any:
    """Call the function within a context that, as in torch, may not swallow exceptions.

    ``torch.device`` is already around it.
    """
    with context.around_forward(frame, args, kwargs) if isinstance(context, Watch) else context:
        return function(*args, **(kwargs or {}))
    raise torch_errors.suppressed()


def recompute_within(
    context: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, device: Any, frame: Any
) -> Any:
    """Call the function within a recompute context that, as in torch, may swallow exceptions, the
    early stop among them. ``torch.device`` is inside it.
    """
    if isinstance(context, Watch):
        context = context.around_recompute(args, kwargs)
    with context, contextlib.nullcontext() if device is None else type(device)(device.device):
        return function(*args, **(kwargs or {}))


# ---- options ----


def check_reentrant(keywords: dict[str, Any], ours: str | None) -> None:
    """Raise torch's errors for what its reentrant form does not take; ``ours``: our keyword."""
    if keywords:
        raise torch_errors.for_reentrant(keywords)
    raise ValueError(f"gradckpt: {ours}= needs use_reentrant=False")


# ---- errors ----


_APPROXIMATE = (
    "\ngradckpt: this region's inputs were compressed, so its recompute saw slightly different values; if it branches "
    'on values, pass compress={"codec": ..., "fake_quantize": True}\n'
)


def _raise_or_warn(error: Exception, approximate: int, warn: int = 0) -> None:
    text = f"{error}{_APPROXIMATE if approximate else ''}"
    if not warn:
        raise type(error)(text)
    warn_user(text, UserWarning)


def raise_more_saved(approximate: int) -> None:
    _raise_or_warn(torch_errors.more_saved(), approximate)


def raise_fewer_saved(forward: int, recompute: int, approximate: int) -> None:
    _raise_or_warn(torch_errors.fewer_saved(forward, recompute), approximate)


_DLPACK_DTYPES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 8: "mps", 14: "xpu"}


def from_dlpack(sizes: tuple[int, ...], code: int, bits: int, device: int, index: int) -> tuple[Any, Any, Any]:
    """Return shape, dtype and device as torch prints them, from DLPack's numbers."""
    name = "bool" if code == 6 else f"{_DLPACK_DTYPES.get(code, 'dlpack')}{bits}"
    kind = _DLPACK_DEVICES.get(device, "privateuseone")
    where = torch.device(kind) if kind == "cpu" else torch.device(kind, index)
    return torch.Size(sizes), getattr(torch, name, name), where


def metadata(x: torch.Tensor) -> tuple[Any, Any, Any]:
    """Return what the determinism check compares for a tensor that C cannot read."""
    return x.shape, x.dtype, x.device


def _as_torch(meta: tuple[Any, ...]) -> tuple[Any, ...]:
    return from_dlpack(*meta) if len(meta) == 5 else meta


def same_metadata(then: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Return whether the metadata agree.

    One may be DLPack's numbers: a subclass may come back detached, as a plain tensor.
    """
    return _as_torch(then) == _as_torch(now)


Differences = list[tuple[int, tuple[Any, ...], tuple[Any, ...]]]


def raise_metadata(rows: Differences, function: Any, approximate: int, warn: int) -> None:
    def describe(meta: tuple[Any, ...]) -> Any:
        if len(meta) == 1:  # a determinism check of the user's own returned it
            return meta[0]
        return dict(zip(("shape", "dtype", "device"), _as_torch(meta), strict=True))

    error = torch_errors.other_metadata([(index, describe(saved), describe(now)) for index, saved, now in rows])
    _raise_or_warn(error, approximate, warn)


def _members(function: Any) -> Iterator[tuple[str, torch.Tensor]]:
    module = module_behind(function)
    return iter(()) if module is None else itertools.chain(module.named_parameters(), module.named_buffers())


def are_members(function: Any, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether both are parameters or buffers of the region's module now."""
    return {id(a), id(b)} <= {id(x) for _, x in _members(function)}


def _describe_origin(
    function: Any, meta: tuple[Any, ...], strides: Any, origin: tuple[int, str | None, torch.Tensor | None]
) -> str:
    """Return one run's tensor in a slot, as read by csrc/engine/region/origin.c."""
    argument, node, leaf = origin
    shape, dtype, _ = _as_torch(meta)
    names = [repr(name) for name, x in _members(function) if x is leaf]
    whose = f" {names[0]}" if names else ""
    what = (
        f"tensor {argument} of the arguments"
        if argument >= 0
        else f"made by {node}{f' from parameter{whose}' if leaf is not None else ''}"
        if node is not None
        else f"parameter or buffer{whose}"
        if names
        else f"a tensor that no operator of the region made{'' if leaf is None else f', at {id(leaf):#x}'}"
    )
    laid = "" if strides is None else f", strides {tuple(strides)}"
    return f"{what}; shape {tuple(shape)}, {dtype}{laid}"


def raise_origins(rows: list[tuple[Any, ...]], function: Any, approximate: int, warn: int) -> None:
    """Report saved tensors that have the forward's shape but are other tensors."""
    differences = "".join(
        f"tensor at position {index}:\n"
        f"forward: {_describe_origin(function, then, then_strides, then_origin)}\n"
        f"recompute: {_describe_origin(function, now, now_strides, now_origin)}\n"
        for index, then, now, then_strides, now_strides, then_origin, now_origin in rows
    )
    way_out = "" if warn else ', or pass determinism_check="warn"'
    error = torch_checkpoint.CheckpointError(
        f"gradckpt: the recompute of a region ({name_of(function)}) saved other tensors than its forward, so gradients "
        f"would be wrong; make both runs alike{way_out}:\n{differences}"
        "debug=True lists the operators of both runs\n"
    )
    _raise_or_warn(error, approximate, warn)


def raise_overwritten(x: torch.Tensor) -> None:
    """Raise for a tensor that the recompute changed in place after something had saved it."""
    raise RuntimeError(
        f"gradckpt: a tensor of shape {tuple(x.shape)} was changed in place after this region had saved it; write "
        "x = x + y"
    )
