"""_C.memory_use: torch's caching allocator for CUDA, rule by rule with numbers from the rules,
against an oracle in Python (helpers/caching_oracle.py), and against a card where there is one."""

import array
import random

import pytest
import torch
from built import said_of_failing_memory
from caching_oracle import KIB, MIB, needed, play
from checkout import CSRC

from gradckpt import _C


def use(changes, expandable=False, capacity=None):
    return _C.memory_use(array.array("q", [x for change in changes for x in change]), expandable, capacity)


def trace(*steps):
    """Changes of steps: (name, bytes) or (name, bytes, stream) allocates, a name alone frees."""
    names, found = {}, []
    for step in steps:
        if isinstance(step, str):
            found.append((0, names.pop(step), 0))
        else:
            name, size, *stream = step
            names[name] = len(found)
            found.append((size, names[name], *(stream or [0])))
    return found


RULES = {
    "blocks are multiples of 512 bytes": ([("a", 1), ("b", 513)], 1536, 2 * MIB),
    "up to 1 MiB is small, in segments of 2 MiB": ([("a", MIB), ("b", MIB)], 2 * MIB, 2 * MIB),
    "a small segment has no room for a third": ([("a", MIB), ("b", MIB), ("c", 512)], 2 * MIB + 512, 4 * MIB),
    "more than 1 MiB is large, in segments of 20 MiB": ([("a", MIB + 1)], MIB + 512, 20 * MIB),
    "which hold several": ([("a", 9 * MIB), ("b", 9 * MIB)], 18 * MIB, 20 * MIB),
    "from 10 MiB on a segment of its own": ([("a", 10 * MIB)], 10 * MIB, 10 * MIB),
    "rounded up to 2 MiB, all of which the block has": ([("a", 11 * MIB)], 12 * MIB, 12 * MIB),
    "small and large do not share": ([("a", 9 * MIB), ("b", MIB)], 10 * MIB, 22 * MIB),
    "1 MiB that is left of a large block stays with it": (
        [("a", 21 * MIB), "a", ("b", 20 * MIB + 512)],
        22 * MIB,
        22 * MIB,
    ),
    "a rest of more is split": ([("a", 22 * MIB), "a", ("b", 20 * MIB)], 22 * MIB, 22 * MIB),
    "512 bytes are left of a small one": ([("a", 2 * KIB), ("b", MIB), ("c", MIB - 2 * KIB)], 2 * MIB, 2 * MIB),
    "the smallest block that is large enough": (
        [("a", 40 * MIB), ("b", 30 * MIB), "a", "b", ("c", 30 * MIB), ("d", 40 * MIB)],
        70 * MIB,
        70 * MIB,
    ),
    "neighbours join": (
        [("a", 10 * MIB), "a", ("b", 4 * MIB), ("c", 4 * MIB), "b", "c", ("d", 10 * MIB)],
        10 * MIB,
        10 * MIB,
    ),
    "not those between which a block is": (
        [("x", 12 * MIB), "x", ("a", 4 * MIB), ("b", 4 * MIB), ("c", 4 * MIB), "a", "c", ("d", 8 * MIB)],
        12 * MIB,
        12 * MIB + 20 * MIB,
    ),
    "streams do not share": ([("a", 20 * MIB), "a", ("b", 20 * MIB, 1)], 20 * MIB, 40 * MIB),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule):
    steps, allocated, reserved = RULES[rule]
    found = use(trace(*steps))
    assert (found["allocated"], found["reserved"]) == (allocated, reserved)
    assert found["completed"]


def test_of_equal_blocks_that_of_the_lowest_address():
    """`c` has a choice of two: `a`, which is a segment, and `b`, beside which is `x`. Where it
    takes `b`, the segment goes back for `d`."""
    rest = ["s", ("b", 12 * MIB), ("x", 12 * MIB), "a", "b", ("c", 12 * MIB), ("d", 14 * MIB)]
    a, s = ("a", 12 * MIB), ("s", 24 * MIB)
    assert use(trace(s, a, *rest), capacity=38 * MIB)["completed"]
    assert not use(trace(a, s, *rest), capacity=38 * MIB)["completed"]


def test_needed_is_the_smallest_capacity_from_which_on_all_complete():
    """A trace may complete with less and fail with more: with less, a segment goes back earlier,
    and its place is not taken by a block that stays."""
    for seed in range(3000):
        changes = random_changes(random.Random(f"dips {seed}"), 24, 3)
        found = use(changes)
        lower = [c for c in range(2 * MIB, found["needed"], 2 * MIB) if use(changes, capacity=c)["completed"]]
        if lower:
            break
    assert lower, "no trace completes with less and fails with more"
    assert found["needed"] == needed(changes)
    assert not use(changes, capacity=found["needed"] - 2 * MIB)["completed"]


EXPANDABLE = {
    "pages of 20 MiB": ([("a", 21 * MIB)], 21 * MIB, 40 * MIB),
    "and of 2 MiB in the small pool": ([("a", MIB), ("b", MIB), ("c", MIB)], 3 * MIB, 4 * MIB),
    "a segment grows": ([("a", 30 * MIB), "a", ("b", 50 * MIB)], 50 * MIB, 60 * MIB),
    "any rest of 512 bytes is split": ([("a", 20 * MIB - 512), ("b", MIB + 512)], 21 * MIB, 40 * MIB),
    "a hole is filled before the segment grows": (
        [("a", 20 * MIB), ("b", 20 * MIB), "a", ("c", 15 * MIB), ("d", 5 * MIB)],
        40 * MIB,
        40 * MIB,
    ),
}


@pytest.mark.parametrize("rule", EXPANDABLE)
def test_rules_of_expandable_segments(rule):
    steps, allocated, reserved = EXPANDABLE[rule]
    found = use(trace(*steps), expandable=True)
    assert (found["allocated"], found["reserved"]) == (allocated, reserved)


def random_changes(rng, count, streams=1):
    sizes = [
        rng.choice((rng.randint(1, MIB), rng.randint(MIB, 12 * MIB), rng.randint(10 * MIB, 60 * MIB))) for _ in range(5)
    ]
    changes, alive = [], []
    for i in range(count):
        if alive and rng.random() < 0.48:
            changes.append((0, alive.pop(rng.randrange(len(alive))), 0))
        else:
            changes.append((rng.choice(sizes), i, rng.randrange(streams)))
            alive.append(i)
    return changes


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_random_traces_are_as_the_oracle_has_them(part, expandable):
    refused = below = 0
    for seed in range(150):
        rng = random.Random(f"{part} {seed} {expandable}")
        changes = random_changes(rng, rng.randint(1, 120), rng.choice((1, 1, 3)))
        found = use(changes, expandable)
        assert (found["completed"], found["requested"], found["allocated"], found["reserved"]) == play(
            changes, None, expandable
        )
        for _ in range(3):
            capacity = rng.randint(0, found["reserved"])
            less = use(changes, expandable, capacity)
            expected = play(changes, capacity, expandable)
            assert less["completed"] == expected[0]
            refused += not expected[0]
            if expected[0]:
                assert (less["requested"], less["allocated"], less["reserved"]) == expected[1:]
        if seed % 5 == 0:
            assert found["needed"] == needed(changes, expandable)
            below += found["needed"] < found["reserved"]
    assert refused
    assert below


def test_addresses_of_expandable_segments_do_not_run_out():
    """One allocation, or all of a stream, may exceed the 20 TiB of addresses that segments had."""
    large, small = 30 << 40, 19 << 40
    for changes in (
        [(large, 0, 0), (small, 1, 0), (0, 0, 0), (large + 1, 2, 0)],
        [(small, i, i % 2) for i in range(9)],
        [((1 << 60) - 1, 0, 0)],
    ):
        found = use(changes, expandable=True)
        assert found["completed"]
        assert (found["completed"], found["requested"], found["allocated"], found["reserved"]) == play(
            changes, None, True
        )


def test_nothing_and_what_is_no_trace():
    assert use([]) == {"completed": True, "requested": 0, "allocated": 0, "reserved": 0, "needed": 0}
    for changes in (
        [(0, 0, 0)],
        [(8, 0, 0), (8, 0, 0)],
        [(8, 0, 0), (0, 0, 0), (0, 0, 0)],
        [(8, 1, 0)],
        [(8, -1, 0)],
        [(-8, 0, 0)],
        [(8, 0, -1)],
        [(8, 0, 1 << 16)],
        [(1 << 60, 0, 0)],
        [(1 << 59, 0, 0), (1 << 59, 1, 0)],
    ):
        with pytest.raises(ValueError, match=r"^gradckpt: a change is out of range, or its name is used twice"):
            use(changes)
    with pytest.raises(ValueError, match="changes has 8 bytes; pass 24 for each"):
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
        for size, name, _ in changes:
            if size:
                alive[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
            else:
                del alive[name]
        stats = torch.cuda.memory_stats()
        alive.clear()
        found = use(changes)
        assert found["allocated"] == stats["allocated_bytes.all.peak"]
        assert found["reserved"] == stats["reserved_bytes.all.peak"]
