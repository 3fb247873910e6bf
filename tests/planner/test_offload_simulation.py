"""csrc/offload/simulate.c: a step with offload against an oracle, and bounds that no order of
events can break. benchmarks/bench_offload_simulation.py has the closed forms."""

import array
import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest
from checkout import CSRC
from native_programs import said_of_failing_memory

from gradckpt import _C

# ---- A step with offload as csrc/offload/simulate.h has it, by an event queue: three workers
# take operations in order, each when those that it waits for are done. Here the host does
# prefetch: a copy in is queued so many payloads before its decode, where the ring has room for
# it. Nothing here is known to csrc/.

QUEUES = ("compute", "out", "in")


@dataclass(eq=False)
class Operation:
    queue: str
    duration: int
    waits: list = field(default_factory=list)
    part: str = ""
    start: int = -1
    end: int = -1


@dataclass(eq=False)
class Range:
    """``taker`` writes it first, ``last`` uses it last, None: not queued yet."""

    size: int
    taker: Operation
    last: Operation | None = None


class Host:
    """Queues the operations of a step; ranges leave ``ring`` when another one has their bytes."""

    def __init__(self, rows, rate_out, rate_in, latency, ring, held, head, prefetch):
        self.rows, self.size, self.most_held, self.window = rows, ring, held, prefetch
        self.nanoseconds = {
            queue: (lambda size, rate=rate: latency + size * 10**9 // rate)
            for queue, rate in (("out", rate_out), ("in", rate_in))
        }
        self.queued, self.ring, self.ranges = [], [], []
        self.moving = [placed and 0 < size <= ring for *_, size, placed in rows]
        self.held, self.outside, self.coming = {}, {}, {}
        for i in range(len(rows)):
            self.forward(i)
        self.add("compute", head)
        for i in reversed(range(len(rows))):
            self.backward(i)

    def add(self, queue, duration, waits=(), part=""):
        self.queued.append(Operation(queue, duration, list(waits), part))
        return self.queued[-1]

    def space(self):
        return self.size - sum(each.size for each in self.ring)

    def room(self, size):
        """What a taker of so many bytes waits for."""
        waits = []
        while self.space() < size:
            released = [each for each in self.ring if each.last]
            if not released:
                self.copy_out()
                continue
            oldest = min(released, key=lambda each: self.queued.index(each.last))
            self.ring.remove(oldest)
            waits.append(oldest.last)
        return waits

    def place(self, size, taker):
        self.ring.append(Range(size, taker))
        self.ranges.append(self.ring[-1])
        return self.ring[-1]

    def copy_out(self):
        i = min(self.held)
        there = self.held.pop(i)
        there.last = self.add("out", self.nanoseconds["out"](there.size), [there.taker])
        self.outside[i] = there.last

    def copy_in(self, i):
        size = self.rows[i][4]
        waits = [self.outside.pop(i), *self.room(size)]
        self.coming[i] = self.place(size, self.add("in", self.nanoseconds["in"](size), waits))

    def forward(self, i):
        forward, _, encode, _, size, _ = self.rows[i]
        waits = self.room(size) if self.moving[i] else ()
        encoded = self.add("compute", encode, waits, "forward")
        if self.moving[i]:
            self.held[i] = self.place(size, encoded)
            while sum(each.size for each in self.held.values()) > self.most_held:
                self.copy_out()
        self.add("compute", forward)

    def backward(self, i):
        _, backward, _, decode, _, _ = self.rows[i]
        if i in self.outside:
            self.copy_in(i)
        there = self.held.pop(i, None) or self.coming.pop(i, None)
        decoded = self.add("compute", decode, [there.taker] if there else (), "backward")
        if there:
            there.last = decoded
        while self.outside and len(self.coming) < self.window:
            nearest = max(self.outside)
            undecoded = sum(each.size for each in self.ring if not each.last)
            if undecoded + self.rows[nearest][4] > self.size:
                break
            self.copy_in(nearest)
        self.add("compute", backward)


def play(operations):
    """Start and end of each operation."""
    lines = {queue: [each for each in operations if each.queue == queue] for queue in QUEUES}
    running, finished, now, number = {}, set(), 0, itertools.count()
    events = [(0, next(number), None)]
    while events:
        now, _, done = heapq.heappop(events)
        if done:
            finished.add(done)
            del running[done.queue]
        for queue, line in lines.items():
            if line and queue not in running and all(each in finished for each in line[0].waits):
                first = running[queue] = line.pop(0)
                first.start, first.end = now, now + first.duration
                heapq.heappush(events, (first.end, next(number), first))
    assert not any(lines.values()), "the queues wait for each other"


def simulate(rows, **step):
    """What simulate_offload() returns."""
    host = Host(rows, **step)
    play(host.queued)
    compute = [each for each in host.queued if each.queue == "compute"]
    waited = [(b.start - a.end, b.part) for a, b in itertools.pairwise([Operation("compute", 0, end=0), *compute])]
    copied = [each for each in host.ranges if each.last.queue == "out"]
    return {
        "time": compute[-1].end,
        "exposed_forward": sum(ns for ns, part in waited if part == "forward"),
        "exposed_backward": sum(ns for ns, part in waited if part == "backward"),
        "stalls": sum(ns > 0 for ns, _ in waited),
        "copies": len(copied),
        "moved": sum(each.size for each in copied),
        "stayed": len(rows) - sum(host.moving),
        "peak": max(
            (
                sum(each.size for each in host.ranges if each.taker.start <= moment < each.last.end)
                for moment in {each.taker.start for each in host.ranges}
            ),
            default=0,
        ),
    }


FAST = 10**18
#: 1 byte takes 1 ns each way.
LINK = {"rate_out": 10**9, "rate_in": 10**9, "latency": 0}


def step_of(rows, **settings):
    return _C.simulate_offload(array.array("q", [number for row in rows for number in row]), **settings)


# ---- random steps


def random_step(rng):
    n, most = rng.randint(0, 14), rng.choice((0, 1, 10, 500))
    sizes = [rng.randint(0, 100) for _ in range(rng.randint(1, 3))]
    rows = [
        (*(rng.randint(0, most) for _ in range(2)), *(rng.randint(0, most // 4) for _ in range(2)))
        + (rng.choice(sizes), int(rng.random() < 0.85))
        for _ in range(n)
    ]
    ring = rng.randint(0, 400)
    rates = {way: rng.choice((10**7, 10**8, 10**9, rng.randint(1, 10**10), FAST)) for way in ("rate_out", "rate_in")}
    return rows, {
        **rates,
        "latency": rng.choice((0, 0, rng.randint(0, 50))),
        "ring": ring,
        "held": rng.randint(0, ring + 50),
        "head": rng.choice((0, rng.randint(0, 2000))),
    }


@pytest.mark.parametrize("part", range(4))
def test_random_steps_are_as_the_oracle_has_them(part):
    stalled = 0
    for seed in range(400):
        rows, settings = random_step(random.Random(f"{part} {seed}"))
        if rows:
            found = step_of(rows, **settings)
            prefetch = seed % 5
            assert found == simulate(rows, **settings, prefetch=prefetch), (rows, settings, prefetch)
            stalled += found["stalls"] > 0
    assert stalled > 100


def test_a_faster_link_is_never_slower():
    for seed in range(1000):
        rng = random.Random(f"rates {seed}")
        rows, settings = random_step(rng)
        times = [step_of(rows, **settings)["time"]]
        for _ in range(3):
            which = rng.choice(("rate_out", "rate_in", "latency"))
            settings[which] = settings[which] // 2 if which == "latency" else settings[which] * 2
            times.append(step_of(rows, **settings)["time"])
        assert times == sorted(times, reverse=True)


# ---- nothing, and what is no step


def small(rows, *, ring, held=0, head=0, **link):
    return step_of(rows, **LINK | link, ring=ring, held=held, head=head)


def test_nothing_and_what_is_no_step():
    nothing = {"time": 5, **dict.fromkeys(("exposed_forward", "exposed_backward", "stalls"), 0)}
    nothing |= dict.fromkeys(("copies", "moved", "stayed", "peak"), 0)
    assert small([], ring=0, head=5) == nothing
    good = (1, 1, 1, 1, 1, 1)
    wrong = [(*good[:i], -1, *good[i + 1 :]) for i in range(6)] + [
        (*good[:i], 1 << 60, *good[i + 1 :]) for i in range(6)
    ]
    for row in [*wrong, (1, 1, 1, 1, 1, 2)]:
        with pytest.raises(ValueError, match=r"^gradckpt: a number of the step is negative, a rate is 0, or a sum"):
            small([row], ring=10)
    for change in ("ring", "held", "head", "latency", "rate_out", "rate_in"):
        for number in (-1, *([0] if "rate" in change else [])):
            with pytest.raises(ValueError, match="a number of the step is negative"):
                small([good], **{"ring": 10, change: number})
    half = 1 << 59
    for rows in ([(half, 1, 1, 1, 1, 1)] * 2, [(1, half, 1, half, 1, 1)], [(1, 1, 1, 1, half, 0)] * 2):
        small([(*(number // 2 for number in row[:5]), 0) for row in rows], ring=10, rate_out=FAST, rate_in=FAST)
        with pytest.raises(ValueError, match="a sum reaches"):
            small(rows, ring=10, rate_out=FAST, rate_in=FAST)
    for slow in ("rate_out", "rate_in"):
        with pytest.raises(ValueError, match="a sum reaches"):
            small([(1, 1, 1, 1, 1 << 31, 1)], ring=10, **{slow: 1})
    with pytest.raises(ValueError, match="regions has 8 bytes; pass 48 for each"):
        _C.simulate_offload(array.array("q", [1]), **LINK, ring=0, held=0, head=0)
    with pytest.raises(ValueError, match="regions is not of 64-bit integers"):
        _C.simulate_offload(array.array("i", [1] * 12), **LINK, ring=0, held=0, head=0)


def test_memory_may_run_out(tmp_path):
    """Each allocation fails in turn; under sanitizers."""
    said = said_of_failing_memory(tmp_path, "simulation_faults.c", [CSRC / "offload" / "simulate.c"])
    assert said == "500 steps, every allocation failed once\n"
