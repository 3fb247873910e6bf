"""Budgets of a device's memory, and what counts in them before a step: :class:`Budget`,
:func:`fixed_bytes`, :func:`other_tensors`.

A model that FSDP has sharded counts with what this rank has of it; any other with all that it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from gradckpt._compression import written
from gradckpt._models.kinds import inside_fsdp
from gradckpt._offload import free_host_memory, parse_bytes, total_host_memory
from gradckpt._planning.fsdp import FLAT, FSDP1State, FSDP2State, name_before, views_in

_ACTIVATIONS = "activations:"
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_NUMBER = re.compile(r"\d+\.\d*|\.\d+|1")

#: What a budget may be, as messages list it.
_FORMS = '"60GiB", "60GB", "90%", "activations:6GiB" or a number of bytes'


@dataclasses.dataclass(frozen=True)
class Budget:
    """``size``: bytes of tensors on the device in a step: all of them, or with ``step_only`` those
    that the step adds. ``text``: as it was written.
    """

    size: int
    step_only: bool
    text: str


def parse_budget(budget: Any, device: torch.device) -> Budget:
    """Return the budget that a value means on a device, as :func:`size_budget`; ``None``: what is
    free now, and what tensors use. ``"90%"`` on the CPU: of what the control group leaves.
    """
    if budget is None:
        return Budget(free_memory(device) + _allocated(device), False, "what is free now")
    return size_budget(budget, lambda: _total(device))


def size_budget(budget: Any, total: Callable[[], int]) -> Budget:
    """Return the budget that a value means; ``total`` returns the bytes of the device.

    ``"60GiB"``, ``"60GB"`` or a number of bytes: the largest sum of tensor bytes that are allocated
    on the device. ``"activations:6GiB"``: what the step adds. ``"90%"``: of the device's memory.

    Raises:
        ValueError: It is no size, or a fraction.
    """
    given = f"budget={written(budget)}"
    fraction = _fraction(budget)
    if fraction is not None and 0 < fraction <= 1:
        raise ValueError(
            f'gradckpt: {given} is a fraction, and of what is unknown; write "{fraction:.0%}" for a part of '
            "the device's memory, or a size as in 60GiB"
        )
    if isinstance(budget, str):
        text = budget.strip()
        if text.lower().startswith(_ACTIVATIONS):
            return Budget(parse_bytes(text[len(_ACTIVATIONS) :], given, _FORMS), True, text)
        if (percent := _PERCENT.fullmatch(text)) is not None:
            share = float(percent[1])
            if not 0 < share <= 100:
                raise ValueError(f"gradckpt: {given} is no part of a device; write 1% to 100%")
            return Budget(int(total() * share / 100), False, text)
        if not text.isdecimal():
            return Budget(parse_bytes(text, given, _FORMS), False, text)
    size = parse_bytes(budget, given, _FORMS)
    return Budget(size, False, f"{size:,} bytes")


def _fraction(budget: Any) -> float | None:
    """Return the number that a value is or is written as, without a unit; None if it is none."""
    if isinstance(budget, str):
        return float(budget) if _NUMBER.fullmatch(budget.strip()) else None
    return budget if isinstance(budget, (int, float)) and not isinstance(budget, bool) else None


def parse_error(error: float | str) -> float:
    """Return the relative error that ``"1%"`` or 0.01 means.

    Raises:
        ValueError: It is neither, or not between 0 and 1.
    """
    parsed: float | None = None
    if isinstance(error, str) and (match := _PERCENT.fullmatch(error.strip())) is not None:
        parsed = float(match[1]) / 100
    elif isinstance(error, (int, float)) and not isinstance(error, bool):
        parsed = float(error)
    if parsed is None or not 0 < parsed < 1:
        raise ValueError(f'gradckpt: error={error!r} is no relative error; write "1%" or 0.01')
    return parsed


def refuse_compiled(model: Module) -> None:
    """Refuse what ``torch.compile`` has returned, or a call that it traces.

    Raises:
        ValueError: It is one.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if torch.compiler.is_compiling() or (dynamo is not None and isinstance(model, dynamo.OptimizedModule)):
        raise ValueError(
            "gradckpt: a budget cannot be planned in torch.compile; call gradckpt.plan(model, batch, budget=...), "
            "plan.apply(model), and compile then"
        )


def device_of(model: Module) -> torch.device:
    """Return the device of a model's parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def free_memory(device: torch.device) -> int:
    """Return the bytes that new tensors can have on a device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return free_host_memory()


def _total(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return total_host_memory()


def _allocated(device: torch.device) -> int:
    """Return the bytes of tensors on a device; on the host, of all storages that Python knows."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    found = {}  # by address
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu" and not each.is_sparse:
            with contextlib.suppress(Exception):  # a tensor without a storage
                storage = each.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def other_tensors(device: torch.device, known: int) -> int:
    """Return the bytes of tensors on the device beside ``known`` ones: of a second model, say.

    Tensors that nothing uses any more do not count.
    """
    gc.collect()
    return max(_allocated(device) - known, 0)


def state_of(model: Module) -> FSDP1State | FSDP2State:
    """Return what FSDP knows of a model; a model that none has sharded has no parameters there."""
    first = FSDP1State(model)
    return first if first.states else FSDP2State(model)


def is_sharded(model: Module) -> bool:
    return bool(state_of(model).parameters)


@contextlib.contextmanager
def real_steps(model: Module) -> Iterator[None]:
    """Let real steps in a ``with`` block leave FSDP's gradients and the beginning of its hooks."""
    state = state_of(model)
    state.initialize()
    with state.gradients_set_aside():
        yield


def weights_in(region: Module) -> list[Tensor]:
    """Return what a backward of a region that runs now gives gradients to, without its inputs."""
    return [x for x in (*region.parameters(), *views_in(region)) if x.requires_grad]


def class_of(module: Module) -> type[Module]:
    """Return the class that a module had before it was sharded."""
    kind = type(inside_fsdp(module))
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return kind.__mro__[2] if fsdp is not None and isinstance(module, fsdp.FSDPModule) else kind


def named_modules(model: Module) -> dict[str, Module]:
    """Return the modules of a model by the names that they had before it was sharded."""
    return {name_before(name): module for name, module in model.named_modules()}  # the innermost of a name


def parameters_before(model: Module) -> dict[int, dict[str, tuple[Hashable, tuple[int, ...]]]]:
    """Return what parameters the modules of a model had before it was sharded: for each module, by
    its id, and name, a key and the shape. One parameter in several places has one key.
    """

    def own(module: Module) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in module._parameters.items() if p is not None and name != FLAT]

    found: dict[int, dict[str, tuple[Hashable, tuple[int, ...]]]] = {
        id(module): {name: (id(p), tuple(p.shape)) for name, p in own(module)} for module in model.modules()
    }
    for module, name, key, shape in FSDP1State(model).parameters_before():
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


def fixed_bytes(model: Module) -> dict[str, int]:
    """Return the bytes that this rank has of a model before the step, by name."""
    tensors = [*trained_parts(model).values(), *model.buffers()]
    gradients = gradient_bytes(model.parameters(), state_of(model))
    return {"parameters and buffers": sum(x.nbytes for x in tensors), "gradients": gradients}


def gradient_bytes(parameters: Iterable[Tensor], state: FSDP1State | FSDP2State) -> int:
    """Return the bytes of gradients that exist, of the parameters that a model's modules have now;
    some more than once.
    """
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


class Found(NamedTuple):
    """``parameters``: of each the size, or 1 in FSDP1, which gathers it at times, and whether it is
    trained. ``gradients``: bytes of those that exist. ``reduces``: whether a backward reduces the
    gradients of a sharded model. ``changes``: how often modules were others.
    """

    parameters: list[tuple[int, bool]]
    gradients: int
    reduces: bool
    changes: int


class ParameterWalk:
    """Reads a model's parameters. Its modules are remembered until one has other children or, as
    when it is sharded, another class; what modules have of parameters is read each time.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[Module]] = []  # so that parts that are replaced are freed
        self._tree: Any = None
        self._state: Any = None
        self._changes = 0

    def read(self, model: Module) -> Found:
        modules: list[Any] = [module() for module in self._modules]
        if modules[:1] != [model] or None in modules or _tree_of(modules) != self._tree:
            modules = list(model.modules())
            self._modules = list(map(weakref.ref, modules))
            self._tree, self._state = _tree_of(modules), state_of(model)
            self._changes += 1
        elif isinstance(self._state, FSDP1State):
            self._state = state_of(model)  # which drops gradients that zero_grad() cannot reach
        registered = [p for module in modules for p in module._parameters.values() if p is not None]
        parameters = dict(zip(map(id, registered), registered, strict=True)).values()  # tied ones once
        size: Callable[[Tensor], int] = attrgetter("nbytes")
        if isinstance(self._state, FSDP1State):
            size = _one
        elif self._state.parameters:  # gathered ones may have another dtype
            size = Tensor.numel
        return Found(
            [(size(p), p.requires_grad) for p in parameters],
            gradient_bytes(parameters, self._state),
            self._state.reduces(),
            self._changes,
        )


def _one(_: Tensor) -> int:
    return 1


def _tree_of(modules: Sequence[Module]) -> tuple[list[int], list[type]]:
    """Return the ids of all children, and the class of each module."""
    children = [id(x) for module in modules if (table := module._modules) for x in table.values()]
    return children, list(map(type, modules))
