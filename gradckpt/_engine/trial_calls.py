"""What a call on trial did beside returning its result, to undo it or to find it: how far random
generators went, what was written into containers, which tensors are left, and the graph behind."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from gradckpt import _C
from gradckpt._engine import torch_private as private
from gradckpt._engine.discrete import FORMS

# ---- generators ----


def is_capturing(module: Any) -> bool:
    """Return whether a graph is captured of what a device module's current stream does."""
    capturing = getattr(module, "is_current_stream_capturing", None)
    return capturing is not None and capturing()


def _device_generators() -> tuple[Any, ...]:
    """Return the generators of the devices in use; none while a graph is captured, which advances
    its generators when it is replayed.
    """
    accelerator = torch.accelerator.current_accelerator()
    module = getattr(torch, accelerator.type, None) if accelerator is not None else None
    if module is None or not getattr(module, "_initialized", False):
        return ()
    return () if is_capturing(module) else tuple(getattr(module, "default_generators", ()))


def generator_states() -> tuple[torch.Tensor, list[tuple[torch.Generator, torch.Tensor]]]:
    """Return the state of each default generator."""
    return _C.cpu_rng_state(), [(g, g.get_state()) for g in _device_generators()]


def restore_generators(states: tuple[torch.Tensor, list[tuple[torch.Generator, torch.Tensor]]]) -> None:
    cpu, devices = states
    _C.set_cpu_rng_state(cpu)
    for generator, state in devices:
        generator.set_state(state)


# ---- policies ----


@contextlib.contextmanager
def without_policies() -> Iterator[None]:
    """Let policies of the region not look inside: its recompute does not come there."""
    _C.hide_operators(1)
    try:
        yield
    finally:
        _C.hide_operators(-1)


# ---- containers ----


def holds_still(tree: Any, leaves: Sequence[Any], spec: Any) -> bool:
    """Return whether containers have the leaves and the structure that they had: a call has not
    written into them.
    """
    now, structure = private.tree_flatten(tree)
    return structure == spec and len(now) == len(leaves) and all(a is b for a, b in zip(now, leaves, strict=True))


# ---- tensors ----


class MadeTensors(private.TorchDispatchMode):  # type: ignore[misc]
    """Note the tensors that operators make, and operators that choose."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[Any] = []
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FORMS:
            self.choices.append(func)
        result = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(x) for x in private.tree_leaves(result) if isinstance(x, torch.Tensor)]
        return result

    def are_left(
        self, *known: torch.Tensor, of: Callable[[torch.Tensor], bool] = torch.Tensor.is_floating_point
    ) -> bool:
        """Return whether such a tensor is still there that shares no memory with a known one: an
        auxiliary loss, what a hook collects, what a module hands to another one.
        """
        memory = {x.untyped_storage()._cdata for x in known}

        def is_there() -> bool:
            alive = (x for each in self.made if (x := each()) is not None and of(x))
            return any(x.untyped_storage()._cdata not in memory for x in alive)

        if not is_there():
            return False
        gc.collect()
        return is_there()


# ---- the graph ----


def leaves_behind(roots: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the leaves that the gradients of these tensors flow to."""
    for node in graph_behind(roots):
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable


def reaches_before(roots: Iterable[torch.Tensor], number: int) -> bool:
    """Return whether gradients flow to nodes that were made before the one of this number."""
    return any(node._sequence_nr() < number for node in graph_behind(roots))


def graph_behind(roots: Iterable[torch.Tensor], since: int = 0) -> Iterator[Any]:
    """Yield the nodes that gradients of these tensors flow to, and that were made no earlier than
    the one of the number ``since``.
    """
    seen: set[Any] = set()
    nodes = [x.grad_fn for x in roots if x.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        yield node
        nodes += [each for each, _ in node.next_functions if each is not None]
