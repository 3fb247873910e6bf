"""The repeated blocks of a model, and a shorter model that has fewer of them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from torch.nn import Module, ModuleList, Sequential

from gradckpt._models.switch import Handle, Modules, snapshot, take_off
from gradckpt._planning.needed_memory import with_own_storages
from gradckpt._planning.step_trace import Segment
from gradckpt._settings import EXACT

__all__ = ["Blocks", "find_blocks", "likeness", "regions_to_plan", "shortened", "unrolled"]

#: Attributes that only number a block.
_NUMBERS = {"layer_idx", "layer_id", "layer_number", "block_idx", "idx", "index"}

#: Of a run of equal blocks, the first and the last ones that a shorter model keeps. The fourth
#: stands for others: by then a device holds as many originals as ever, which are two, and the
#: first block's input may be a leaf.
_FIRST, _LAST = 4, 2


@dataclasses.dataclass
class Blocks:
    """``modules``: those to run. ``numbers``: each one's number in the whole model. ``times``: how
    many blocks each stands for, itself and those that follow it.
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


def unrolled(segments: Sequence[Segment]) -> list[Segment]:
    """Return one segment for each that counts several times, in the order of the step: the blocks
    that it stands for run forward by their numbers, and backward from the last.
    """
    found: list[tuple[int, Segment]] = []
    places = enumerate(segments)
    for (block, times), cycle in itertools.groupby(places, lambda each: (each[1].block, each[1].times)):
        if block is None or times == 1:
            found += cycle
            continue
        repeated = list(cycle)
        blocks = range(block, block + times)
        for number in reversed(blocks) if repeated[0][1].phase == "backward" else blocks:
            found += [(i, dataclasses.replace(segment, block=number, times=1)) for i, segment in repeated]
    return with_own_storages(segments, found)


def find_blocks(model: Module, modules: Modules = None) -> list[Module]:
    """Return the modules that ``gradckpt.enable`` would checkpoint, in the model's order.

    Raises:
        ValueError, TypeError: As :func:`gradckpt.enable`.
    """
    with EXACT.active(model, modules):
        names = set(Handle(model).modules)
    return [module for name, module in model.named_modules() if name in names]


def regions_to_plan(model: Module, modules: Modules = None) -> list[Module]:
    """Return the same of a model in which nothing is enabled, whatever is enabled now."""
    put_back = snapshot(model)
    take_off(model)
    try:
        return find_blocks(model, modules)
    finally:
        put_back()


@contextlib.contextmanager
def shortened(model: Module, blocks: list[Module], options: Sequence[Hashable] | None = None) -> Iterator[Blocks]:
    """Take out of the model most blocks of each run of equal ones, for a ``with`` block.

    ``options``: what is done with each block; blocks with different options are not equal. A model
    whose blocks differ in what its config lists for each (``layer_types``) stays whole.
    """
    whole = Blocks(blocks, list(range(len(blocks))), [1] * len(blocks))
    types = getattr(getattr(model, "config", None), "layer_types", None)
    if types is not None and len(set(types)) > 1:
        yield whole
        return
    number = {id(block): i for i, block in enumerate(blocks)}
    option = {id(block): option for block, option in zip(blocks, options or [None] * len(blocks), strict=True)}
    dropped: dict[int, int] = {}  # number of a block that is left out: of the one that stands for it
    with contextlib.ExitStack() as stack:
        for container in [m for m in model.modules() if type(m) in (ModuleList, Sequential)]:
            children = list(container._modules.values())
            runs = [run for run in _runs(children, option) if len(run) > _FIRST + _LAST + 1]
            for run in runs:
                middle = run[_FIRST:-_LAST]
                dropped.update({number[id(block)]: number[id(run[_FIRST - 1])] for block in middle})
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


def _runs(children: list[Any], options: dict[int, Hashable]) -> list[list[Module]]:
    """Return the longest runs of equal blocks among the children, of which ``options`` has the
    blocks.
    """
    runs: list[list[Module]] = []
    last = None
    for child in children:
        kind = (likeness(child), options[id(child)]) if id(child) in options else None
        if kind is None or kind != last:
            runs.append([])
        if kind is not None:
            runs[-1].append(child)
        last = kind
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
