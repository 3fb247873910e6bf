"""Figures of devices that people train on: :func:`find`.

Rates are peaks from the vendors' data sheets and architecture white papers (NVIDIA GA102, AD102,
GB202, A100, H100, H200, B200, L4, L40S, T4, V100; AMD CDNA 3): dense matrix products with float32
accumulation, no sparsity. T4 and V100 lack bfloat16; theirs are of float16. Host links are one
direction of PCIe (x16) or NVLink-C2C. Memory is about what the runtime reports as total, which is
less than the name says and differs between drivers by up to 1 %; ECC is on where it is the default.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

__all__ = ["DEVICES", "Device", "find"]


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


def _device(name: str, gib: float, bf16: float, fp32: float, bandwidth: float, link: float) -> Device:
    return Device(name, int(gib * 2**30), bf16, fp32, bandwidth, link)


#: The known devices, by vendor and age.
DEVICES = (
    _device("T4", 14.6, 65, 8.1, 320, 16),
    _device("V100-16GB", 15.8, 125, 15.7, 900, 16),
    _device("V100-32GB", 31.7, 125, 15.7, 900, 16),
    _device("RTX-3090", 23.6, 71, 35.6, 936, 32),
    _device("RTX-A6000", 47.4, 155, 38.7, 768, 32),
    _device("A10G", 22.0, 70, 31.5, 600, 32),
    _device("A100-40GB", 39.4, 312, 19.5, 1555, 32),
    _device("A100-80GB", 79.2, 312, 19.5, 2039, 32),
    _device("RTX-4080", 15.6, 97.5, 48.7, 717, 32),
    _device("RTX-4090", 23.5, 165, 82.6, 1008, 32),
    _device("RTX-6000-Ada", 44.4, 364, 91.1, 960, 32),
    _device("L4", 22.0, 121, 30.3, 300, 32),
    _device("L40S", 44.4, 362, 91.6, 864, 32),
    _device("H100-PCIe", 79.1, 756, 51, 2039, 64),
    _device("H100-SXM", 79.1, 989, 67, 3350, 64),
    _device("H200", 139.7, 989, 67, 4800, 64),
    _device("GH200", 94.5, 989, 67, 4000, 450),
    _device("RTX-5090", 31.4, 210, 105, 1792, 64),
    _device("RTX-PRO-6000", 95.0, 504, 126, 1792, 64),
    _device("B200", 178.3, 2250, 75, 7700, 64),
    _device("MI300X", 191.7, 1307, 163, 5300, 64),
    _device("MI325X", 255.7, 1307, 163, 6000, 64),
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
