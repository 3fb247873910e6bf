"""How fast payloads leave a device and come back: :class:`Link`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from gradckpt import _C
from gradckpt._engine.places import apart_from_others
from gradckpt._engine.saved_tensors import compress_saved
from gradckpt._offload import Offload
from gradckpt._planning.devices import Device, find
from gradckpt._stats import uncounted

__all__ = ["LINKS", "Link", "link_between", "link_of_device", "parse_link"]

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
