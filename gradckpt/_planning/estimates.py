"""How long a step takes by a device's data sheet: :class:`Rates`."""

from __future__ import annotations

from typing import NamedTuple

from gradckpt._planning.devices import Device
from gradckpt._planning.step_trace import Segment, StepTrace

__all__ = ["Rates", "rates_of"]

#: Rates that kernels reach, of a data sheet's.
_COMPUTE, _MEMORY = 0.5, 0.8


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
    return Rates((device.bf16 if in_16_bits else device.fp32) * 1e12 * _COMPUTE, device.bandwidth * 1e9 * _MEMORY)
