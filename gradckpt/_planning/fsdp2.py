"""Models that ``fully_shard`` (FSDP2) has sharded: what a rank has of them, and their step on
paper.

On paper FSDP's own hooks and states run, from where a step begins, and collectives move nothing. So
a trace has what they gather, keep and free.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from gradckpt._engine import torch_private as private
from gradckpt._planning.kept_attributes import KeptAttributes
from gradckpt._planning.paper import PaperMode

__all__ = ["State"]

#: Where a gradient in the dtype of reductions waits for one, before torch 2.15; since, in the whole
#: parameter's ``grad``.
_ACCUMULATED = "unsharded_accumulated_grad"

#: The attributes of states, groups and their contexts where a step begins; containers are empty.
_AT_START: dict[str, Any] = {
    "iter_forward_root": None,
    "post_backward_final_callback_queued": False,
    "_last_post_reduce_events": {},
    "all_gather_state": None,
    "reduce_scatter_state": None,
    "reduce_scatter_states": [],
    "post_forward_order": [],
    "_modules_to_run_forward": set(),
    "_all_gather_result": None,
    "_post_forward_indices": [],
    "_reshard_after_forward_event": None,
    "_post_reduce_event": None,
    "_all_reduce_state": None,
    "active_gradient_reduction": None,
    "gradient_reduction_pending": False,
    "manual_backward_finalization": False,
    "manual_backward_finalization_active": None,
}

#: The attributes of contexts, groups and parameters that real steps find so: no gradient waits for
#: a reduction, and backwards end what they begin, also where the caller does that.
_SET_ASIDE: dict[str, Any] = {
    "manual_backward_finalization": False,
    "manual_backward_finalization_active": None,
    "reshard_after_backward": True,
    "_partial_reduce_output": None,
    "_post_backward_pending": False,
    _ACCUMULATED: None,
}


class State:
    """What FSDP2 knows of a model. ``parameters``: one object for each that it has sharded."""

    def __init__(self, model: Module) -> None:
        found: dict[int, Any] = {}
        if "torch.distributed.fsdp" in sys.modules:
            find = private.fsdp2_state()
            found = {id(state): state for m in model.modules() if (state := find(m)) is not None}
        self._outside = False
        for context in {id(state._state_ctx): state._state_ctx for state in found.values()}.values():
            self._outside |= any(id(state) not in found for state in context.all_states)
        self.states = list(found.values())
        self.groups = [group for state in self.states for group in _groups(state)]
        self.parameters = [param for group in self.groups for param in group.fsdp_params]

    def registered(self) -> set[int]:
        """Return the ids of parameters that modules have when sharded and when gathered."""
        return {id(x) for p in self.parameters for x in (p.sharded_param, _whole(p)) if x is not None}

    def trained(self) -> dict[int, Tensor]:
        """Return the part of this rank of each parameter, by the id of what optimizers have."""
        return {id(p.sharded_param): p._sharded_param_data for p in self.parameters}

    def missing_gradients(self) -> list[Tensor]:
        """Return tensors of the sizes of those that a step makes."""
        without = [p for p in self.parameters if p.sharded_param.requires_grad and p.sharded_param.grad is None]
        return [p._sharded_param_data for p in without]

    def gradients(self) -> list[Tensor]:
        """Return the parts of gradients that exist."""
        reduced = [p.sharded_param.grad for p in self.parameters]
        return [x._local_tensor for x in reduced if x is not None] + self.unreduced()

    def unreduced(self) -> list[Tensor]:
        """Return gradients that no collective has reduced yet."""
        found = [group._partial_reduce_output for group in self.groups]
        for p in self.parameters:
            found += [vars(p).get(_ACCUMULATED), getattr(_whole(p), "grad", None)]
        return [x for x in found if x is not None]

    def reduces(self) -> bool:
        """Return whether a backward reduces the gradients."""
        return all(group.reduce_grads and group.all_reduce_grads for group in self.groups)

    def gathered(self) -> list[Tensor]:
        """Return what lies gathered now."""
        results = [group._all_gather_result for group in self.groups]
        for state in self.states:
            if (held := getattr(state._comm_ctx, "all_gather_state", None)) is not None:
                results.append(held.all_gather_result)
        found = [result.all_gather_output for result in results if result is not None]
        return found + [x for p in self.parameters for x in p.all_gather_outputs]

    def refusal(self) -> str | None:
        """Return what of this cannot be planned, with the way out."""
        if self._outside:
            return "it is a part of a model that is sharded; pass the whole model"
        if any(p.is_dtensor for p in self.parameters):
            return "it is parallelized in another way, too; call plan() before parallelize_module()"
        if any(p.offload_to_cpu for p in self.parameters):
            return "its weights are offloaded to the host; call plan() before fully_shard(model)"
        if any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in self.parameters):
            return "its weights are gathered in a format of their own; call plan() before fully_shard(model)"
        return None

    def initialize(self) -> None:
        """Let FSDP find the root, as its first step does."""
        for state in self.states:
            state._lazy_init()

    @contextlib.contextmanager
    def on_paper(self, mode: PaperMode) -> Iterator[list[Parameter]]:
        """Let all be as where a step begins, with shards on paper, which this yields.

        The caller puts back the modules' parameters.
        """
        stepping = [*self.states, *self.groups, *self._contexts()]
        kept = [KeptAttributes(x) for x in (*stepping, *self.parameters)]
        try:
            for each in stepping:
                _begin(each)
            for group in self.groups:
                partial = group._partial_reduce_output
                group._partial_reduce_output = None if partial is None else mode.like(partial)
            yield [_shard_on_paper(p, mode) for p in self.parameters]
        finally:
            for attributes in kept:
                attributes.put_back()

    @contextlib.contextmanager
    def gradients_set_aside(self) -> Iterator[None]:
        """Take all gradients off for a ``with`` block, whose steps would reduce them.

        Weights that lie gathered are gathered anew afterwards: the caller puts back what modules
        have, also where the steps have freed it.
        """
        self._shard()
        owners = [vars(x) for x in (*self._contexts(), *self.groups, *self.parameters)]
        kept = [(x, {name: x[name] for name in _SET_ASIDE if name in x}) for x in owners]
        found = [x for p in self.parameters for x in (p.sharded_param, _whole(p)) if x is not None]
        gradients = [(x, x.grad, x.grad_dtype) for x in found]
        for attributes, names in kept:
            attributes.update((name, _SET_ASIDE[name]) for name in names)
        for x in found:
            x.grad = None
        try:
            yield
        finally:
            self._shard()
            for attributes, names in kept:
                attributes.update(names)
            for x, gradient, dtype in gradients:
                _set_gradient(x, gradient, dtype)

    def _shard(self) -> None:
        for group in self.groups:
            group._to_sharded()

    def _contexts(self) -> list[Any]:
        return list({id(x): x for state in self.states for x in (state._state_ctx, state._comm_ctx)}.values())


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # newer than torch 2.11
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _whole(p: Any) -> Any:
    return getattr(p, "_unsharded_param", None)


def _set_gradient(x: Any, gradient: Tensor | None, dtype: torch.dtype | None) -> None:
    """Give a parameter a gradient, for which it may need the dtype that it took gradients in."""
    x.grad = None
    if gradient is not None and x.grad_dtype != dtype:
        x.grad_dtype = dtype
    x.grad = gradient


def _begin(x: Any) -> None:
    attributes = vars(x)
    for name, value in _AT_START.items():
        if name in attributes and isinstance(value, (list, dict, set)):
            attributes[name].clear()
        elif name in attributes:
            attributes[name] = value
    if "_training_state" in attributes:
        x._training_state = type(x._training_state).IDLE
    if "_sharded_state" in attributes:
        x._sharded_state = type(x._sharded_state).SHARDED
    for name in ("_device", "device"):
        if name in attributes:
            attributes[name] = torch.device("cpu")


def _shard_on_paper(p: Any, mode: PaperMode) -> Parameter:
    old, whole = p.sharded_param, vars(p).pop("_unsharded_param", None)
    p.device = torch.device("cpu")
    p.sharded_state = type(p.sharded_state).SHARDED
    p.all_gather_outputs = [mode.emptied(x) for x in p.all_gather_outputs]
    p._sharded_post_forward_param_data = p._sharded_post_forward_param = None
    p._sharded_param_data = mode.like(p._sharded_param_data)
    if (accumulated := vars(p).get(_ACCUMULATED)) is not None:
        p.unsharded_accumulated_grad = mode.like(accumulated)
    local = p._sharded_param_data.as_strided(p.sharded_size, p.contiguous_sharded_stride)
    new = p.sharded_param = Parameter(p.to_sharded_dtensor(local), requires_grad=old.requires_grad)
    if getattr(p, "_has_sharded_grad_dtype_override", False):
        new.grad_dtype = p.sharded_grad_dtype
    if old.grad is not None:
        new.grad = p.to_sharded_dtensor(mode.like(old.grad._local_tensor))
    if whole is not None:  # its gradient is reduced also where this step does not gather it
        p.init_unsharded_param()
        _set_gradient(p._unsharded_param, None if whole.grad is None else mode.like(whole.grad), whole.grad_dtype)
    p._setattr_on_modules(new)
    return new
