"""The repeated blocks of a model, and a shorter model that has fewer of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import Module, ModuleList, Sequential

from gradckpt._models.switch import Handle, Modules
from gradckpt._planning.step_trace import Segment
from gradckpt._settings import EXACT

__all__ = ["Blocks", "find_blocks", "likeness", "shortened"]

#: Attributes that only number a block.
_NUMBERS = {"layer_idx", "layer_id", "layer_number", "block_idx", "idx", "index"}

#: Of a run of equal blocks, the first and the last ones that a shorter model keeps.
_ENDS = 2


@dataclasses.dataclass
class Blocks:
    """``modules``: those to run. ``numbers``: each one's number in the whole model. ``times``: how
    many blocks each stands for.
    """

    modules: list[Module]
    numbers: list[int]
    times: list[int]

    def repeat(self, segments: list[Segment]) -> None:
        """Let each segment count as often as the blocks that its own stands for."""
        for segment in segments:
            if segment.block is not None:
                segment.times = self.times[segment.block]
                segment.block = self.numbers[segment.block]


def find_blocks(model: Module, modules: Modules = None) -> list[Module]:
    """Return the modules that ``gradckpt.enable`` would checkpoint, in the model's order.

    Raises:
        ValueError, TypeError: As :func:`gradckpt.enable`.
    """
    with EXACT.active(model, modules):
        names = set(Handle(model).modules)
    return [module for name, module in model.named_modules() if name in names]


@contextlib.contextmanager
def shortened(model: Module, blocks: list[Module]) -> Iterator[Blocks]:
    """Take out of the model most blocks of each run of equal ones, for a ``with`` block.

    A model whose blocks differ in what its config lists for each (``layer_types``) stays whole.
    """
    whole = Blocks(blocks, list(range(len(blocks))), [1] * len(blocks))
    types = getattr(getattr(model, "config", None), "layer_types", None)
    if types is not None and len(set(types)) > 1:
        yield whole
        return
    number = {id(block): i for i, block in enumerate(blocks)}
    dropped: dict[int, int] = {}  # number of a block that is left out: of the one that stands for it
    with contextlib.ExitStack() as stack:
        for container in [m for m in model.modules() if type(m) in (ModuleList, Sequential)]:
            children = list(container._modules.values())
            runs = [run for run in _runs(children, number) if len(run) > 2 * _ENDS + 1]
            for run in runs:
                middle = run[_ENDS:-_ENDS]
                dropped.update({number[id(block)]: number[id(run[_ENDS - 1])] for block in middle})
            if runs:
                stack.callback(_put_back(container))
                left = [child for child in children if number.get(id(child), -1) not in dropped]
                container._modules = {str(i): child for i, child in enumerate(left)}
        numbers = [i for i in whole.numbers if i not in dropped]
        yield Blocks(
            [blocks[i] for i in numbers], numbers, [1 + sum(by == i for by in dropped.values()) for i in numbers]
        )


def _put_back(container: Module) -> Callable[[], None]:
    before = container._modules
    return lambda: setattr(container, "_modules", before)


def _runs(children: list[Any], number: dict[int, int]) -> list[list[Module]]:
    """Return the longest runs of equal blocks among the children."""
    runs: list[list[Module]] = []
    last = None
    for child in children:
        this = likeness(child) if id(child) in number else None
        if this is None or this != last:
            runs.append([])
        if this is not None:
            runs[-1].append(child)
        last = this
    return runs


def likeness(block: Module) -> list[Any]:
    """Return what two blocks have in common that need the same memory."""
    return [
        (
            name,
            type(module),
            module.training,
            [(key, x if x is None else (x.shape, x.dtype, x.requires_grad)) for key, x in _tensors(module)],
            {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, (bool, int, float, str, type(None))) and key not in _NUMBERS
            },
        )
        for name, module in block.named_modules()
    ]


def _tensors(module: Module) -> list[tuple[str, Any]]:
    return [*module._parameters.items(), *module._buffers.items()]
