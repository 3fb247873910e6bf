"""Regions of torch_remat inside gradckpt's: ``torch_remat.region(f, name, recompute=False)``.

torch_remat is never imported here. Where a program has imported it, each region of ours enters the
state that ``torch_remat.region`` looks for, in the forward and in the recompute; torch_remat does
the rest. This module has every private name of torch_remat that gradckpt uses.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import types
from typing import Any

import torch

from gradckpt import _C
from gradckpt._compression import warn_inactive
from gradckpt._engine import torch_private as private
from gradckpt._engine.kept_calls import check_again, kept_elsewhere, recomputes, warn_runs_again
from gradckpt._engine.torch_objects import make_saved_tensor
from gradckpt._engine.trial_calls import generator_states, restore_generators
from gradckpt._engine.user_lines import outwards

_NOTHING = torch.empty(0)


#: What is used of torch_remat, once it was looked up.
_found: Any = None


def _names() -> Any:
    """Return what is used of torch_remat; None, with a warning, where a name is missing."""
    global _found
    if _found is None:
        try:
            region: Any = sys.modules["torch_remat._region"]
            api: Any = sys.modules["torch_remat._api"]
            state, phase = region._state, region._Phase
            _found = types.SimpleNamespace(
                state=state,
                set=state.set,
                reset=state.reset,
                forward=phase.FORWARD,
                recompute=phase.RECOMPUTE,
                active_save=region._active_save_op,
                make_state=region._CheckpointRegionState,
                live_regions=region._live_regions,
                make_hooks=api._SavedTensorsHooks,
                active_hooks=api._active_saved_tensors_hooks,
            )
            api._state = _StateView(api._state)
            recomputes.append(_is_again)
            kept_elsewhere.append(_is_kept)
        except (KeyError, AttributeError) as error:
            _warn_missing(getattr(error, "name", None) or error.args[0])
    return _found


def _warn_missing(name: str) -> None:
    warn_inactive(
        f"this torch_remat has no {name}, so its regions run again inside gradckpt's; install torch_remat 0.2.2"
    )


class _StateView:
    """torch_remat's state as its functions read it.

    ``torch_remat.checkpoint`` does not run within a region of its own library; within one of ours
    it may.
    """

    def __init__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)

    def get(self) -> Any:
        found = self.state.get()
        if isinstance(found, _Active):
            return None if sys._getframe(1).f_code.co_name == "checkpointed_function" else found
        if found is not None and _C.is_recomputing():
            _check_again(found, sys._getframe(1).f_locals)
        return found


def _check_again(found: Any, caller: dict[str, Any]) -> None:
    """Warn where a region of torch_remat's checkpoint is called, to be kept, in our recompute."""
    names = _names()
    if names is not None and found.phase is names.forward and caller.get("recompute") is False:
        warn_runs_again(str(caller.get("name")))


class _Keeper:
    """What happens around a call that is kept; a ``RecomputeStateHook`` of torch_remat.

    torch_remat calls ``snapshot`` and ``restore`` at the ends of a region of ours too, which
    restores the generators by itself.
    """

    def __init__(self, one_node: bool, preserve: bool) -> None:
        self.one_node, self.preserve = one_node, preserve
        self.keeps = False  # inside such a call

    def begin(self, name: str) -> None:
        if self.one_node:
            raise RuntimeError(
                f"gradckpt: remat.region({name!r}, recompute=False) needs a graph, which this form of region lacks; "
                "use gradckpt.checkpoint with use_reentrant=False"
            )
        check_again(name)
        self.keeps = True
        if _C.hide_operators(1):  # the recompute would meet torch_remat's own operators
            raise RuntimeError(
                f"gradckpt: remat.region({name!r}, recompute=False) needs a policy without a function; "
                "use gradckpt.policies.region, or another policy"
            )

    def snapshot(self) -> Any:
        if not self.keeps:
            return None
        self.keeps = False
        _C.hide_operators(-1)
        return generator_states() if self.preserve else None

    def restore(self, states: Any) -> None:
        if states is not None:
            restore_generators(states)


class _Records(dict[str, Any]):
    """torch_remat's records of a region. It stores one before it calls what it keeps."""

    keeper: _Keeper

    def __setitem__(self, name: str, record: Any) -> None:
        self.keeper.begin(name)
        super().__setitem__(name, record)


class _AllKept(dict[Any, Any]):
    """torch_remat's index of what its calls keep themselves, where that is every argument."""

    def get(self, storage: Any, default: Any = None) -> Any:
        return super().get(storage, lambda: None)  # nothing more is to be kept


class _Region:
    """torch_remat's state for one region of ours, made when one of its regions needs it.

    ``approximate``: the recompute may get other values. Arguments of kept calls are then kept too,
    as in kept_calls.py.
    """

    __slots__ = ("approximate", "first", "keeper", "made", "triggers")

    def __init__(self, one_node: bool, preserve: bool, approximate: bool) -> None:
        self.keeper = _Keeper(one_node, preserve)
        self.approximate = approximate
        self.made: Any = None
        self.triggers = self.first = 0

    def state(self) -> Any:
        if self.made is None:
            names = _names()
            index = {"save_output_persist_index": _AllKept()} if self.approximate else {}
            self.made = names.make_state(records=_Records(), state_hooks=(self.keeper,), **index)
            self.made.records.keeper = self.keeper  # not the region: a circle would keep tensors until gc runs
            names.live_regions.add(self.made)  # torch_remat's reports list these
        return self.made

    def trigger(self, result: Any) -> None:
        """Make the recompute run, as a whole, before the backward enters the region.

        A region that is skipped hands over the inputs it saved when the recompute reaches it, and
        backward may begin with it. So the last tensors that our region saves are empty ones, which
        hooks of the nodes that made the results unpack. One is saved in any case.
        """
        leaves = private.tree_leaves(result)
        nodes = {x.grad_fn for x in leaves if isinstance(x, torch.Tensor) and x.grad_fn is not None}
        inside = [node for node in nodes if self.first <= node._sequence_nr() < sys.maxsize]
        self.triggers = max(len(inside), 1)
        saved = [make_saved_tensor(_NOTHING, False) for _ in range(self.triggers)]
        for node, trigger in zip(inside, saved, strict=False):
            node.register_prehook(functools.partial(_unpack, trigger))

    def pass_triggers(self) -> None:
        for _ in range(self.triggers):
            make_saved_tensor(_NOTHING, False)


class _Active:
    """torch_remat's ``_ActiveCheckpointRegion`` for one run of a region of ours."""

    __slots__ = ("again", "claimed_names", "phase", "region")

    def __init__(self, region: _Region, phase: Any, again: bool = False) -> None:
        self.region, self.phase = region, phase
        self.again = again  # a forward in a recompute of torch_remat's
        self.claimed_names: set[str] = set()

    @property
    def region_state(self) -> Any:
        return self.region.state()


def _is_again() -> bool:
    return _found is not None and getattr(_found.state.get(), "again", False)


def _is_kept(x: torch.Tensor) -> bool:
    """Return whether this is the output of a region of torch_remat that does not run again."""
    found = None if _found is None else _found.state.get()
    if not isinstance(found, _Active) or found.region.made is None or type(x) is not torch.Tensor:
        return False
    index = found.region.made.save_output_persist_index
    return x.layout is torch.strided and private.StorageWeakRef(x.untyped_storage()) in index


def _unpack(trigger: Any, grads: Any) -> None:
    trigger.unpack()


def remat_region(one_node: int, preserve: int, approximate: int) -> Any:
    """Return torch_remat's state for a region of ours; None where its names are missing."""
    return None if _names() is None else _Region(bool(one_node), bool(preserve), bool(approximate))


def _through(names: Any, pack: Any) -> Any:
    """Return the pack hook as called outside our region: torch_remat's own looks at its hooks."""
    before = names.active_hooks.get()

    def packed(x: torch.Tensor) -> Any:
        token = names.active_hooks.set(before)
        try:
            return pack(x)
        finally:
            names.active_hooks.reset(token)

    return packed


def remat_enter(region: _Region, replay: int) -> tuple[tuple[Any, Any, Any], ...]:
    """Return the context variables of a run of the region: (set, value, reset)."""
    names = _names()
    if replay:
        return ((names.set, _Active(region, names.recompute), names.reset),)
    region.first = private.next_node_number()
    outer = names.state.get()
    again = outer is not None and (outer.phase is names.recompute or getattr(outer, "again", False))
    active = (names.set, _Active(region, names.forward, again), names.reset)
    around, inside = _C.hooks_around_region(), names.active_save
    more = []
    if inside.get() is not None:  # our region is within one that torch_remat keeps
        more.append((inside.set, None, inside.reset))
    if around is not None:
        hooks = names.make_hooks(_through(names, around[0]), around[1])
        more.append((names.active_hooks.set, hooks, names.active_hooks.reset))
    return (active, *more)


def remat_leave(region: _Region, replay: int, failed: int, result: Any) -> None:
    names = _names()
    if region.keeper.keeps:  # the call failed
        region.keeper.snapshot()
    if not failed and region.made is not None and region.made.records:
        if replay:
            names.live_regions.discard(region.made)
            region.pass_triggers()
        else:
            region.trigger(result)


def remat_imported() -> None:
    """Warn where a region imported torch_remat, whose regions found no state in it."""
    warn_inactive(
        "torch_remat was imported inside a region, which therefore runs its kept calls again; import it before"
    )


# ---- in graphs of torch.compile ----


def is_traceable() -> bool:
    """Return whether regions of torch_remat may be in a graph; Dynamo takes it for a constant."""
    if "torch_remat" not in sys.modules:
        return False
    try:
        found = hasattr(importlib.import_module("torch_remat._compile"), "_in_compiled_checkpoint")
    except ImportError:
        found = False
    if not found:
        _warn_missing("_compile._in_compiled_checkpoint")
    return found


def trace(checkpoint: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Trace a region of ours as one in which torch_remat's regions mark what is kept."""
    import torch_remat._compile as compiled

    around = compiled._in_compiled_checkpoint
    compiled._in_compiled_checkpoint = True
    try:
        return checkpoint(function, *args, **kwargs)
    finally:
        compiled._in_compiled_checkpoint = around


# ---- what it saves through pack hooks around its regions ----


def original_of(x: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that autograd saves and of which torch_remat passes the detached ``x``.

    A region of torch_remat that keeps its activations calls the saved-tensor hooks around it with
    ``tensor.detach()``, in which neither the grad flag nor the history is left. Its own hook, a few
    frames above, has the tensor. None where no such frame calls, or for another tensor.
    """
    for frame in itertools.islice(outwards(sys._getframe(1)), 3):
        if frame.f_code.co_name == "pack" and frame.f_globals.get("__name__") == "torch_remat._api":
            original = frame.f_locals.get("tensor")
            is_it = isinstance(original, torch.Tensor) and original.requires_grad and _same_memory(original, x)
            return original if is_it else None
    return None


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
