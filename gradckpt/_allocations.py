"""Reconstruct what a block of code allocated, from profiler events and the marks of
:mod:`gradckpt._memory`.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import heapq
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from gradckpt._engine import torch_private as private

KINDS = ("boundaries", "saves", "transient", "gradients", "other")

#: The region of allocations outside all modules of the model.
OUTSIDE = "(outside the model)"

#: Begins the name of each mark.
MARK = "gradckpt."

#: Marks around what no memory is allocated for.
_SIMULATION, _END_OF_SIMULATION = "simulation", "end of simulation"

_BACKWARD = "autograd::engine::evaluate_function: "


class MemoryPoint(NamedTuple):
    """Bytes allocated after one allocation or release; ``total`` is the sum of the five kinds."""

    seconds: float
    total: int
    boundaries: int
    saves: int
    transient: int
    gradients: int
    other: int


#: The result of one device: the timeline, the index of its peak, and the bytes alive there, by
#: region.
Found = tuple[list[MemoryPoint], int, dict[str, int]]


def mark(text: str) -> None:
    with private.record_function(MARK + text):
        pass


@contextlib.contextmanager
def on_no_memory() -> Iterator[None]:
    """Let a profiler that is active know that this thread's allocations in the block are none."""
    active = private.profiler_active()
    if active:
        mark(_SIMULATION)
    try:
        yield
    finally:
        if active:
            mark(_END_OF_SIMULATION)


# ---- events ----


class _Event(NamedTuple):
    """``what``: allocate, release, mark, op, node (of a backward), end (of the node)."""

    what: str
    ns: int
    thread: int
    text: str = ""  # of a mark, or the device of an allocation
    number: int = 0  # bytes, or the sequence number that autograd gave to an operator or a node
    address: int = 0
    total: int = 0  # bytes that the allocator of the device reports after the event
    graded: bool = False  # made by an operator of which autograd could make a node
    stepping: bool = False  # made by an optimizer


def read(tree: list[Any]) -> list[list[_Event]] | None:
    """Return the events of each thread in their order, or None if the first mark is missing."""
    threads: dict[int, list[_Event]] = {}
    started = False
    # (event, whether autograd could make a node, the event around it), or the end of an event.
    stack: list[tuple[Any, bool, str] | _Event] = [(event, False, "") for event in reversed(tree)]
    while stack:
        top = stack.pop()
        if isinstance(top, _Event):
            threads[top.thread].append(top)
            continue
        event, graded, around = top
        fields, thread, ns = event.typed[1], event.start_tid, event.start_time_ns
        to = threads.setdefault(thread, [])
        if hasattr(fields, "ptr"):
            what = "allocate" if fields.alloc_size > 0 else "release"
            size, place = abs(fields.alloc_size), str(fields.device)
            stepping = around.startswith("Optimizer.")
            to.append(_Event(what, ns, thread, place, size, fields.ptr, fields.total_allocated, graded, stepping))
            continue
        name, number = event.name, getattr(fields, "sequence_number", -1)
        if name.startswith(MARK):
            text = name.removeprefix(MARK)
            started |= text == "start"
            to.append(_Event("mark", ns, thread, text))
        elif name.startswith(_BACKWARD):
            to.append(_Event("node", ns, thread, "", number))
            stack.append(_Event("end", event.end_time_ns, thread))
        elif around != _BACKWARD + name:  # not the same node again
            to.append(_Event("op", ns, thread, name, number))
            graded |= number >= 0
        below = around if around.startswith("Optimizer.") else name
        stack += [(child, graded, below) for child in reversed(event.children)]
    return list(threads.values()) if started else None


# ---- analysis ----


@dataclasses.dataclass(slots=True, eq=False)
class _Block:
    """One allocation, alive in [born, died) of the order of events; backward ``run`` made it."""

    size: int
    born: int
    region: str
    run: int
    graded: bool
    died: int | None = None
    boundary: bool = False
    kind: str = ""


class _Regions:
    """The module that each thread is in.

    Marks name it in the forward; in a backward, the operator that made the node does.
    """

    def __init__(self) -> None:
        #: For each thread: (name,) of a module, or of a node [its region, region of a recompute in
        #: it].
        self._stacks: dict[int, list[tuple[str] | list[str]]] = {}
        self._last: dict[int, str] = {}
        self._made: dict[int, list[tuple[int, str]]] = {}  # a recompute on another thread has its own numbers

    def current(self, thread: int, graded: bool) -> str:
        """Return the region.

        Within a node, a recompute runs with grad and the backward itself without.
        """
        stack = self._stacks.get(thread)
        return stack[-1][-1 if graded else 0] if stack else OUTSIDE

    def mark(self, thread: int, text: str) -> None:
        verb, _, name = text.partition(" ")
        stack = self._stacks.setdefault(thread, [])
        if verb == "enter":
            if stack and isinstance(stack[-1], list):
                stack[-1][1] = name.rpartition(".")[0] or name
            stack.append((name,))
        elif verb == "leave":
            for i in range(len(stack) - 1, -1, -1):
                if stack[i] == (name,):
                    del stack[i:]
                    break

    def op(self, thread: int, number: int) -> None:
        made = self._made.setdefault(number, [])
        if made and made[-1][0] == thread:
            made.pop()
        made.append((thread, self.current(thread, True)))

    def node(self, thread: int, number: int) -> None:
        made = self._made.get(number)
        if made:
            self._last[thread] = made.pop()[1] if len(made) > 1 else made[0][1]  # its innermost run
        region = self._last.get(thread, OUTSIDE)
        self._stacks.setdefault(thread, []).append([region, region])

    def end(self, thread: int) -> None:
        stack = self._stacks[thread]
        while isinstance(stack.pop(), tuple):  # a module without its "leave"
            pass


class _Runs:
    """The backwards: each lasts from the start of its first node to the end of its last."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.inside: Counter[int] = Counter()  # number of nodes around each thread
        self._over = True

    def node(self, i: int, thread: int) -> None:
        if not self.inside.total() and self._over:
            self.starts.append(i)
            self.ends.append(i)
            self._over = False
        self.inside[thread] += 1

    def end(self, i: int, thread: int) -> None:
        self.inside[thread] -= 1
        self.ends[-1] = i

    def outside(self) -> None:
        """Note an operator or mark outside all nodes: the next node belongs to another backward."""
        self._over |= not self.inside.total()

    def kind(self, block: _Block, at_the_end: int) -> str:
        died = at_the_end if block.died is None else block.died
        if block.boundary:
            return "boundaries"
        if block.run >= 0:
            return "transient" if died <= self.ends[block.run] else "gradients"
        following = bisect.bisect_left(self.starts, block.born)
        if following == len(self.starts):
            return "transient" if block.died is not None else "saves" if block.graded else "other"
        if died < self.starts[following]:
            return "transient"
        run = bisect.bisect_right(self.starts, died) - 1
        return "saves" if block.died is not None and died <= self.ends[run] else "other"


def analyse(threads: list[list[_Event]]) -> dict[str, Found]:
    """Return the result of each device."""
    events = list(heapq.merge(*threads, key=lambda event: event.ns))
    regions, runs = _Regions(), _Runs()
    simulated: Counter[int] = Counter()  # number of simulated steps that each thread is in
    alive: dict[tuple[str, int], _Block] = {}
    #: device -> (index of the event, the new block, the block that died), in order
    changes: dict[str, list[tuple[int, _Block | None, _Block | None]]] = {}
    for i, event in enumerate(events):
        thread = event.thread
        if event.what == "mark" and event.text in (_SIMULATION, _END_OF_SIMULATION):
            simulated[thread] += 1 if event.text == _SIMULATION else -1
        elif simulated[thread] and event.what != "release":  # of which those of earlier blocks are real
            continue
        elif event.what == "allocate":
            # An optimizer may step during a backward, in a gradient's hook; its states are not
            # gradients.
            run = len(runs.starts) - 1 if runs.inside[thread] and not event.stepping else -1
            new = _Block(event.number, i, regions.current(thread, event.graded), run, event.graded)
            old = alive.get((event.text, event.address))  # another thread released it, which is not recorded
            if old is not None:
                old.died = i
            alive[event.text, event.address] = new
            changes.setdefault(event.text, []).append((i, new, old))
        elif event.what == "release":
            old = alive.pop((event.text, event.address), None)
            if old is not None:
                old.died = i
            if old is not None or event.text != "cpu":  # on a CPU, an earlier profiler may have seen the allocation
                changes.setdefault(event.text, []).append((i, None, old))
        elif event.what == "node":
            runs.node(i, thread)
            regions.node(thread, event.number)
        elif event.what == "end":
            runs.end(i, thread)
            regions.end(thread)
        else:
            if not runs.inside[thread]:
                runs.outside()
            if event.what == "op" and event.number >= 0:
                regions.op(thread, event.number)
            elif event.text.startswith("boundaries "):
                for place in event.text.removeprefix("boundaries ").split(","):
                    device, _, address = place.partition(" ")
                    if (device, int(address)) in alive:
                        alive[device, int(address)].boundary = True
            elif event.what == "mark":
                regions.mark(thread, event.text)
    start = next((event.ns for event in events if event.what == "mark"), 0)
    return {device: _device(device, found, events, runs, start) for device, found in changes.items()}


def _device(
    device: str, changes: list[tuple[int, _Block | None, _Block | None]], events: list[_Event], runs: _Runs, start: int
) -> Found:
    sizes = dict.fromkeys(KINDS, 0)
    timeline = []
    for i, new, old in changes:
        for block, sign in ((old, -1), (new, 1)):
            if block is not None:
                block.kind = block.kind or runs.kind(block, len(events))
                sizes[block.kind] += sign * block.size
        if device != "cpu":  # torch also counts earlier memory; on a CPU only what a profiler has seen
            sizes["other"] += events[i].total - sum(sizes.values())
        timeline.append(MemoryPoint((events[i].ns - start) / 1e9, sum(sizes.values()), *sizes.values()))
    top = max(range(len(timeline)), key=lambda k: timeline[k].total)
    when = changes[top][0]
    by_region: Counter[str] = Counter()
    for _, block, _ in changes:
        if block is not None and block.born <= when and (block.died is None or block.died > when):
            by_region[block.region] += block.size
    return timeline, top, dict(by_region.most_common())
