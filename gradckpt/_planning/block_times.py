"""How long a region takes in each option, and what that does to its gradients:
:func:`measure_regions`.

Blocks are measured one at a time, where the step calls them, with the arguments that they get
there. So at most one block more than in the step is alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from gradckpt._apart import apart
from gradckpt._engine import parameter_hooks
from gradckpt._engine import torch_private as private
from gradckpt._host_random import host_random
from gradckpt._models import activity
from gradckpt._models.caches import is_cache, snapshot
from gradckpt._models.kinds import Tree
from gradckpt._models.ranks import RankCheck
from gradckpt._models.regions import Region, region_of
from gradckpt._models.working_set import Inner, working_sets
from gradckpt._planning.blocks import likeness
from gradckpt._planning.options import KEEP, Option
from gradckpt._planning.sharded import weights_in
from gradckpt._stats import uncounted
from gradckpt._training_state import TrainingState

__all__ = ["Cost", "RegionCosts", "measure_regions", "wait"]

logger = logging.getLogger("gradckpt")

#: Options are measured for about so many seconds each, and so often at least and at most.
_SECONDS, _LEAST, _MOST = 0.2, 3, 15


@dataclasses.dataclass(frozen=True)
class Cost:
    """``seconds``: of forward and backward. ``error``: the relative L2 error of the region's
    gradients, of its inputs and parameters together.
    """

    seconds: float
    error: float


class RegionCosts:
    """The costs of regions by option; regions that are alike share them."""

    def __init__(self) -> None:
        self._kinds: list[tuple[Any, dict[Option, Cost]]] = []
        self._of: dict[int, dict[Option, Cost]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_kinds": [], "_of": self._of}  # for the process that has the blocks

    def known(self, block: Module, call: Any) -> bool:
        """Return whether a call like this one was measured; note that this block has its costs."""
        kind = [likeness(block), call]
        for each, costs in self._kinds:
            if each == kind:
                self._of.setdefault(id(block), costs)
                return True
        return False

    def add(self, block: Module, call: Any, costs: dict[Option, Cost]) -> None:
        self._kinds.append(([likeness(block), call], costs))
        self._of.setdefault(id(block), costs)

    def of(self, block: Module, option: Option) -> Cost | None:
        """Return the cost of a block in an option, None if it was not measured."""
        return self._of.get(id(block), {}).get(option)


@contextlib.contextmanager
def measure_regions(blocks: Sequence[Module], options: Sequence[Option]) -> Iterator[RegionCosts]:
    """Measure each distinct block when the step in this ``with`` block calls it first."""
    costs = RegionCosts()
    busy = False

    def hook(block: Module, args: Any, kwargs: Any) -> None:
        nonlocal busy
        if busy or private.graph_task_id() != -1 or not torch.is_grad_enabled():
            return
        call = _shapes((args, kwargs))
        if costs.known(block, call):
            return
        busy = True
        try:
            with uncounted(), activity.unobserved():
                trial = functools.partial(_measure, block, options, args, kwargs)
                costs.add(block, call, apart(trial, lambda: TrainingState(block, args, kwargs)))
            logger.info("gradckpt: measured %s in %d options", type(block).__name__, len(options))
        finally:
            busy = False

    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield costs


def _shapes(tree: Any) -> list[Any]:
    leaves = private.tree_leaves(tree)
    return [(x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else type(x) for x in leaves]


def _measure(block: Module, options: Sequence[Option], args: Any, kwargs: Any) -> dict[Option, Cost]:
    """Run a block in all options in turn, several times; the fastest of each counts.

    In turn, so that what else the machine does meets all options alike.
    """
    forward = _own_forward(block)
    ordered = [KEEP, *(each for each in options if each != KEEP)]
    calls = {option: _caller(block, option, forward) for option in ordered}
    seconds = dict.fromkeys(ordered, math.inf)
    errors = dict.fromkeys(ordered, 0.0)
    exact: list[Tensor | None] = []
    upstream: list[Tensor] = []
    began = time.perf_counter()
    with _put_back(block) as rewind:
        for turn in range(1 + _MOST):
            for option in ordered:
                rewind()
                call, inner = calls[option]
                with _installed(inner):
                    gradients, elapsed = _timed(block, call, args, kwargs, upstream)
                if turn:  # the first one warms up
                    seconds[option] = min(seconds[option], elapsed)
                elif option == KEEP:
                    exact = gradients
                elif option.codec:
                    errors[option] = _error(exact, gradients)
            if turn >= _LEAST and time.perf_counter() - began > _SECONDS * len(ordered):
                break
    # Each option runs what KEEP runs, and more, and with a place what it does without: less time is
    # noise.
    found = {option: max(seconds[option], seconds[KEEP]) for option in ordered}
    for option in ordered:
        if (same := option.beside(ordered)) is not None:
            found[option] = max(found[option], found[same])
    return {option: Cost(found[option], errors[option]) for option in ordered}


def _own_forward(block: Module) -> Callable[..., Any]:
    region = region_of(block)
    if region is not None:
        return region.own or type(block).forward.__get__(block)  # type: ignore[no-any-return]
    return vars(block).get("forward") or type(block).forward.__get__(block)  # type: ignore[no-any-return]


def _caller(block: Module, option: Option, forward: Callable[..., Any]) -> tuple[Callable[..., Any], list[Inner]]:
    """Return the block in an option, and what has to be installed in it while it runs so."""
    settings = option.settings()
    if settings is None:
        return forward, []
    place = settings.pop("offload", None)
    region = Region(block, settings, RankCheck("", {}), place)
    inner = working_sets(Tree(block), {block: settings})
    return lambda *args, **kwargs: region.run(block, forward, args, kwargs), inner


@contextlib.contextmanager
def _installed(inner: Sequence[Inner]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in inner:
            each.install()
            stack.callback(each.remove)
        yield


def _timed(
    block: Module, call: Callable[..., Any], args: Any, kwargs: Any, upstream: list[Tensor]
) -> tuple[list[Tensor | None], float]:
    """Return the gradients of a block's inputs and parameters, and the seconds; the parameters'
    hooks are not called.

    ``upstream``: the gradients of its outputs, which the first call of all draws.
    """
    inputs: list[Tensor] = []

    def fresh(x: Any) -> Any:
        if is_cache(x):
            return snapshot(x)
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        leaf = x.detach().requires_grad_()
        inputs.append(leaf)
        return leaf * 1  # no leaf, as in the step

    args, kwargs = private.tree_map(fresh, (args, kwargs))
    trained = weights_in(block)
    device = next((x.device for x in (*inputs, *trained)), torch.device("cpu"))
    wait(device)
    began = time.perf_counter()
    result = call(*args, **kwargs)
    outputs = [x for x in private.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if outputs and (inputs or trained):
        upstream.extend(_noise_like(x) for x in outputs[len(upstream) :])
        wanted = (*inputs, *trained)
        gradients = parameter_hooks.capture(private.run_backward, outputs, tuple(upstream), wanted, trained)
    wait(device)
    return list(gradients), time.perf_counter() - began


def _noise_like(x: Tensor) -> Tensor:
    """Return a gradient for an output: the same at each call, and like no constant, which
    normalizations ignore.
    """
    generator = torch.Generator(x.device).manual_seed(0) if x.device.type != "meta" else None
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)


def wait(device: torch.device) -> None:
    """Let a device finish what it was given."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device.type).synchronize(device)


def _error(exact: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    """Return the relative L2 error over all gradients."""
    wrong = whole = 0.0
    for e, f in zip(exact, found, strict=True):
        if e is not None and f is not None:
            wrong += float((f.float() - e.float()).square().sum())
            whole += float(e.float().square().sum())
    return (wrong / whole) ** 0.5 if whole else 0.0


@contextlib.contextmanager
def _put_back(block: Module) -> Iterator[Callable[[], None]]:
    """Yield a function that restores generators and the block's buffers; call it at the end."""
    rewind_host = host_random()
    devices = {p.device for p in block.parameters() if p.device.type not in ("cpu", "meta")}
    states = [(device, torch.get_device_module(device.type).get_rng_state(device)) for device in devices]
    buffers = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    tables = [(module._buffers, dict(module._buffers)) for module in block.modules()]

    def rewind() -> None:
        rewind_host()
        for device, state in states:
            torch.get_device_module(device.type).set_rng_state(state, device)
        for table, old in tables:  # a forward may assign them
            table.update(old)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.data.copy_(value)

    try:
        yield rewind
    finally:
        rewind()
