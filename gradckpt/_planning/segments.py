"""The memory of a step, segment by segment: :class:`StepTrace`, and what torch's caching allocator
for CUDA needs of a device for it: :func:`memory_use`.

The allocator's rules are in csrc/planner/caching_allocator.h. What is there during the whole step
was allocated before it, tensor by tensor as far as tensors are known.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.nn import Module

from gradckpt import _C
from gradckpt._planning.device_memory import local
from gradckpt._planning.simulation import Work

#: Metadata of fields whose numbers may be negative, and of errors, which may be infinite or NaN.
SIGNED, UNBOUNDED = {"signed": True}, {"unbounded": True}

#: What an allocation is for; the first two by when it was made.
KEPT, LOSS, GRADIENTS, WORKING = range(4)
KINDS = ("kept for the backward", "logits and loss", "gradients", "working set")


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """``size`` bytes above the start of the step, at ``position``; ``parts``: bytes by kind."""

    size: int
    position: str
    parts: dict[str, int] = dataclasses.field(metadata=SIGNED)


@dataclasses.dataclass(slots=True)
class Segment:
    """A stretch of the step: ``phase`` of ``block``. ``events``: (bytes, kind). ``payload_bytes``:
    codecs read and write them for what they encode here. ``placed_bytes``: of payloads that get a
    place here, and ``largest`` of one. ``changes``: on a device the allocations and releases
    themselves, as :func:`gradckpt._planning.needed_memory.pairs` reads them.
    """

    phase: str
    block: int | None
    events: list[tuple[int, int]]
    work: list[Work]
    payload_bytes: int = 0
    placed_bytes: int = 0
    largest: int = 0
    changes: array.array[int] = dataclasses.field(default_factory=lambda: array.array("q"))

    @property
    def name(self) -> str:
        return self.phase if self.block is None else f"{self.phase} of layer {self.block}"


def scaled(segments: Sequence[Segment], gradients: float) -> list[Segment]:
    """Return the segments with gradients of other sizes: ``gradients`` of their bytes stay."""
    if gradients == 1:
        return list(segments)
    return [resized(each, lambda size, kind: size * gradients if kind == GRADIENTS else size) for each in segments]


def resized(segment: Segment, size_of: Callable[[int, int], float]) -> Segment:
    """Return a segment, which is not condensed, with other bytes for each size and kind."""
    events = [(round(size_of(size, kind)), kind) for size, kind in segment.events]
    changes = segment.changes[:]
    changes[::2] = array.array("q", [size for size, _ in events] if changes else [])
    return dataclasses.replace(segment, events=events, changes=changes)


def condensed(trace: StepTrace) -> StepTrace:
    """Return a trace with the same peaks, a few events and the sum of the work in each segment."""
    segments = [
        dataclasses.replace(each, events=_condensed(each.events), work=[total(each.work)]) for each in trace.segments
    ]
    return dataclasses.replace(trace, segments=segments)


def total(work: Sequence[Work]) -> Work:
    """Return the sum of what operators compute and move."""
    return Work(sum(each.flop for each in work), sum(each.bytes for each in work))


def _condensed(events: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sums of all events up to the highest point by kind, and of those after it."""
    sizes = list(itertools.accumulate(size for size, _ in events))
    end = sizes.index(max(sizes)) + 1 if max(sizes, default=0) > 0 else 0
    found = []
    for part in (events[:end], events[end:]):
        sums = dict.fromkeys(range(len(KINDS)), 0)
        for size, kind in part:
            sums[kind] += size
        found += sorted((size, kind) for kind, size in sums.items() if size)  # releases first
    return found


def _rise(segment: Segment) -> tuple[list[int], list[int]]:
    """Return a segment's net and how far it rises above its start, by kind."""
    net, top = [0] * len(KINDS), [0] * len(KINDS)
    total = highest = 0
    for size, kind in segment.events:
        net[kind] += size
        total += size
        if total > highest:
            highest, top = total, list(net)
    return net, top


@dataclasses.dataclass(slots=True)
class StepTrace:
    """One step. ``data_dependent``: sizes depended on which experts tokens choose. ``operators``:
    those that ran. ``lift``: what the allocator needs beyond the peak; None: it was not asked yet.
    ``ring``: bytes that a place takes of what the budget counts, and ``placed`` those of the
    payloads in it. ``inputs``: what the first call of each block got, in words. ``remark``: a
    sentence of the step about what it assumes, or "".
    """

    segments: list[Segment]
    data_dependent: bool
    operators: int = 0
    lift: int | None = None
    ring: int = 0
    placed: int = 0
    inputs: dict[int, str] = dataclasses.field(default_factory=dict)
    remark: str = ""

    def peaks(self) -> list[Peak]:
        """Return the peak of each segment, in order."""
        alive = [0] * len(KINDS)
        found = []
        for segment in self.segments:
            net, top = _rise(segment)
            parts = dict(zip(KINDS, alive, strict=True))
            for kind, size in zip(KINDS, top, strict=True):  # what it adds, except gradients, is its working set
                parts[kind if kind == KINDS[GRADIENTS] else KINDS[WORKING]] += size
            found.append(Peak(sum(alive) + sum(top), segment.name, parts))
            alive = [x + d for x, d in zip(alive, net, strict=True)]
        return found

    def peak(self) -> Peak:
        """Return the highest peak, the first of equal ones."""
        return max(self.peaks(), key=lambda peak: peak.size)


def pairs(changes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the allocations (bytes, storage) and releases (-bytes, storage) of a segment."""
    return zip(changes[::2], changes[1::2], strict=True)


def memory_use(segments: Iterable[Segment], held: Iterable[int] = ()) -> Any:
    """Return what a step needs after ``held`` blocks of these bytes; :func:`gradckpt._C.memory_use`
    describes it. Each segment counts once.
    """
    rows = array.array("q")
    names: dict[Hashable, list[int]] = {}
    count = 0

    def allocate(size: int) -> int:
        nonlocal count
        rows.extend((size, count))
        count += 1
        return count - 1

    for size in held:
        if size:
            allocate(size)
    for segment in segments:
        for size, storage in pairs(segment.changes):
            key: Hashable = storage if storage >= 0 else ("scratch", abs(size))
            if size > 0:
                names.setdefault(key, []).append(allocate(size))
            elif size and (known := names.get(key)):  # else it was there before the step
                rows.extend((0, known.pop()))
    return _C.memory_use(rows)


def held_blocks(model: Module, fixed: Mapping[str, int]) -> list[int]:
    """Return the bytes of what is there during the whole step, block by block.

    ``fixed``: bytes by name. An entry that is as large as the model's tensors, or a multiple of the
    trained ones (gradients, states of an optimizer), has their blocks; others are one block.
    """
    parameters = list(model.parameters())
    weights = [local(p).nbytes for p in parameters]
    trained = [local(p).nbytes for p in parameters if p.requires_grad]
    whole = [*weights, *(x.nbytes for x in model.buffers())]
    found: list[int] = []
    for size in fixed.values():
        kinds = [each for each in (whole, weights, trained) if sum(each) and size and size % sum(each) == 0]
        found += kinds[0] * (size // sum(kinds[0])) if kinds else [size]
    return found


# ---- segments that count several times


def with_own_storages(
    segments: Sequence[Segment], copies: Sequence[range], unrolled: Sequence[tuple[int, Segment]]
) -> list[Segment]:
    """Return the segments of a whole step, each with storages of its own.

    ``segments``: of a shorter step, in which a block stands for the ``copies`` of its number.
    ``unrolled``: for each segment of the whole step its place in the shorter one, and itself with
    its block.
    """
    shorter = _Shorter(segments, copies)
    alive: dict[Hashable, int] = {}
    keys_of: dict[int, list[Hashable]] = {}
    found = []
    count = 0
    for place, segment in unrolled:
        ordinals: Counter[int] = Counter()
        changes = array.array("q")
        events = []
        for k, ((size, storage), event) in enumerate(zip(pairs(segment.changes), segment.events, strict=True)):
            if storage < 0 or storage not in shorter.made:  # or it was there before the step
                changes.extend((size, -1) if storage < 0 else (0, -1))
                events.append(event)
            elif size > 0:
                key: Hashable = (shorter.slots[place], segment.block, size, ordinals[size])
                ordinals[size] += 1
                alive[key] = count
                keys_of.setdefault(storage, []).append(key)
                changes.extend((size, count))
                events.append(event)
                count += 1
            elif size:
                keys = [key for key in shorter.released(place, k, segment.block, storage, -size) if key in alive][:1]
                if shorter.blocks(place, storage) is None:
                    keys = [key for key in keys_of.get(storage, []) if key in alive]
                for key in keys:
                    changes.extend((size, alive.pop(key)))
                    events.append(event)
        found.append(dataclasses.replace(segment, events=events, changes=changes))
    return found


class _Shorter:
    """A step in which blocks stand for several, and what these release of their neighbours'.

    ``slots``: what each segment is in its block: the how manyth of its phase.
    """

    def __init__(self, segments: Sequence[Segment], copies: Sequence[range]) -> None:
        self._segments = segments
        self._copies = copies
        phases: Counter[Hashable] = Counter()
        self.slots: list[Hashable] = []
        self._at: dict[Hashable, int] = {}  # segments by slot and block
        for i, each in enumerate(segments):
            key = each.phase, each.block
            slot: Hashable = i if each.block is None else (each.phase, phases[key])
            phases[key] += 1
            self.slots.append(slot)
            if each.block is not None:
                self._at[slot, each.block] = i
        self.made: dict[
            int, tuple[int, int]
        ] = {}  # by storage that the step allocates: its segment, and the how manyth of its size
        for i, each in enumerate(segments):
            ordinals: Counter[int] = Counter()
            for size, storage in pairs(each.changes):
                if size > 0 and storage >= 0:
                    self.made.setdefault(storage, (i, ordinals[size]))
                    ordinals[size] += 1
        self._numbers = [self._numbered(i) for i in range(len(segments))]
        self._of = [dict(each.values()) for each in self._numbers]

    def blocks(self, place: int, storage: int) -> tuple[int, int] | None:
        """Return the blocks of a segment and of that in which the storage was made; None: one of
        them is outside of blocks, or the storage was there before.
        """
        if storage not in self.made:
            return None
        own, maker = self._segments[place].block, self._segments[self.made[storage][0]].block
        return None if own is None or maker is None else (own, maker)

    def _numbered(self, place: int) -> dict[int, tuple[Hashable, int]]:
        """Return, for each release of a neighbour's storage, the how manyth of its size it is."""
        counts: Counter[Hashable] = Counter()
        found: dict[int, tuple[Hashable, int]] = {}
        for k, (size, storage) in enumerate(pairs(self._segments[place].changes)):
            own, maker = self.blocks(place, storage) or (0, 0)
            if size < 0 and own != maker:
                found[k] = (maker - own, size, counts[maker - own, size]), storage
                counts[maker - own, size] += 1
        return found

    def released(self, place: int, k: int, block: int | None, storage: int, size: int) -> list[Hashable]:
        """Return the keys of what change ``k`` of a segment may release where it is of this block
        of the whole step, the likeliest first.
        """
        if block is None or (blocks := self.blocks(place, storage)) is None:
            return []
        own, maker = blocks
        offset = maker - own
        by, number = self.made[storage]
        copies = self._copies[own]
        own_key = self.slots[by], self._copies[maker][0], size, number
        # Of another copy than that which ran next to it: as a block does that ran next to one.
        first, near = copies.stop - len(copies) * copies.step, block + offset
        if first <= near < copies.stop and near not in self._copies[maker]:
            rounds = -(-abs(offset) // copies.step) * copies.step
            like = self._at.get((self.slots[place], own + (rounds if offset < 0 else -rounds)))
            other = self._of[like].get(self._numbers[place][k][0]) if like is not None else None
            if other is not None:
                by, number = self.made[other]
        near_key = self.slots[by], near, size, number
        return [own_key, near_key] if len(copies) == len(self._copies[maker]) == 1 else [near_key]
