"""Devices, their links to other places, and payloads there: :func:`find`, :class:`Link`,
:class:`Placement`.

Rates are peaks from the vendors' data sheets and architecture white papers (NVIDIA GA102, AD102,
GB202, A100, H100, H200, B200, L4, L40S, T4, V100; AMD CDNA 3): dense matrix products with float32
accumulation, no sparsity. T4 and V100 lack bfloat16; theirs are of float16. Host links are one
direction of PCIe (x16) or NVLink-C2C. Memory is about what the runtime reports as total, which is
less than the name says and differs between drivers by up to 1 %; ECC is on where it is the default.

A ring on the device, through which payloads pass, counts in the budget; for tensors of the host,
whose place is a disk, the memory in which payloads live before they are written does. How long a
step waits for the link is simulated (csrc/offload/simulate.h).
"""

from __future__ import annotations

import array
import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from gradckpt import _C
from gradckpt._engine.places import REGIONS, SAVED, apart_from_others, place_of
from gradckpt._engine.saved_tensors import compress_saved
from gradckpt._offload import Offload
from gradckpt._planning.options import Option
from gradckpt._planning.segments import Segment, StepTrace
from gradckpt._stats import uncounted


class Device(NamedTuple):
    """``memory`` in bytes; ``bf16`` and ``fp32`` in TFLOP/s; ``bandwidth`` of the memory and
    ``link`` to the host in GB/s.
    """

    name: str
    memory: int
    bf16: float
    fp32: float
    bandwidth: float
    link: float


#: The known devices, by vendor and age.
DEVICES = tuple(
    Device(name, int(gib * 2**30), *rates)
    for name, gib, *rates in (
        ("T4", 14.6, 65, 8.1, 320, 16),
        ("V100-16GB", 15.8, 125, 15.7, 900, 16),
        ("V100-32GB", 31.7, 125, 15.7, 900, 16),
        ("RTX-3090", 23.6, 71, 35.6, 936, 32),
        ("RTX-A6000", 47.4, 155, 38.7, 768, 32),
        ("A10G", 22.0, 70, 31.5, 600, 32),
        ("A100-40GB", 39.4, 312, 19.5, 1555, 32),
        ("A100-80GB", 79.2, 312, 19.5, 2039, 32),
        ("RTX-4080", 15.6, 97.5, 48.7, 717, 32),
        ("RTX-4090", 23.5, 165, 82.6, 1008, 32),
        ("RTX-6000-Ada", 44.4, 364, 91.1, 960, 32),
        ("L4", 22.0, 121, 30.3, 300, 32),
        ("L40S", 44.4, 362, 91.6, 864, 32),
        ("H100-PCIe", 79.1, 756, 51, 2039, 64),
        ("H100-SXM", 79.1, 989, 67, 3350, 64),
        ("H200", 139.7, 989, 67, 4800, 64),
        ("GH200", 94.5, 989, 67, 4000, 450),
        ("RTX-5090", 31.4, 210, 105, 1792, 64),
        ("RTX-PRO-6000", 95.0, 504, 126, 1792, 64),
        ("B200", 178.3, 2250, 75, 7700, 64),
        ("MI300X", 191.7, 1307, 163, 5300, 64),
        ("MI325X", 255.7, 1307, 163, 6000, 64),
    )
)


def find(name: str) -> Device:
    """Return the device of a name, such as ``"RTX-4090"``, ``"rtx 4090"`` or ``"4090"``.

    Raises:
        ValueError: The name is unknown, or stands for several devices; the message lists them.
    """
    asked = _plain(name)
    found = [device for device in DEVICES if _plain(device.name) == asked]
    found = found or [device for device in DEVICES if asked and _plain(device.name).removeprefix("rtx") == asked]
    found = found or [device for device in DEVICES if asked and _plain(device.name).startswith(asked)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"gradckpt: device {name!r} has several forms; choose one of: {_names(found)}")
    near = difflib.get_close_matches(asked, [_plain(device.name) for device in DEVICES], 1, 0.75)
    meant = next((f"did you mean {device.name!r}? " for device in DEVICES if [_plain(device.name)] == near), "")
    raise ValueError(f"gradckpt: unknown device {name!r}; {meant}choose one of: {_names(DEVICES)}")


def _plain(name: str) -> str:
    """Return a name without vendor, spaces and punctuation."""
    return re.sub(r"^(nvidia|amd|geforce|tesla|instinct)+|gb$", "", re.sub(r"[\W_]", "", name.lower()))


def _names(devices: tuple[Device, ...] | list[Device]) -> str:
    return ", ".join(device.name for device in devices)


#: Rates that kernels reach, of a data sheet's.
_OF_COMPUTE, _OF_BANDWIDTH = 0.5, 0.8


class Rates(NamedTuple):
    """Floating point operations and bytes per second."""

    flops: float
    bytes: float

    def of_segment(self, segment: Segment) -> float:
        """Estimate the seconds of a segment: each operator takes the time of its
        arithmetic or of its memory, whichever is longer.
        """
        operators = sum(max(work.flop / self.flops, work.bytes / self.bytes) for work in segment.work)
        return operators + segment.payload_bytes / self.bytes

    def of_step(self, trace: StepTrace) -> float:
        """Estimate the seconds of a step."""
        return sum(self.of_segment(segment) for segment in trace.segments)


def rates_of(device: Device, in_16_bits: bool) -> Rates:
    """Return what kernels reach on a device: half its arithmetic, 80 % of its memory's rate."""
    return Rates(
        (device.bf16 if in_16_bits else device.fp32) * 1e12 * _OF_COMPUTE, device.bandwidth * 1e9 * _OF_BANDWIDTH
    )


#: GB/s in one direction that copies reach: about 80 % of a data sheet's, NVLink-C2C two thirds.
LINKS = {"pcie3": 12.5, "pcie4": 25.0, "pcie5": 50.0, "nvlink-c2c": 300.0, "nvme": 6.0}

#: ns that each copy takes beside its bytes.
_LATENCY = 10_000

#: What a disk's rates are measured with: payloads of this size, in as much memory, twice.
_PAYLOAD, _PAYLOADS, _MEMORY = 4 << 20, 8, 16 << 20

#: Bytes that are copied to measure a device's link, and how often.
_COPIED, _TRIES = 16 << 20, 3


@dataclasses.dataclass(frozen=True)
class Link:
    """``rate_out``, ``rate_in``: bytes a second. ``latency``: ns of each copy. ``source``: where
    the rates come from, in words.
    """

    rate_out: int
    rate_in: int
    latency: int
    source: str

    def __str__(self) -> str:
        out, back = (f"{rate / 1e9:.3g}" for rate in (self.rate_out, self.rate_in))
        rates = f"{out} GB/s" if out == back else f"{out} GB/s out and {back} GB/s back"
        return f"{rates}, {self.source}"


def parse_link(link: Any) -> Link:
    """Return the link that a name or a rate in GB/s means.

    Raises:
        ValueError: It is neither.
    """
    text = str(link).strip().lower()
    if text in LINKS:
        return _symmetric(LINKS[text], f"as {text} reaches")
    try:
        rate = float(text) if not isinstance(link, bool) else 0.0
    except ValueError:
        rate = 0.0
    if not 1e-3 <= rate <= 1e6:
        raise ValueError(f"gradckpt: link={link!r} is no link; pass GB/s, as in 25, or one of: {', '.join(LINKS)}")
    return _symmetric(rate, "as given")


def _symmetric(rate: float, source: str) -> Link:
    return Link(round(rate * 1e9), round(rate * 1e9), _LATENCY, source)


def link_of_device(device: Device, place: str) -> Link:
    """Return the link of a data sheet's device: to the host, or to one NVMe disk if that is the
    place.
    """
    if place == "disk":
        return parse_link("nvme")
    name = next(
        name
        for name, least in (("nvlink-c2c", 100), ("pcie5", 64), ("pcie4", 32), ("pcie3", 0))
        if device.link >= least
    )
    return dataclasses.replace(parse_link(name), source=f"as {name} of {device.name} reaches")


def link_between(device: torch.device, offload: Offload) -> Link:
    """Measure the link from a device to a place; payloads of a device go to a disk by the slower of
    two links.

    Raises:
        ValueError, MemoryError: The place cannot be used.
    """
    links = [_disk(offload)] if offload.place == "disk" else []
    if device.type == "cuda":
        links.append(_host(device))
    return min(links, key=lambda link: link.rate_out + link.rate_in, default=Link(1, 1, 0, "none"))


@functools.cache
def _host(device: torch.device) -> Link:
    """Measure copies between a device and pinned memory; if they fail, take the data sheet's."""
    name = torch.cuda.get_device_name(device)
    try:
        near = torch.empty(_COPIED, dtype=torch.uint8, device=device)
        far = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
        out, back = (min(_copied(*pair, device) for _ in range(_TRIES)) for pair in ((far, near), (near, far)))
        return Link(round(_COPIED / out), round(_COPIED / back), _LATENCY, f"measured on {name}")
    except RuntimeError:
        return link_of_device(find(name), "cpu")


def _copied(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    """Return the seconds of a copy."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        begin.record()
        to.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
    return max(float(begin.elapsed_time(end)) / 1e3, 1e-9)


def _disk(offload: Offload) -> Link:
    """Measure what a store writes and reads: the second of two rounds, since the first makes the
    file.
    """
    place = apart_from_others(Offload("disk", directory=offload.directory, host_budget=_MEMORY, min_bytes=4096))
    config = compress_saved("raw").config
    with uncounted():
        pack, unpack = _C.saved_pair(config, (), place)
        payload = torch.arange(_PAYLOAD // 4, dtype=torch.float32, requires_grad=True)
        tensors = [payload * 1 for _ in range(_PAYLOADS)]
        found = []
        for _ in range(2):
            before = place.figures()
            packed = [pack(x) for x in tensors]
            while packed:
                unpack(packed.pop())
            found = [place.figures()[name] - before[name] for name in ("written", "write_ns", "read", "read_ns")]
    rates = [max(round(found[i] * 1e9 / max(found[i + 1], 1)), 1) if found[i] else 0 for i in (0, 2)]
    out, back = (rate or max(rates) or round(LINKS["nvme"] * 1e9) for rate in rates)
    return Link(out, back, _LATENCY, f"measured in {offload.directory}")


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
        payloads = [
            (each.block is not None and options[each.block].recomputes, each.placed_bytes, each.largest)
            for each in trace.segments
            if each.placed_bytes
        ]
        trace.ring = self.ring(payloads)
        trace.placed = sum(size for _, size, _ in payloads)
        return trace

    def ring(self, payloads: Sequence[tuple[bool, int, int]]) -> int:
        """Return the bytes of the budget that payloads take: of each whether its region recomputes,
        its bytes, and those of the largest in it.
        """
        found = 0
        for kind in (True, False):
            sizes = [(size, largest) for recomputes, size, largest in payloads if recomputes == kind]
            found += self.room(max((each for _, each in sizes), default=0), sum(size for size, _ in sizes), kind)
        return found

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
