"""What torch's caching allocator for CUDA needs of a device: :func:`memory_use`.

Its rules are in csrc/planner/caching_allocator.h. What is there during the whole step was allocated
before it, tensor by tensor as far as tensors are known.
"""

from __future__ import annotations

import array
import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from gradckpt import _C
from gradckpt._planning.sharded import local

if TYPE_CHECKING:
    from gradckpt._planning.step_trace import Segment

__all__ = ["held_blocks", "memory_use", "pairs", "with_own_storages"]


def pairs(changes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the allocations (bytes, storage) and releases (-bytes, storage) of a segment."""
    return zip(changes[::2], changes[1::2], strict=True)


def memory_use(
    segments: Iterable[Segment], held: Iterable[int] = (), *, expandable: bool = False, capacity: int | None = None
) -> Any:
    """Return what a step needs after ``held`` blocks of these bytes; :func:`gradckpt._C.memory_use`
    describes it. Each segment counts once.
    """
    rows = array.array("q")
    names: dict[Hashable, list[int]] = {}
    count = 0

    def allocate(size: int) -> int:
        nonlocal count
        rows.extend((size, count, 0))
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
                rows.extend((0, known.pop(), 0))
    return _C.memory_use(rows, expandable, capacity)


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
            if storage < 0 or not shorter.is_made(storage):  # or it was there before the step
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
                if not shorter.is_of_neighbour(place, storage):
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
        self._made: dict[int, tuple[int, int]] = {}  # by storage: its segment, and the how manyth of its size
        for i, each in enumerate(segments):
            ordinals: Counter[int] = Counter()
            for size, storage in pairs(each.changes):
                if size > 0 and storage >= 0:
                    self._made.setdefault(storage, (i, ordinals[size]))
                    ordinals[size] += 1
        self._numbers = [self._numbered(i) for i in range(len(segments))]
        self._of = [dict(each.values()) for each in self._numbers]

    def _offset(self, place: int, storage: int) -> int | None:
        """Return how many blocks after a segment's a storage was made; None: outside of them."""
        own, maker = self._segments[place].block, self._segments[self._made[storage][0]].block
        return None if own is None or maker is None else maker - own

    def is_made(self, storage: int) -> bool:
        """Return whether the step allocates a storage."""
        return storage in self._made

    def is_of_neighbour(self, place: int, storage: int) -> bool:
        """Return whether a segment and that in which the storage was made are of blocks."""
        return storage in self._made and self._offset(place, storage) is not None

    def _numbered(self, place: int) -> dict[int, tuple[Hashable, int]]:
        """Return, for each release of a neighbour's storage, the how manyth of its size it is."""
        counts: Counter[Hashable] = Counter()
        found: dict[int, tuple[Hashable, int]] = {}
        for k, (size, storage) in enumerate(pairs(self._segments[place].changes)):
            if size < 0 and storage in self._made and (offset := self._offset(place, storage)):
                found[k] = (offset, size, counts[offset, size]), storage
                counts[offset, size] += 1
        return found

    def released(self, place: int, k: int, block: int | None, storage: int, size: int) -> list[Hashable]:
        """Return the keys of what change ``k`` of a segment may release where it is of this block
        of the whole step, the likeliest first.
        """
        if not self.is_of_neighbour(place, storage):
            return []
        offset = self._offset(place, storage)
        by, number = self._made[storage]
        own, maker = self._segments[place].block, self._segments[by].block
        assert block is not None
        assert own is not None
        assert maker is not None
        assert offset is not None
        copies = self._copies[own]
        own_key = self.slots[by], self._copies[maker][0], size, number
        # Of another copy than that which ran next to it: as a block does that ran next to one.
        first, near = copies.stop - len(copies) * copies.step, block + offset
        if first <= near < copies.stop and near not in self._copies[maker]:
            rounds = -(-abs(offset) // copies.step) * copies.step
            like = self._at.get((self.slots[place], own + (rounds if offset < 0 else -rounds)))
            other = self._of[like].get(self._numbers[place][k][0]) if like is not None else None
            if other is not None:
                by, number = self._made[other]
        near_key = self.slots[by], near, size, number
        return [own_key, near_key] if len(copies) == len(self._copies[maker]) == 1 else [near_key]
