"""What one rank has of a model that FSDP has sharded; of any other model, what the model has."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence

from torch import Tensor
from torch.nn import Module

from gradckpt._models.kinds import inside_fsdp
from gradckpt._planning import fsdp1, fsdp2

__all__ = [
    "class_of",
    "gathered_bytes",
    "gradient_bytes",
    "gradient_bytes_of",
    "is_sharded",
    "local",
    "missing_gradient_bytes",
    "named_modules",
    "parameter_bytes",
    "parameters_before",
    "real_steps",
    "reduces",
    "refuse_shards",
    "state_of",
    "trained_parts",
    "weights_in",
]


def state_of(model: Module) -> fsdp1.State | fsdp2.State:
    """Return what FSDP knows of a model; a model that none has sharded has no parameters there."""
    first = fsdp1.State(model)
    return first if first.states else fsdp2.State(model)


def is_sharded(model: Module) -> bool:
    return bool(state_of(model).parameters)


def reduces(model: Module) -> bool:
    """Return whether a backward reduces the gradients of a sharded model now."""
    return state_of(model).reduces()


@contextlib.contextmanager
def real_steps(model: Module) -> Iterator[None]:
    """Let real steps in a ``with`` block leave FSDP's gradients and the beginning of its hooks."""
    state = state_of(model)
    state.initialize()
    with state.gradients_set_aside():
        yield


def weights_in(region: Module) -> list[Tensor]:
    """Return what a backward of a region that runs now gives gradients to, without its inputs."""
    return [x for x in (*region.parameters(), *fsdp1.views_in(region)) if x.requires_grad]


def class_of(module: Module) -> type[Module]:
    """Return the class that a module had before it was sharded."""
    kind = type(inside_fsdp(module))
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return kind.__mro__[2] if fsdp is not None and isinstance(module, fsdp.FSDPModule) else kind


def named_modules(model: Module) -> dict[str, Module]:
    """Return the modules of a model by the names that they had before it was sharded."""
    return {fsdp1.name_before(name): module for name, module in model.named_modules()}  # the innermost of a name


def parameters_before(model: Module) -> dict[int, dict[str, tuple[Hashable, tuple[int, ...]]]]:
    """Return what parameters the modules of a model had before it was sharded: for each module, by
    its id, and name, a key and the shape. One parameter in several places has one key.
    """

    def own(module: Module) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in module._parameters.items() if p is not None and name != fsdp1.FLAT]

    found: dict[int, dict[str, tuple[Hashable, tuple[int, ...]]]] = {
        id(module): {name: (id(p), tuple(p.shape)) for name, p in own(module)} for module in model.modules()
    }
    for module, name, key, shape in fsdp1.State(model).parameters_before():
        found[id(module)][name] = key, shape
    return found


def local(x: Tensor) -> Tensor:
    """Return what this rank has of a tensor."""
    return getattr(x, "_local_tensor", x)


def trained_parts(model: Module) -> dict[int, Tensor]:
    """Return what this rank has of each parameter, by the id of what an optimizer has."""
    state = state_of(model)
    gathered = state.registered()
    return {**{id(p): p for p in model.parameters() if id(p) not in gathered}, **state.trained()}


def parameter_bytes(model: Module) -> int:
    return sum(x.nbytes for x in trained_parts(model).values())


def gradient_bytes(model: Module) -> int:
    """Return the bytes of gradients that exist."""
    return gradient_bytes_of(model.parameters(), state_of(model))


def gradient_bytes_of(parameters: Iterable[Tensor], state: fsdp1.State | fsdp2.State) -> int:
    """Return the same, of the parameters that a model's modules have now; some more than once."""
    gathered = state.registered()
    others = {id(x): x for p in parameters if (x := p.grad) is not None and id(p) not in gathered}
    return sum([x.nbytes for x in others.values()]) + _storages(state.gradients())


def missing_gradient_bytes(model: Module) -> int:
    """Return the bytes of gradients that a step makes."""
    state = state_of(model)
    gathered = state.registered()
    others = [p for p in model.parameters() if id(p) not in gathered and p.requires_grad and p.grad is None]
    return sum(part.nbytes for part in [*others, *state.missing_gradients()])


def gathered_bytes(model: Module) -> int:
    """Return the bytes of weights that lie gathered now, as between a forward and its backward."""
    return _storages(state_of(model).gathered())


def _storages(tensors: Iterable[Tensor]) -> int:
    found = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in map(local, tensors)}
    return sum(found.values())


def refuse_shards(model: Module, blocks: Sequence[Module] = ()) -> None:
    """Refuse what cannot be planned of a model, or with these regions of it.

    Raises:
        ValueError: The message has the way out.
    """
    state = state_of(model)
    tensors = sys.modules.get("torch.distributed.tensor")
    known = state.registered()
    reason = state.refusal()
    of_others = (p for p in model.parameters() if tensors is not None and isinstance(p, tensors.DTensor))
    if reason is None and any(id(p) not in known for p in of_others):
        reason = "it has DTensors that fully_shard() did not make; call plan() before parallelize_module()"
    for block in blocks:
        if inside_fsdp(block) is not block:
            reason = f"a region is FullyShardedDataParallel; choose {class_of(block).__name__} in it with modules="
        elif any(state_of(part).states for part in block.children()):
            reason = f"parts of its {class_of(block).__name__} are sharded alone; choose these parts with modules="
    if reason is not None:
        raise ValueError(f"gradckpt: this sharded model cannot be planned: {reason}")
