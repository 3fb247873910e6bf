"""_C.memory_use: torch's caching allocator for CUDA, rule by rule with numbers from the rules,
against an oracle in Python (test_caching_allocator.py), and against a card where there is one."""

import array
import random
from dataclasses import dataclass, field

import pytest
import torch
from checkout import CSRC
from native_programs import said_of_failing_memory

from gradckpt import _C

# ---- torch's caching allocator for CUDA as its documentation and its comments have it, in the
# simplest form: segments are lists of pieces, and every question looks at all of them. Nothing
# here is known to csrc/planner.

KIB, MIB = 2**10, 2**20


class OutOfMemory(Exception):
    pass


@dataclass
class Piece:
    at: int
    size: int
    used: bool = False


@dataclass
class Segment:
    small: bool
    pieces: list = field(default_factory=list)

    def join(self):
        """Neighbours that are free become one."""
        found = self.pieces[:1]
        for piece in self.pieces[1:]:
            if not found[-1].used and not piece.used:
                found[-1].size += piece.size
            else:
                found.append(piece)
        self.pieces = found

    def cut(self, piece, size):
        """Leave the first bytes to a piece; the others are one of their own."""
        rest = Piece(piece.at + size, piece.size - size, piece.used)
        piece.size = size
        self.pieces.insert(self.pieces.index(piece) + 1, rest)


class Allocator:
    """`capacity`: bytes for segments, None: no limit."""

    def __init__(self, capacity=None):
        self.capacity = float("inf") if capacity is None else capacity
        self.segments = []
        self.end = 0
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0

    def from_device(self, size, small):
        whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + whole > self.capacity:
            raise OutOfMemory
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        segment = Segment(small, [Piece(self.end, whole)])
        self.end += whole
        self.segments.append(segment)
        return segment, segment.pieces[0]

    def give_back(self):
        for segment in self.segments[:]:
            if len(segment.pieces) == 1 and not segment.pieces[0].used:
                self.reserved -= segment.pieces[0].size
                self.segments.remove(segment)

    def best(self, size, small):
        free = [
            (piece.size, piece.at, segment, piece)
            for segment in self.segments
            for piece in segment.pieces
            if segment.small == small and not piece.used and piece.size >= size
        ]
        return min(free, key=lambda each: each[:2])[2:] if free else None

    def allocate(self, nbytes):
        size = -(-nbytes // 512) * 512
        small = size <= MIB
        found = self.best(size, small)
        if found is None:
            try:
                found = self.from_device(size, small)
            except OutOfMemory:
                self.give_back()
                found = self.from_device(size, small)
        segment, piece = found
        rest = piece.size - size
        if rest >= 512 if small else rest > MIB:
            segment.cut(piece, size)
        piece.used = True
        self.allocated += piece.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return segment, piece

    def free(self, block):
        segment, piece = block
        piece.used = False
        self.allocated -= piece.size
        segment.join()


def play(changes, capacity=None):
    """What _C.memory_use says: (requested, allocated, reserved); None if the capacity is too
    small."""
    allocator, alive = Allocator(capacity), {}
    requested = most = 0
    for nbytes, name in changes:
        if nbytes == 0:
            size, block = alive.pop(name)
            requested -= size
            allocator.free(block)
            continue
        try:
            alive[name] = nbytes, allocator.allocate(nbytes)
        except OutOfMemory:
            return None
        requested += nbytes
        most = max(most, requested)
    return most, allocator.peak_allocated, allocator.peak_reserved


def needed(changes):
    """The smallest capacity from which on all complete: every multiple of 2 MiB is tried."""
    capacity = play(changes)[2]
    while capacity > 0 and play(changes, capacity - 2 * MIB) is not None:
        capacity -= 2 * MIB
    return capacity


def use(changes):
    return _C.memory_use(array.array("q", [x for change in changes for x in change]))


def trace(*steps):
    """Changes of steps: (name, bytes) allocates, a name alone frees."""
    names, found = {}, []
    for step in steps:
        if isinstance(step, str):
            found.append((0, names.pop(step)))
        else:
            name, size = step
            names[name] = len(found)
            found.append((size, names[name]))
    return found


RULES = {
    "blocks are multiples of 512 bytes": ([("a", 1), ("b", 513)], 1536, 2 * MIB),
    "up to 1 MiB is small, in segments of 2 MiB": ([("a", MIB), ("b", MIB)], 2 * MIB, 2 * MIB),
    "more than 1 MiB is large, in segments of 20 MiB": ([("a", MIB + 1)], MIB + 512, 20 * MIB),
    "from 10 MiB on a segment of its own": ([("a", 10 * MIB)], 10 * MIB, 10 * MIB),
    "rounded up to 2 MiB, all of which the block has": ([("a", 11 * MIB)], 12 * MIB, 12 * MIB),
    "small and large do not share": ([("a", 9 * MIB), ("b", MIB)], 10 * MIB, 22 * MIB),
    "a rest of more is split": ([("a", 22 * MIB), "a", ("b", 20 * MIB)], 22 * MIB, 22 * MIB),
    "512 bytes are left of a small one": ([("a", 2 * KIB), ("b", MIB), ("c", MIB - 2 * KIB)], 2 * MIB, 2 * MIB),
    "neighbours join": (
        [("a", 10 * MIB), "a", ("b", 4 * MIB), ("c", 4 * MIB), "b", "c", ("d", 10 * MIB)],
        10 * MIB,
        10 * MIB,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule):
    steps, allocated, reserved = RULES[rule]
    found = use(trace(*steps))
    assert (found["allocated"], found["reserved"]) == (allocated, reserved)


def test_needed_is_the_smallest_capacity_from_which_on_all_complete():
    """A trace may complete with less and fail with more: with less, a segment goes back earlier,
    and its place is not taken by a block that stays."""
    for seed in range(3000):
        changes = random_changes(random.Random(f"dips {seed}"), 24)
        found = use(changes)
        lower = [c for c in range(2 * MIB, found["needed"], 2 * MIB) if play(changes, c) is not None]
        if lower:
            break
    assert lower, "no trace completes with less and fails with more"
    assert found["needed"] == needed(changes)


def random_changes(rng, count):
    sizes = [
        rng.choice((rng.randint(1, MIB), rng.randint(MIB, 12 * MIB), rng.randint(10 * MIB, 60 * MIB))) for _ in range(5)
    ]
    changes, alive = [], []
    for i in range(count):
        if alive and rng.random() < 0.48:
            changes.append((0, alive.pop(rng.randrange(len(alive)))))
        else:
            changes.append((rng.choice(sizes), i))
            alive.append(i)
    return changes


@pytest.mark.parametrize("part", range(4))
def test_random_traces_are_as_the_oracle_has_them(part):
    below = 0
    for seed in range(300):
        rng = random.Random(f"{part} {seed}")
        changes = random_changes(rng, rng.randint(1, 120))
        found = use(changes)
        assert (found["requested"], found["allocated"], found["reserved"]) == play(changes)
        if seed % 5 == 0:
            assert found["needed"] == needed(changes)
            below += found["needed"] < found["reserved"]
    assert below


def test_nothing_and_what_is_no_trace():
    assert use([]) == {"requested": 0, "allocated": 0, "reserved": 0, "needed": 0}
    assert use([((1 << 60) - 1, 0)])["needed"] == 1 << 60
    for changes in (
        [(0, 0)],
        [(8, 0), (8, 0)],
        [(8, 0), (0, 0), (0, 0)],
        [(8, 1)],
        [(8, -1)],
        [(-8, 0)],
        [(1 << 60, 0)],
        [(1 << 59, 0), (1 << 59, 1)],
    ):
        with pytest.raises(ValueError, match=r"^gradckpt: a change is out of range, or its name is used twice"):
            use(changes)
    with pytest.raises(ValueError, match="changes has 8 bytes; pass 16 for each"):
        _C.memory_use(array.array("q", [1]))
    with pytest.raises(ValueError, match="changes is not of 64-bit integers"):
        _C.memory_use(array.array("i", [1, 2, 3]))


def test_memory_of_its_own_may_run_out(tmp_path):
    """Each allocation fails in turn; under sanitizers."""
    said = said_of_failing_memory(tmp_path, "allocator_faults.c", [CSRC / "planner" / "caching_allocator.c"])
    assert said == "200 traces, every allocation failed once\n"


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device, whose allocator could be compared"
)
def test_a_card_has_the_same_numbers():
    """torch's allocator is empty at first: a process of its own would be needed elsewhere."""
    torch.cuda.empty_cache()
    if torch.cuda.memory_reserved():
        pytest.skip("other tests hold memory of the device")
    for seed in range(20):
        changes = random_changes(random.Random(f"card {seed}"), 200)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        alive = {}
        for size, name in changes:
            if size:
                alive[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
            else:
                del alive[name]
        stats = torch.cuda.memory_stats()
        alive.clear()
        found = use(changes)
        assert found["allocated"] == stats["allocated_bytes.all.peak"]
        assert found["reserved"] == stats["reserved_bytes.all.peak"]
