"""Calls inside a region that do not run again: :func:`gradckpt.policies.region`.

The autograd nodes of such a call keep what they save, as they do outside of regions, with one
exception: an argument that the recompute makes again, with the same values, is not kept. In its
place lies a holder of the region (csrc/engine/region/frame.h), like those of the tensors that are
saved around the call. The recompute skips the call, fills those holders from the arguments it finds
there, and returns the outputs of the forward. Where a codec rounds, the arguments are kept too:
beside exact results, restored ones are no small error (``x - x.amax()``).
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.checkpoint import CheckpointPolicy

from gradckpt import _C
from gradckpt._compression import warn_inactive
from gradckpt._engine import torch_private as private
from gradckpt._engine.torch_objects import raise_modified
from gradckpt._engine.trial_calls import generator_states, restore_generators, without_policies

Function = TypeVar("Function", bound=Callable[..., Any])

#: Key of a region's calls under which the name of the call lies that runs now and is kept.
_NOW = 0
#: The storage of an argument that the recompute does not make again.
_KEPT = 0


#: What a call may return beside tensors.
_PLAIN: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)

#: Each returns whether a tensor is the output of another library's call that does not run again.
kept_elsewhere: list[Callable[[torch.Tensor], bool]] = []


class _Region(NamedTuple):
    """The region around a call, as ``_C.running_region`` describes it."""

    calls: dict[Any, Any]
    replay: bool
    preserve_rng_state: bool
    approximate: bool
    saved: int
    pack: Any
    unpack: Any


#: A view of an argument: its sizes, strides, and its offset from the argument's.
_View = tuple[torch.Size, tuple[int, ...], int]


class _Output(NamedTuple):
    """A tensor that the call returned, detached."""

    value: torch.Tensor
    version: int
    requires_grad: bool


@dataclasses.dataclass(slots=True, eq=False)
class _Kept:
    """What is left of a call that does not run again."""

    returned: bool = False  # it stays so if the call raises
    #: For each tensor that the recompute hands over: the leaf of the arguments, and its part.
    inputs: list[tuple[int, _View | None]] = dataclasses.field(default_factory=list)
    outputs: list[Any] = dataclasses.field(default_factory=list)
    spec: Any = None
    random: Any = None
    saved: int = 0  # number of the region's saved tensors when the call ended


# ---- what autograd saves in the call ----


def _place(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg()


class _Inputs:
    """The tensors among a call's arguments, while it runs."""

    def __init__(self, name: str, leaves: list[Any], region: _Region) -> None:
        self.name = name
        kept = {key for each in region.calls.values() if isinstance(each, _Kept) for key in _storages(each)}
        self.rows: list[tuple[int, torch.Tensor, int, Any]] = []
        for i, x in enumerate(leaves):
            if isinstance(x, torch.Tensor) and not x.is_inference():
                plain = type(x) is torch.Tensor and x.layout is torch.strided
                storage = x.untyped_storage()._cdata if plain else None
                again = not region.approximate and not isinstance(x, torch.nn.Parameter) and storage not in kept
                again = again and not any(is_kept(x) for is_kept in kept_elsewhere)
                self.rows.append((i, x, x._version, storage if again else _KEPT))

    def find(self, x: torch.Tensor) -> tuple[int, _View | None] | None:
        """Return which argument a saved tensor is, or a view of which; None for another tensor, and
        for an argument that the recompute does not make again.
        """
        storage = x.untyped_storage()._cdata if type(x) is torch.Tensor and x.layout is torch.strided else None
        rows = [(i, of, where) for i, of, _, where in self.rows if where != _KEPT]
        for i, of, where in rows:
            if x is of or (where is not None and where == storage and _place(x) == _place(of)):
                return i, None
        for i, of, where in rows:
            if where is None or where != storage or not of.is_contiguous() or _place(x)[3:] != _place(of)[3:]:
                continue
            offset = int(x.storage_offset()) - int(of.storage_offset())
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            if offset >= 0 and (x.numel() == 0 or offset + last < of.numel()):
                return i, (x.shape, x.stride(), offset)
        return None

    def check(self) -> None:
        for _, x, version, _ in self.rows:
            if x._version != version:
                raise RuntimeError(
                    f"gradckpt: the call {self.name!r} with recompute=False changed an argument in place; "
                    "return a new tensor, or pass recompute=True"
                )


#: What unpacks a saved tensor, and the tensor: other hooks, those of the region or around it; or
#: :func:`_unmodified`, of one that autograd keeps.
_Packed = tuple[Callable[[Any], torch.Tensor], Any]


def _unpack(saved: _Packed) -> torch.Tensor:
    unpack, data = saved
    return unpack(data)


def _unmodified(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    value, version = saved
    if value._version != version:
        raise_modified(value, version)
    return value


class _Packer:
    """The pack hook while the call runs. autograd holds it as long as what it packed."""

    def __init__(self, region: _Region, kept: _Kept, inputs: _Inputs, around: Any) -> None:
        self.now: Any = (region, kept, inputs, around)

    def __call__(self, x: torch.Tensor) -> Any:
        region, kept, inputs, around = self.now
        found = inputs.find(x)
        if found is not None:
            kept.inputs.append(found)
            return region.unpack, region.pack(x.detach())  # as the recompute hands it over
        if around is not None:
            return around[1], around[0](x)
        x = x.detach()  # its node does not hold itself
        return _unmodified, (x, -1 if x.is_inference() else x._version)


# ---- the two runs ----


def _run(region: _Region, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a call that is kept, in the region's forward."""
    kept = _Kept()
    around = _C.hooks_around_region()
    leaves = private.tree_leaves((args, kwargs))
    inputs = _Inputs(name, leaves, region)
    random = generator_states() if region.preserve_rng_state else None
    region.calls[_NOW] = name
    pack = _Packer(region, kept, inputs, around)
    region.calls[name] = kept
    try:
        with without_policies():
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                result = function(*args, **kwargs)
            outputs, kept.spec = private.tree_flatten(result)
            kept.outputs = [_keep_output(name, x, leaves) for x in outputs]
    finally:
        del region.calls[_NOW]
        pack.now = None
    inputs.check()
    if random is not None:
        after = generator_states()
        kept.random = after if after[1] or after[0] is not random[0] else None
    kept.saved = _Region(*(_C.running_region() or region)).saved
    kept.returned = True
    return result


def _keep_output(name: str, x: Any, leaves: list[Any]) -> Any:
    if not isinstance(x, (torch.Tensor, *_PLAIN)):
        raise RuntimeError(
            f"gradckpt: the call {name!r} with recompute=False returned a {type(x).__name__}, which may hold tensors; "
            "return them in tuples, lists or dicts"
        )
    if not isinstance(x, torch.Tensor) or (x.requires_grad and x.is_leaf):
        return next((_Argument(i) for i, leaf in enumerate(leaves) if leaf is x and x is not None), x)
    same = next((i for i, leaf in enumerate(leaves) if leaf is x), None)
    if same is not None:
        return _Argument(same)
    value = x.detach()
    return _Output(value, -1 if value.is_inference() else value._version, x.requires_grad)


class _Argument(NamedTuple):
    """An output that is one of the arguments."""

    leaf: int


def _storages(kept: _Kept) -> list[int]:
    """Return the storages of the outputs, which the recompute does not make again."""
    values = (out.value for out in kept.outputs if isinstance(out, _Output))
    return [x.untyped_storage()._cdata for x in values if type(x) is torch.Tensor and x.layout is torch.strided]


def _skip(region: _Region, name: str, kept: _Kept, args: Any, kwargs: Any) -> Any:
    """Return the outputs of a kept call in the recompute, and hand over its arguments."""
    leaves = private.tree_leaves((args, kwargs))
    with without_policies():
        for i, view in kept.inputs:
            x = leaves[i] if i < len(leaves) else None
            if not isinstance(x, torch.Tensor):
                raise RuntimeError(
                    f"gradckpt: the recompute calls {name!r} with other arguments than the forward; make both calls "
                    "alike"
                )
            with torch.no_grad():
                x = x.detach()
                if view is not None:
                    size, stride, offset = view
                    x = x.as_strided(size, stride, x.storage_offset() + offset)
                region.pack(x)
        if not kept.returned:  # a backward inside the call needs no more than what was saved before it
            raise private.StopRecomputation
        if kept.random is not None:
            restore_generators(kept.random)
        return private.tree_unflatten([_output(name, out, leaves) for out in kept.outputs], kept.spec)


def _output(name: str, out: Any, leaves: list[Any]) -> Any:
    if isinstance(out, _Argument):
        return leaves[out.leaf]
    if not isinstance(out, _Output):
        return out
    if out.version >= 0 and out.value._version != out.version:
        raise RuntimeError(
            f"gradckpt: an output of the call {name!r} with recompute=False was changed in place later; change a copy"
        )
    value = out.value.detach()
    if not out.requires_grad:
        return value
    with torch.no_grad():  # without an edge to a leaf that shares its storage: compress_saved() would keep that
        return _as_non_leaf()(value.requires_grad_())


@functools.cache
def _as_non_leaf() -> Any:
    return private.DelayedError(
        "gradckpt: a backward inside a region went past a call with recompute=False; call torch.autograd.grad with "
        "inputs, or pass recompute=True",
        1,
    )


def finish_calls(calls: dict[Any, Any], saved: int, early_stop: int) -> None:
    """Drop outputs that the recompute does not reach. It stops with the last saved tensor.

    Raises:
        RuntimeError: a call raised, and the region has caught that.
    """
    for name, kept in calls.items():
        if isinstance(kept, _Kept) and not kept.returned:
            raise RuntimeError(
                f"gradckpt: the call {name!r} with recompute=False raised and its region went on; pass recompute=True, "
                "or catch the exception inside the call"
            )
        if isinstance(kept, _Kept) and early_stop and kept.saved == saved:
            kept.outputs = []


# ---- in graphs of torch.compile ----

#: The names that the policy of the region lists which is being traced; None outside of regions.
traced: tuple[str, ...] | None = None
#: Whether a codec rounds the inputs of that region.
restored = False
#: Dynamo before torch 2.13 traces no assignment within a region.
_ASSIGNS = private.consumed is not None


def must_set(names: tuple[str, ...], restores: bool) -> bool:
    """Return whether ``traced`` and ``restored`` are to be set for a region that is traced.

    Where Dynamo may refuse it, a region in another goes by what is set, unless that keeps too much.
    """
    differs = (traced, restored) != (names, restores)
    return differs and (_ASSIGNS or traced is None or (restores and not restored))


#: Patterns that a call matched, of late.
met: set[str] = set()


def is_listed(name: str, patterns: Iterable[str]) -> bool:
    found = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)]
    if len(met) > 1024:
        met.clear()
    met.update(found)
    return bool(found)


def warn_compiled(name: str, restored: bool) -> None:
    """Warn where code is compiled that runs in a region outside of the graph, or beside restored
    values.
    """
    if restored:
        warn_inactive(
            f"the call {name!r} with recompute=False runs again in a compiled region whose inputs a codec rounds; "
            "pass compress=None or a CompressionConfig with fake_quantize=True"
        )
    elif _C.running_region() is not None:
        warn_inactive(
            f"the call {name!r} with recompute=False is compiled within its region, which runs it again; "
            "compile the code around the region"
        )


def _keep_nodes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call the function and mark the nodes that it adds to a graph: what they make is kept."""

    def call(*args: Any, **kwargs: Any) -> Any:
        mode = private.dynamo.get_proxy_mode()
        before = 0 if mode is None else len(mode.tracer.graph.nodes)
        result = function(*args, **kwargs)
        for node in [] if mode is None else list(mode.tracer.graph.nodes)[before:]:
            if node.op == "call_function":
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return result

    return call


def _call_in_graph(function: Callable[..., Any], name: str, recompute: bool, args: Any, kwargs: Any) -> Any:
    """Call the function as Dynamo sees it. There is no second run: AOTAutograd cuts the graph."""
    if (traced is None or restored) and not recompute:
        warn_compiled(name, restored)
    if traced is None or restored or (recompute and not is_listed(name, traced)):
        return function(*args, **kwargs)
    return torch.ops.higher_order.dynamo_bypassing_wrapper(_keep_nodes, function, *args, **kwargs)


# ---- region() ----


#: Each returns whether a forward that runs now is part of a recompute.
recomputes: list[Callable[[], bool]] = [_C.is_recomputing]


def check_again(name: str) -> None:
    """Warn where a kept call runs in the recompute of a region around its own."""
    if any(recompute() for recompute in recomputes):
        warn_runs_again(name)


@functools.lru_cache(maxsize=256)
def warn_runs_again(name: str) -> None:
    warn_inactive(
        f"{name!r} with recompute=False runs again, in the recompute of a region around its own; "
        "leave one of the two regions out"
    )


def _is_wanted(name: str) -> bool:
    """Return whether a policy of the region lists the name, which may match a pattern."""

    def match(names: frozenset[str], compressed: int) -> bool:
        found = is_listed(name, names)
        if found and compressed:
            raise ValueError(
                f"gradckpt: save_named() keeps the call {name!r} exactly, not compressed; "
                "name its outputs with policies.name, or leave .compressed() out"
            )
        return found

    return _C.is_name_wanted(match)


def region(function: Function, name: str, *, recompute: bool) -> Function:
    """Name a call inside a region, and choose whether it runs again.

    Args:
        function: Any callable. Tensors among its arguments and results may be nested in containers.
        name: A string, once per region. ``policies.save_named("attn", "mlp.*")`` keeps the calls
            with these names, whatever their ``recompute``.
        recompute: ``False`` runs the call once: what its backward needs is kept, as outside of
            regions, and the recompute returns the outputs of the forward. Arguments that the
            recompute makes again exactly are not kept. ``True`` runs it again, as all code around
            it.

    Returns:
        The function, to be called in a region of ``gradckpt.checkpoint``. Elsewhere it is called as
        it is.

    Raises:
        TypeError, ValueError: an argument of another type, or an empty name. When called:
        RuntimeError: the name was used before in this region; the form of region is one node
            (``use_reentrant=True``, ``SelectiveRecompute``); a call that is kept changed an
            argument in place; ``recompute=True`` inside a call that is kept.
    """
    if torch.compiler.is_compiling():  # Dynamo traces neither the checks nor wraps() of every callable

        def compiled(*args: Any, **kwargs: Any) -> Any:
            return _call_in_graph(function, name, recompute, args, kwargs)

        return compiled  # type: ignore[return-value]
    if not callable(function) or not isinstance(name, str) or not isinstance(recompute, bool):
        raise TypeError(
            "gradckpt: region() got another type; pass a function, a name, and recompute=True or recompute=False"
        )
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError("gradckpt: region() takes a function whose body runs when it is called; name what it calls")
    if not name:
        raise ValueError("gradckpt: region() got an empty name; pass one that no other call of the region has")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _call_in_graph(function, name, recompute, args, kwargs)
        found = _C.running_region()
        if found is None:
            return function(*args, **kwargs)
        return _call(_Region(*found), function, name, recompute, args, kwargs)

    return call  # type: ignore[return-value]


def _call(region: _Region, function: Callable[..., Any], name: str, recompute: bool, args: Any, kwargs: Any) -> Any:
    calls = region.calls
    if region.replay:
        kept = calls.get(name)
        return function(*args, **kwargs) if kept is None else _skip(region, name, kept, args, kwargs)
    if _NOW in calls:
        if recompute:
            raise RuntimeError(
                f"gradckpt: the call {name!r} with recompute=True lies in {calls[_NOW]!r}, which does not run again; "
                "pass recompute=False"
            )
        return function(*args, **kwargs)
    if name in calls:
        raise RuntimeError(f"gradckpt: two calls of this region have the name {name!r}; give each a name of its own")
    if not _is_wanted(name) and recompute:
        calls[name] = None
        return function(*args, **kwargs)
    if region.pack is None:
        raise RuntimeError(
            f"gradckpt: the call {name!r} with recompute=False needs a graph, which this form of region lacks; "
            "use gradckpt.checkpoint with use_reentrant=False"
        )
    check_again(name)
    return _run(region, name, function, args, kwargs)
