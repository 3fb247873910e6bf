"""Regions of torch_remat inside gradckpt's: ``torch_remat.region(f, name, recompute=False)``.

torch_remat is never imported here. Where a program has imported it, each region of ours enters the
state that ``torch_remat.region`` looks for, in the forward and in the recompute; torch_remat does
the rest. This module has every private name of torch_remat that gradckpt uses.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from gradckpt import _C
from gradckpt._config import warn_inactive
from gradckpt._engine import random_state, region_callbacks
from gradckpt._engine import torch_private as private
from gradckpt._engine.torch_objects import make_saved_tensor

#: module of torch_remat -> its names that are used here
NAMES = {"torch_remat._region": ("_checkpoint_context_fn", "_state", "_Phase"), "torch_remat": ("saved_tensors_hooks",)}

_NOTHING = torch.empty(0)


@functools.cache
def _names() -> Any:
    """Return the names of torch_remat as a dict; None, with a warning, where one is missing."""
    found = {}
    for module, names in NAMES.items():
        for name in names:
            try:
                found[name] = getattr(sys.modules[module], name)
            except (KeyError, AttributeError):
                version = getattr(sys.modules.get("torch_remat"), "__version__", "")
                warn_inactive(
                    f"torch_remat {version} has no {module}.{name}, so its regions run again in gradckpt's regions; "
                    "install torch_remat 0.2.2"
                )
                return None
    return found


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
        if _C.is_recomputing():
            warn_runs_again(name)
        self.keeps = True
        _C.hide_operators(1)

    def snapshot(self) -> Any:
        if not self.keeps:
            return None
        self.keeps = False
        _C.hide_operators(-1)
        return random_state.snapshot() if self.preserve else None

    def restore(self, states: Any) -> None:
        if states is not None:
            random_state.restore(states)


class _Records(dict[str, Any]):
    """torch_remat's records of a region. It stores one before it calls what it keeps."""

    keeper: _Keeper

    def __setitem__(self, name: str, record: Any) -> None:
        self.keeper.begin(name)
        super().__setitem__(name, record)


class _Region:
    """torch_remat's state for one region of ours."""

    def __init__(self, one_node: bool, preserve: bool) -> None:
        self.keeper = _Keeper(one_node, preserve)
        self.records = _Records()
        self.records.keeper = self.keeper  # neither knows the region: a circle would keep tensors until gc runs
        self.triggers = 0
        self.forward, self.recompute = self.contexts()

    def contexts(self) -> Any:
        pair = _names()["_checkpoint_context_fn"](None, (self.keeper,))
        pair[0]._region_state.records = self.records
        return pair

    # ---- the two runs ----

    def run(self, replay: bool, call: Callable[[], Any]) -> Any:
        if self.keeper.one_node:  # its second run is a forward too, which may keep nothing
            with self.contexts()[0]:
                return call()
        if replay:
            with self.recompute:
                result = call()
                for _ in range(self.triggers):
                    make_saved_tensor(_NOTHING, False)
                return result
        first = private.next_node_number()
        outer = _C.hooks_around_region()
        hooks = contextlib.nullcontext() if outer is None else _names()["saved_tensors_hooks"](*outer)
        with self.forward, hooks:
            try:
                result = call()
            finally:
                self.keeper.snapshot()
            if self.records:
                self._trigger(result, first)
            return result

    def _trigger(self, result: Any, first: int) -> None:
        """Make the recompute run, as a whole, before the backward enters the region.

        A region that is skipped hands over the inputs it saved when the recompute reaches it, and
        backward may begin with it. So the last tensors that our region saves are empty ones, which
        hooks of the nodes that made the results unpack. One is saved in any case.
        """
        leaves = private.tree_leaves(result)
        nodes = {x.grad_fn for x in leaves if isinstance(x, torch.Tensor) and x.grad_fn is not None}
        inside = [node for node in nodes if first <= node._sequence_nr() < sys.maxsize]
        self.triggers = max(len(inside), 1)
        saved = [make_saved_tensor(_NOTHING, False) for _ in range(self.triggers)]
        for node, trigger in zip(inside, saved, strict=False):
            node.register_prehook(functools.partial(_unpack, trigger))


def _unpack(trigger: Any, grads: Any) -> None:
    trigger.unpack()


@functools.cache
def warn_runs_again(name: str) -> None:
    warn_inactive(
        f"{name!r} with recompute=False runs again, in the recompute of a region around its own; "
        "leave one of the two regions out"
    )


def remat_region(one_node: int, preserve: int) -> Any:
    """Return torch_remat's state for a region of ours; None where its names are missing."""
    return None if _names() is None else _Region(bool(one_node), bool(preserve))


def call_in_remat(
    region: _Region, replay: int, context: Any, function: Callable[..., Any], args: Any, kwargs: Any, device: Any
) -> Any:
    """Call a region's function within torch_remat's state, and within the region's context if any."""
    if context is None:
        return region.run(bool(replay), lambda: function(*args, **(kwargs or {})))
    within = region_callbacks.recompute_within if replay else region_callbacks.call_within
    return region.run(bool(replay), lambda: within(context, function, args, kwargs, device))
