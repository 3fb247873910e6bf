"""What one rank has of a model that FSDP has sharded; of any other model, what the model has."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn import Module

from gradckpt._planning.fsdp2 import State

__all__ = [
    "class_of",
    "gathered_bytes",
    "gradient_bytes",
    "gradient_bytes_of",
    "is_sharded",
    "local",
    "missing_gradient_bytes",
    "parameter_bytes",
    "reduces",
    "refuse_shards",
    "trained_parts",
]


def is_sharded(model: Module) -> bool:
    return bool(State(model).parameters)


def reduces(model: Module) -> bool:
    """Return whether a backward reduces the gradients of a sharded model now."""
    return State(model).reduces()


def class_of(module: Module) -> type[Module]:
    """Return the class that a module had before it was sharded."""
    kind = type(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return kind.__mro__[2] if fsdp is not None and isinstance(module, fsdp.FSDPModule) else kind


def local(x: Tensor) -> Tensor:
    """Return what this rank has of a tensor."""
    return getattr(x, "_local_tensor", x)


def trained_parts(model: Module) -> dict[int, Tensor]:
    """Return what this rank has of each parameter, by the id of what an optimizer has."""
    state = State(model)
    gathered = state.registered()
    return {**{id(p): p for p in model.parameters() if id(p) not in gathered}, **state.trained()}


def parameter_bytes(model: Module) -> int:
    return sum(x.nbytes for x in trained_parts(model).values())


def gradient_bytes(model: Module) -> int:
    """Return the bytes of gradients that exist."""
    return gradient_bytes_of(model.parameters(), State(model))


def gradient_bytes_of(parameters: Iterable[Tensor], state: State) -> int:
    """Return the same, of the parameters that a model's modules have now; some more than once."""
    gathered = state.registered()
    others = {id(x): x for p in parameters if (x := p.grad) is not None and id(p) not in gathered}
    return sum([x.nbytes for x in others.values()]) + _storages(state.gradients())


def missing_gradient_bytes(model: Module) -> int:
    """Return the bytes of gradients that a step makes."""
    state = State(model)
    gathered = state.registered()
    parts = [(p, p) for p in model.parameters() if id(p) not in gathered]
    parts += [(p.sharded_param, p._sharded_param_data) for p in state.parameters]
    return sum(part.nbytes for p, part in parts if p.requires_grad and p.grad is None)


def gathered_bytes(model: Module) -> int:
    """Return the bytes of weights that lie gathered now, as between a forward and its backward."""
    return _storages(State(model).gathered())


def _storages(tensors: Iterable[Tensor]) -> int:
    found = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in map(local, tensors)}
    return sum(found.values())


def refuse_shards(model: Module, blocks: Sequence[Module] = ()) -> None:
    """Refuse what cannot be planned of a model, or with these regions of it.

    Raises:
        ValueError: The message has the way out.
    """
    state = State(model)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    tensors = sys.modules.get("torch.distributed.tensor")
    known = state.registered()
    reason = state.refusal()
    if fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        reason = "FullyShardedDataParallel has it; call plan() before that, or use fully_shard(model)"
    elif tensors is not None and any(isinstance(p, tensors.DTensor) and id(p) not in known for p in model.parameters()):
        reason = "it has DTensors that fully_shard() did not make; call plan() before parallelize_module()"
    for block in blocks:
        if any(State(part).states for part in block.children()):
            reason = f"parts of its {class_of(block).__name__} are sharded alone; choose these parts with modules="
    if reason is not None:
        raise ValueError(f"gradckpt: this sharded model cannot be planned: {reason}")
