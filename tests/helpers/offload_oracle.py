"""A step with offload as csrc/offload/simulate.h has it, by an event queue: three workers take
operations in order, each when those that it waits for are done. Here the host does prefetch: a
copy in is queued so many payloads before its decode, where the ring has room for it. Nothing here
is known to csrc/."""

import heapq
import itertools
from dataclasses import dataclass, field

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
