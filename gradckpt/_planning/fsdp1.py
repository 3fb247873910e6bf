"""Models in ``FullyShardedDataParallel`` (FSDP1): what a rank has of them, and their step on paper.

On paper FSDP's own forwards, hooks and handles run, from where a step begins, and collectives move
nothing. Each handle has another flat parameter then, with the attributes of its own.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from gradckpt._engine import torch_private as private
from gradckpt._planning.kept_attributes import KeptAttributes
from gradckpt._planning.paper import PaperMode

__all__ = ["FLAT", "State", "name_before", "views_in"]

#: The name of a flat parameter in the module that has it.
FLAT = "_flat_param"

#: The attributes of modules and handles where a step begins.
_AT_START: dict[str, Any] = {
    "_post_backward_callback_queued": False,
    "_unshard_event": None,
    "_unsharded_flat_param_for_skipped_views": None,
    "_post_forward_index": None,
    "_needs_pre_forward_unshard": False,
    "_needs_pre_backward_unshard": False,
    "_ran_pre_backward_hook": False,
    "_prefetched": False,
}

#: Of a flat parameter: weights that are there only while gathered or cast.
_FREED = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")

#: Of a flat parameter: the reduced gradient of earlier batches, while it collects whole ones.
_REDUCED = "_saved_grad_shard"


class State:
    """What FSDP1 knows of a model. ``parameters``: flat parameters that it has sharded."""

    def __init__(self, model: Module) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        kind: Any = () if fsdp is None else fsdp.FullyShardedDataParallel
        self._modules = list(model.modules())
        self.states: list[Any] = [module for module in self._modules if isinstance(module, kind)]
        self.handles = [state._handle for state in self.states if state._handle is not None]
        self.parameters = [handle.flat_param for handle in self.handles]
        for handle in self.handles:
            if handle._training_state == type(handle._training_state).IDLE:
                handle._reset_flat_param_grad_info_if_needed()  # zero_grad() does not reach its gradient

    def registered(self) -> set[int]:
        """Return the ids of parameters that modules have when sharded and when gathered."""
        return {id(x) for flat in self.parameters for x in (flat, *_originals(flat), *(flat._tensors or ()))}

    def trained(self) -> dict[int, Tensor]:
        """Return the part of this rank of each parameter, by the id of what optimizers have."""
        found: dict[int, Tensor] = {}
        for flat in self.parameters:
            found |= {id(p): p for p in _originals(flat)} if flat._params is not None else {id(flat): _shard(flat)}
        return found

    def parameters_before(self) -> Iterator[tuple[Module, str, Hashable, tuple[int, ...]]]:
        """Yield the parameters that it has flattened: the module, the name, a key and the shape."""
        for flat in self.parameters:
            keys = {}
            for i, ((name, module, _), shape) in enumerate(zip(flat._param_infos, flat._shapes, strict=True)):
                keys[module, name] = id(flat), i
                yield module, name, keys[module, name], tuple(shape)
            for name, module, _, first, where, _ in flat._shared_param_infos:
                key = keys[where, first]
                yield module, name, key, tuple(flat._shapes[key[1]])

    def missing_gradients(self) -> list[Tensor]:
        """Return tensors of the sizes of those that a step makes."""
        return [_shard(flat) for flat in self.parameters if flat.requires_grad and flat.grad is None]

    def gradients(self) -> list[Tensor]:
        """Return the parts of gradients that exist."""
        found = [x for flat in self.parameters for x in (flat.grad, vars(flat).get(_REDUCED))]
        return [x for x in found if x is not None]

    def reduces(self) -> bool:
        """Return whether a backward reduces the gradients."""
        return all(state._sync_gradients for state in self.states)

    def gathered(self) -> list[Tensor]:
        """Return what lies gathered now."""
        return [vars(flat)[name] for flat in self.parameters for name in _FREED if name in vars(flat)]

    def refusal(self) -> str | None:
        """Return what of this cannot be planned, with the way out."""
        plain = "call plan() before FullyShardedDataParallel(model)"
        if any(handle not in self.handles for state in self.states for handle in state._exec_order_data.all_handles):
            return "it is a part of a model that is sharded; pass the whole model"
        if any(isinstance(module, sys.modules["torch.distributed.fsdp"].FSDPModule) for module in self._modules):
            return f"fully_shard() has parts of it, too; {plain}"
        if any(handle._fsdp_extension is not None for handle in self.handles):
            return "it is parallelized in another way, too; call plan() before parallelize_module()"
        if any(handle._offload_params for handle in self.handles):
            return f"its weights are offloaded to the host; {plain}"
        if any(state._comm_hook is not None for state in self.states):
            return f"it reduces gradients in a way of its own; {plain}"
        if any(hasattr(p, "_in_backward_optimizers") for flat in self.parameters for p in _originals(flat)):
            return f"its optimizer steps in the backward; {plain}"
        if any(state.forward_prefetch and state._exec_order_data.is_first_iter for state in self.states):
            return "it gathers weights in the order of its first step; call plan() after that"
        return None

    def initialize(self) -> None:
        """Let FSDP find the root, as its first step does."""
        for state in self.states:
            private.fsdp1_lazy_init()(state, state)

    @contextlib.contextmanager
    def on_paper(self, mode: PaperMode) -> Iterator[list[Parameter]]:
        """Let all be as where a step begins, with shards on paper, which this yields."""
        shared = [x for state in self.states for x in (state._exec_order_data, state._free_event_queue)]
        parts = [module for handle in self.handles for module in handle._get_modules()]
        whole = [handle._fully_sharded_module for handle in self.handles]
        owners = {id(x): x for x in (*self.states, *self.handles, *shared, *parts, *whole)}
        kept = [KeptAttributes(x) for x in owners.values()]
        gradients = self._gradients_of_parameters()
        flats: list[Parameter] = []
        try:
            for each in (*self.states, *self.handles):
                _begin(each)
            for state in self.states:
                state._exec_order_data.handles_post_forward_order.clear()
                state._free_event_queue._queue.clear()
            for handle in self.handles:
                flats.append(_flat_on_paper(handle, mode))
            yield flats
        finally:
            for flat in flats:
                vars(flat).clear()  # it may hold tensors whose graphs hold it
            for attributes in kept:
                attributes.put_back()
            for p, gradient in gradients:
                _set_gradient(p, gradient)

    @contextlib.contextmanager
    def gradients_set_aside(self) -> Iterator[None]:
        """Take all gradients off for a ``with`` block, whose steps would add to them."""
        gradients = self._gradients_of_parameters()
        kept = [KeptAttributes(flat) for flat in self.parameters]
        for p, _ in gradients:
            p.grad = None
            vars(p).pop(_REDUCED, None)
        try:
            yield
        finally:
            for attributes in kept:
                attributes.put_back()
            for p, gradient in gradients:
                _set_gradient(p, gradient)

    def _gradients_of_parameters(self) -> list[tuple[Parameter, Tensor | None]]:
        return [(p, p.grad) for flat in self.parameters for p in (flat, *_originals(flat))]


def name_before(name: str) -> str:
    """Return the name that a module had before it was wrapped."""
    return ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")


def views_in(module: Module) -> list[Tensor]:
    """Return the tensors that it has in place of a module's parameters."""
    parts = [vars(part) for part in module.modules() if vars(part).get("_fsdp_use_orig_params") is False]
    return [x for part in parts for x in part.values() if isinstance(x, Tensor)]


def _originals(flat: Any) -> list[Parameter]:
    """Return the parameters that it is made of, if FSDP lets the user see them."""
    return [] if flat._params is None else [*flat._params, *flat._shared_params]


def _shard(flat: Any) -> Tensor:
    shard: Tensor = vars(flat).get("_local_shard", flat)
    return shard


def _begin(x: Any) -> None:
    attributes = vars(x)
    attributes.update((name, value) for name, value in _AT_START.items() if name in attributes)
    for name in ("training_state", "_training_state"):
        if name in attributes:
            attributes[name] = type(attributes[name]).IDLE
    for name in ("device", "compute_device"):
        if name in attributes:
            attributes[name] = torch.device("cpu")
    attributes["_device_handle"] = type(attributes["_device_handle"]).from_device(torch.device("cpu"))
    attributes.update((name, torch.cpu.current_stream()) for name in attributes if name.endswith("_stream"))


def _flat_on_paper(handle: Any, mode: PaperMode) -> Parameter:
    """Give a handle and its modules a flat parameter on paper, which is sharded."""
    old = handle.flat_param
    flat: Any = Parameter(mode.like(old._local_shard), requires_grad=old.requires_grad)
    vars(flat).update({name: copy.copy(x) if isinstance(x, list) else x for name, x in vars(old).items()})
    vars(flat).pop("_post_backward_hook_state", None)
    flat._local_shard = flat.data
    for name in _FREED:
        if name in vars(old):
            setattr(flat, name, mode.emptied(getattr(old, name)))
    if _REDUCED in vars(old):
        setattr(flat, _REDUCED, mode.like(getattr(old, _REDUCED)))
    handle.flat_param = flat
    _set_gradient(flat, None if old.grad is None else mode.like(old.grad))
    if old._params is None:
        handle._fully_sharded_module._parameters[FLAT] = flat
        return flat  # type: ignore[no-any-return]
    twins = {id(p): _twin(p) for p in _originals(old)}
    flat._params, flat._shared_params = ([twins[id(p)] for p in each] for each in (old._params, old._shared_params))
    flat._tensors = [None] * len(old._tensors)
    handle._use_sharded_views()
    if handle.uses_sharded_strategy and flat.grad is not None and flat.grad.size() != flat.size():
        handle._use_unsharded_grad_views()
    else:
        handle._use_sharded_grad_views()
    return flat  # type: ignore[no-any-return]


def _set_gradient(p: Parameter, gradient: Tensor | None) -> None:
    """Give a parameter a gradient, which may be whole, or in another dtype, while it is a shard."""
    if p.grad is gradient:
        return
    if gradient is not None and (gradient.shape, gradient.dtype) != (p.shape, p.dtype):
        data = p.data
        p.data = gradient.detach()
        p.grad = gradient
        p.data = data
    else:
        p.grad = gradient


def _twin(p: Parameter) -> Parameter:
    """Return another parameter with the same attributes and without values, for FSDP to fill."""
    twin = Parameter(torch.empty(0, dtype=p.dtype), requires_grad=p.requires_grad)
    vars(twin).update(vars(p))
    return twin
