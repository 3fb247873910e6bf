"""What an optimizer's step needs: :func:`optimizer_memory`."""

from __future__ import annotations

import copy
import dataclasses
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from gradckpt._engine import torch_private as private
from gradckpt._planning.paper import PaperMode
from gradckpt._planning.sharded import local, trained_parts
from gradckpt._planning.step_trace import StateBeforePaper, apart_on_paper

__all__ = ["OptimizerMemory", "optimizer_memory", "state_bytes", "torch_optimizer"]


@dataclasses.dataclass(frozen=True)
class OptimizerMemory:
    """Bytes. ``states``: those that exist; ``new``: those that the next step makes; ``working``:
    the highest point of the next step above its start, its new states included.
    """

    states: int
    new: int
    working: int


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of an optimizer's states."""
    values: list[Any] = list(chain.from_iterable([each.values() for each in optimizer.state.values()]))
    if not set(map(type, values)) <= {Tensor}:  # which is fast, and each training call asks
        values = [local(x) for x in private.tree_leaves(values) if isinstance(x, Tensor)]
    return sum(map(attrgetter("nbytes"), values))


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate may have wrapped.

    Raises:
        TypeError: It is none.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"gradckpt: optimizer= takes a torch optimizer, not {type(optimizer).__name__}")
    return inner


def optimizer_memory(model: Module, optimizer: Any) -> OptimizerMemory:
    """Run an optimizer's next step on paper.

    Raises:
        TypeError: It is no torch optimizer.
        ValueError: Its step cannot be run on paper, or it trains other parameters.
    """
    inner = torch_optimizer(optimizer)
    own = trained_parts(model)
    if not any(id(p) in own for group in inner.param_groups for p in group["params"]):
        raise ValueError("gradckpt: optimizer= has no parameter of this model; pass the one that trains it")
    return apart_on_paper(lambda: _on_paper(inner), lambda: StateBeforePaper(model, vars(inner)))


def _on_paper(inner: torch.optim.Optimizer) -> OptimizerMemory:
    mode = _OptimizerMode()
    twins: dict[int, Parameter] = {}
    groups = []
    for group in inner.param_groups:
        for p in group["params"]:
            twins[id(p)] = Parameter(mode.like(local(p)), requires_grad=p.requires_grad)
            if p.requires_grad:
                twins[id(p)].grad = mode.like(local(p))
        groups.append({**group, "params": [twins[id(p)] for p in group["params"]]})
    twin = copy.copy(inner)
    vars(twin).update(param_groups=groups, state=type(inner.state)(inner.state.default_factory))
    for p, state in inner.state.items():
        if id(p) in twins:
            twin.state[twins[id(p)]] = private.tree_map(lambda x: _twin(mode, x), state)
    before = state_bytes(twin)
    try:
        with mode, torch.no_grad():
            step = type(inner).step
            getattr(step, "__wrapped__", step)(twin)  # without the hooks of the real one
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"gradckpt: the step of {type(inner).__name__} cannot be run on paper ({reason}); leave optimizer= out "
            "and let enable(budget=) plan again when its states exist"
        ) from error
    top = total = 0
    for event in mode.events:
        total += event.size
        top = max(top, total)
    return OptimizerMemory(before, state_bytes(twin) - before, top)


class _OptimizerMode(PaperMode):
    """Small tensors of the states keep their values: a step asks for the number of steps."""

    def _made_here(self, func: Any, args: Any, kwargs: Any) -> bool:
        return True


def _twin(mode: PaperMode, x: Any) -> Any:
    if not isinstance(x, Tensor):
        return copy.copy(x)
    return mode.like(local(x)) if x.numel() > 1 else x.detach().cpu().clone()
