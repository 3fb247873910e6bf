"""Payloads in another place, in a plan: what they take and how long they are waited for:
:class:`Placement`.

A ring on the device, through which payloads pass, counts in the budget; for tensors of the host,
whose place is a disk, the memory in which payloads live before they are written does. How long a
step waits for the link is simulated (csrc/offload/simulate.h).
"""

from __future__ import annotations

import array
import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch

from gradckpt import _C
from gradckpt._engine.places import REGIONS, SAVED, place_of
from gradckpt._offload import Offload
from gradckpt._planning.links import Link, link_between
from gradckpt._planning.options import Option
from gradckpt._planning.step_trace import Segment, StepTrace

__all__ = ["Call", "Placement", "placed_by_block", "placement_of"]

#: Parts of a ring, and of a file, are multiples of so many bytes.
_UNIT, _PAGE = 256, 4096

#: The part of a block's time without checkpointing that its forward takes, at least and at most.
_FORWARD = 0.2, 0.5


@dataclasses.dataclass(frozen=True)
class Call:
    """A region of a step. ``keep``, ``recompute``: seconds of forward and backward without and with
    recomputing. ``seconds``: as chosen, of which ``codec`` write and read what the place has.
    ``recomputes``: the region is recomputed. ``bytes``: of payloads in the place, of which one has
    at most ``largest``.
    """

    keep: float
    recompute: float
    seconds: float
    codec: float
    recomputes: bool
    bytes: int
    largest: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """``offload``: the place that payloads may have. ``link``: between it and the device.
    ``on_host``: the model is in host memory. ``host_budget``: bytes of payloads that host memory
    takes; None: as many as there are.
    """

    offload: Offload
    link: Link
    on_host: bool
    host_budget: int | None

    # ---- memory

    def note(self, trace: StepTrace, options: Sequence[Option]) -> StepTrace:
        """Note in a trace what the place takes, where these are the options of the blocks."""
        largest, whole = {True: 0, False: 0}, {True: 0, False: 0}  # by whether the regions recompute
        for segment in trace.segments:
            if segment.placed_bytes:
                kind = segment.block is not None and options[segment.block].recomputes
                largest[kind] = max(largest[kind], segment.largest)
                whole[kind] += segment.placed_bytes
        trace.ring = sum(self.room(largest[kind], whole[kind], kind) for kind in largest)
        trace.placed = sum(whole.values())
        return trace

    def room(self, largest: int, whole: int, recomputes: bool) -> int:
        """Return the bytes that regions of one kind take of what the budget counts; they share a
        ring.
        """
        if not whole:
            return 0
        if self.on_host:
            return min(self._memory, whole + _PAGE)
        if self.offload.ring != "auto":
            return int(self.offload.ring)
        return -(-largest // _UNIT) * _UNIT * (REGIONS if recomputes else SAVED)

    @property
    def _memory(self) -> int:
        """Host memory of a place."""
        return self.offload.host_bytes()

    def holds(self, trace: StepTrace) -> bool:
        """Return whether the host has room for the payloads of a step."""
        return self.host_budget is None or trace.placed <= self.host_budget

    # ---- time

    @property
    def most(self) -> float:
        """The seconds of a byte that goes out and comes back while nothing else is done."""
        return 1 / self.link.rate_out + 1 / self.link.rate_in

    def exposed(self, calls: Sequence[Call]) -> float:
        """Return the seconds for which a step waits for the link, by simulation."""
        ring = self._moves_through(calls)
        rows = array.array("q")
        for call in calls:
            least, most = (part * call.keep for part in _FORWARD)
            forward = min(max(call.recompute - call.keep, least), most)
            backward = max(call.seconds - call.codec - forward, 0.0)
            parts = math.ceil(call.bytes / call.largest) if call.bytes and call.largest else 1
            times = [_ns(each / parts) for each in (forward, backward, call.codec / 2, call.codec / 2)]
            size = math.ceil(call.bytes / parts)
            rows.extend(x for _ in range(parts) for x in (*times, min(size, ring), int(size > 0)))
        found = _C.simulate_offload(
            rows,
            rate_out=self.link.rate_out,
            rate_in=self.link.rate_in,
            latency=self.link.latency,
            ring=ring,
            held=self._held(ring),
            head=0,
        )
        return (found["exposed_forward"] + found["exposed_backward"]) / 1e9

    def _moves_through(self, calls: Sequence[Call]) -> int:
        """Return the bytes of the rings of a step, or of a store's memory."""
        kinds = {call.recomputes for call in calls if call.bytes}
        if self.on_host:
            return self._memory * len(kinds)
        largest = {kind: max(call.largest for call in calls if call.recomputes == kind) for kind in kinds}
        return sum(self.room(size, size, kind) for kind, size in largest.items())

    def _held(self, ring: int) -> int:
        """Return the newest bytes that stay: a store writes what is beyond half of its memory."""
        if self.on_host:
            return ring // 2
        return ring // 3 if self.offload.keep_last == "auto" else min(int(self.offload.keep_last), ring)


def _ns(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)


def placement_of(offload: Offload | None, device: torch.device, link: Link | None = None) -> Placement | None:
    """Return the placement of a live model's payloads; ``link``: None: it is measured.

    Raises:
        ValueError, MemoryError: The place cannot be used.
    """
    if offload is None:
        return None
    on_host = device.type == "cpu"
    place_of(offload)  # its errors are said now
    found = link_between(device, offload) if link is None else link
    return Placement(offload, found, on_host, offload.host_bytes() if offload.place == "cpu" else None)


def placed_by_block(segments: Iterable[Segment]) -> dict[int, tuple[int, int]]:
    """Return, for each block that has payloads in a place, their bytes and those of the largest."""
    found: dict[int, tuple[int, int]] = {}
    for segment in segments:
        if segment.block is not None and segment.placed_bytes:
            size, largest = found.get(segment.block, (0, 0))
            found[segment.block] = size + segment.placed_bytes, max(largest, segment.largest)
    return found
