"""Models that FSDP has sharded: what a rank has of them, and their simulated step.

In it FSDP's own forwards, hooks and handles run, from where a step begins, and collectives move
nothing. In ``FullyShardedDataParallel`` (FSDP1, :class:`FSDP1State`) each handle has another flat
parameter then, with the attributes of its own; with ``fully_shard`` (FSDP2, :class:`FSDP2State`)
each parameter has another shard.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import sys
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from gradckpt._engine import torch_private as private
from gradckpt._planning.simulation import SimulationMode

_LISTS = (list, collections.deque)


class KeptAttributes:
    """The attributes of an object, and what is in its containers, to be put back."""

    def __init__(self, owner: Any) -> None:
        self._owner, self._attributes = owner, dict(vars(owner))
        self._contents = [(x, copy.copy(x)) for x in vars(owner).values() if isinstance(x, (*_LISTS, dict, set))]

    def put_back(self) -> None:
        vars(self._owner).clear()
        vars(self._owner).update(self._attributes)
        for container, content in self._contents:
            container.clear()
            (container.extend if isinstance(container, _LISTS) else container.update)(content)


#: The name of a flat parameter in the module that has it.
FLAT = "_flat_param"

#: The attributes of modules and handles where a step begins.
_FSDP1_START: dict[str, Any] = {
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


class FSDP1State:
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
    def simulated(self, mode: SimulationMode) -> Iterator[list[Parameter]]:
        """Let all be as where a step begins, with simulated shards, which this yields."""
        shared = [x for state in self.states for x in (state._exec_order_data, state._free_event_queue)]
        parts = [module for handle in self.handles for module in handle._get_modules()]
        whole = [handle._fully_sharded_module for handle in self.handles]
        owners = {id(x): x for x in (*self.states, *self.handles, *shared, *parts, *whole)}
        kept = [KeptAttributes(x) for x in owners.values()]
        gradients = self._gradients_of_parameters()
        flats: list[Parameter] = []
        try:
            for each in (*self.states, *self.handles):
                _begin_fsdp1(each)
            for state in self.states:
                state._exec_order_data.handles_post_forward_order.clear()
                state._free_event_queue._queue.clear()
            for handle in self.handles:
                flats.append(_simulated_flat(handle, mode))
            yield flats
        finally:
            for flat in flats:
                vars(flat).clear()  # it may hold tensors whose graphs hold it
            for attributes in kept:
                attributes.put_back()
            for p, gradient in gradients:
                _set_flat_gradient(p, gradient)

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
                _set_flat_gradient(p, gradient)

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


def _begin_fsdp1(x: Any) -> None:
    attributes = vars(x)
    attributes.update((name, value) for name, value in _FSDP1_START.items() if name in attributes)
    for name in ("training_state", "_training_state"):
        if name in attributes:
            attributes[name] = type(attributes[name]).IDLE
    for name in ("device", "compute_device"):
        if name in attributes:
            attributes[name] = torch.device("cpu")
    attributes["_device_handle"] = type(attributes["_device_handle"]).from_device(torch.device("cpu"))
    attributes.update((name, torch.cpu.current_stream()) for name in attributes if name.endswith("_stream"))


def _simulated_flat(handle: Any, mode: SimulationMode) -> Parameter:
    """Give a handle and its modules a simulated flat parameter, which is sharded."""
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
    _set_flat_gradient(flat, None if old.grad is None else mode.like(old.grad))
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


def _set_flat_gradient(p: Parameter, gradient: Tensor | None) -> None:
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


#: Where a gradient in the dtype of reductions waits for one, before torch 2.15; since, in the whole
#: parameter's ``grad``.
_ACCUMULATED = "unsharded_accumulated_grad"

#: The attributes of states, groups and their contexts where a step begins; containers are empty.
_FSDP2_START: dict[str, Any] = {
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


class FSDP2State:
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
    def simulated(self, mode: SimulationMode) -> Iterator[list[Parameter]]:
        """Let all be as where a step begins, with simulated shards, which this yields.

        The caller puts back the modules' parameters.
        """
        stepping = [*self.states, *self.groups, *self._contexts()]
        kept = [KeptAttributes(x) for x in (*stepping, *self.parameters)]
        try:
            for each in stepping:
                _begin_fsdp2(each)
            for group in self.groups:
                partial = group._partial_reduce_output
                group._partial_reduce_output = None if partial is None else mode.like(partial)
            yield [_simulated_shard(p, mode) for p in self.parameters]
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


def _begin_fsdp2(x: Any) -> None:
    attributes = vars(x)
    for name, value in _FSDP2_START.items():
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


def _simulated_shard(p: Any, mode: SimulationMode) -> Parameter:
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
