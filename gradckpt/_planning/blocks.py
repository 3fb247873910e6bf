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

__all__ = ["Blocks", "find_blocks", "likeness", "regions_to_plan", "shortened", "unrolled", "whole"]

#: Attributes that only number a block.
_NUMBERS = {"layer_idx", "layer_id", "layer_number", "block_idx", "idx", "index"}

#: Of a run of equal blocks, those that a shorter model keeps before and after the one that stands
#: for others. Before it: by then a device holds as many originals as ever, which are two, and the
#: first block's input may be a leaf.
_BEFORE, _AFTER = 3, 2

#: The longest pattern of blocks that is looked for: five with a window and one without, say.
_PERIOD = 8


@dataclasses.dataclass
class Blocks:
    """``modules``: those to run. ``copies``: for each the numbers, in the whole model, of the
    blocks that it stands for, itself first. Blocks that repeat together have ranges with the same
    step, which is how many they are, and the same end.
    """

    modules: list[Module]
    copies: list[range]


def whole(blocks: list[Module]) -> Blocks:
    """Return the blocks of a model that is not shorter."""
    return Blocks(blocks, [range(i, i + 1) for i in range(len(blocks))])


def unrolled(segments: Sequence[Segment], copies: Sequence[range]) -> list[Segment]:
    """Return the segments of the whole step, in its order, of those of a shorter one: the blocks
    that stand for others run forward by their numbers, and backward from the last.
    """
    if all(len(each) == 1 for each in copies):
        return list(segments)

    def unit(place: tuple[int, Segment]) -> int | None:
        block = place[1].block
        return None if block is None or len(copies[block]) == 1 else copies[block].stop

    found: list[tuple[int, Segment]] = []
    for stop, cycle in itertools.groupby(enumerate(segments), unit):
        once = list(cycle)
        rounds = range(1 if stop is None else len(copies[once[0][1].block or 0]))
        for number in reversed(rounds) if once[0][1].phase == "backward" else rounds:
            for place, segment in once:
                block = None if segment.block is None else copies[segment.block][number]
                found.append((place, dataclasses.replace(segment, block=block)))
    return with_own_storages(segments, copies, found)


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
    """Take out of the model most blocks of each run that repeats, for a ``with`` block: of equal
    blocks, or of patterns of them.

    ``options``: what is done with each block; blocks with different options are not equal. Nor are
    those for which a list of the config has different values (``layer_types``).
    """
    number = {id(block): i for i, block in enumerate(blocks)}
    copies = dict(enumerate(whole(blocks).copies))
    with contextlib.ExitStack() as stack:
        for container, lists in _containers(model):
            children: list[Any] = list(container._modules.values())
            if len({*map(id, children)}) < len(children):
                continue  # one of them runs several times
            kinds: list[Any] = [
                (likeness(child), options and options[number[id(child)]], [values[i] for values in lists])
                if id(child) in number
                else None
                for i, child in enumerate(children)
            ]
            dropped: set[int] = set()
            standing: dict[int, range] = {}
            for run in _runs(kinds):
                period = run.step
                first = run.start + _whole(_BEFORE, period)
                times = (run.stop - _whole(_AFTER, period) - first) // period
                dropped.update(range(first + period, first + times * period))
                start = number[id(children[first])]
                for i in range(start, start + period):
                    standing[i] = range(i, start + times * period, period)
            left = [i for i in range(len(children)) if i not in dropped]
            if not dropped or any(values[i] != values[place] for values in lists for place, i in enumerate(left)):
                continue
            stack.callback(_put_back(container))
            container._modules = {str(place): children[i] for place, i in enumerate(left)}
            copies |= standing
            for i in dropped:
                del copies[number[id(children[i])]]
        yield Blocks([blocks[i] for i in copies], list(copies.values()))


def _containers(model: Module) -> Iterator[tuple[Module, list[Sequence[Any]]]]:
    """Return each list of modules, and the config's lists that have a value for each of them."""
    found: set[int] = set()
    for owner in model.modules():
        config = vars(getattr(owner, "config", None) or getattr(model, "config", None) or owner)
        for child in owner.children():
            if type(child) in (ModuleList, Sequential) and id(child) not in found:
                found.add(id(child))
                lists = [values for values in config.values() if isinstance(values, (list, tuple))]
                yield child, [values for values in lists if len(values) == len(child._modules)]


def _put_back(container: Module) -> Callable[[], None]:
    before = container._modules
    return lambda: setattr(container, "_modules", before)


def _whole(blocks: int, period: int) -> int:
    """Return the blocks of as many whole patterns as have so many."""
    return -(-blocks // period) * period


def _runs(kinds: Sequence[Any]) -> Iterator[range]:
    """Return the longest runs in which some kinds repeat often enough for one time to stand for
    others; the step is how many they are. None is no kind.
    """
    known: list[Any] = []
    numbers = []
    for kind in kinds:
        if kind not in known:
            known.append(kind)
        numbers.append(None if kind is None else known.index(kind))
    begin = 0
    while begin < len(numbers):
        best, saved = None, 1
        for period in range(1, _PERIOD + 1):
            pattern = numbers[begin : begin + period]
            end = begin + len(pattern)
            if None in pattern:
                break
            while end < len(numbers) and numbers[end] == numbers[end - period]:
                end += 1
            left_out = (end - begin - _whole(_BEFORE, period) - _whole(_AFTER, period)) // period * period - period
            if left_out > saved:
                best, saved = range(begin, end, period), left_out
        if best is None:
            begin += 1
        else:
            yield best
            begin = best.stop


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
