"""A plan of a model's config for a budget, with estimated times: :func:`plan_source`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Module

from gradckpt._offload import Offload
from gradckpt._planning.block_times import Cost
from gradckpt._planning.blocks import Blocks
from gradckpt._planning.budget import Budget
from gradckpt._planning.config_steps import ConfigSteps
from gradckpt._planning.devices import Device, find
from gradckpt._planning.estimates import Rates, rates_of
from gradckpt._planning.hints import as_flags
from gradckpt._planning.links import Link, link_of_device
from gradckpt._planning.needed_memory import held_blocks
from gradckpt._planning.options import RECOMPUTE, Option, allowed
from gradckpt._planning.placement import Placement
from gradckpt._planning.region_plan import Plan
from gradckpt._planning.step_profile import StepProfile
from gradckpt._planning.step_trace import StepTrace

__all__ = ["ConfigProfile", "plan_source"]

#: Whose rates compare options if no device is named.
_USUAL_DEVICE = "A100-80GB"


class _Estimates:
    """The costs of regions by the work that traces of the step have in them."""

    def __init__(self, profile: StepProfile, rates: Rates) -> None:
        self._seconds: dict[tuple[int, Option], float] = {}
        for option, trace in profile.traces.items():
            for segment in trace.segments:
                if segment.block is not None:
                    key = id(profile.blocks[segment.block]), option
                    calls = profile.calls.count(segment.block)
                    self._seconds[key] = self._seconds.get(key, 0.0) + rates.of_segment(segment) / calls

    def of(self, block: Module, option: Option) -> Cost | None:
        seconds = self._seconds.get((id(block), option))
        return None if seconds is None else Cost(seconds, 0.0)


class ConfigProfile(StepProfile):
    """The profile of a :class:`gradckpt._planning.config_model.ConfigModel`.

    Of a long run of equal blocks with equal options six run, and few of a pattern that repeats; the
    others are like them.

    Args:
        source: The model.
        tokens: The length of a sequence, None for other models.
        batch: Sequences or images.
        compress: The codecs that a plan may use.
        rates: Of the device that times are estimated for.
        progress: Is told what is being computed.
        placement: Where payloads may live, or None: on their device.
        tiles: In how many tiles MLPs may run, or None.

    Raises:
        NotOnPaper: The step asks for values.
        ValueError: As :func:`gradckpt.enable`, or the source refuses the batch.
    """

    estimated = True

    def __init__(
        self,
        source: Any,
        tokens: int | None,
        batch: int = 1,
        *,
        compress: Any = None,
        rates: Rates,
        progress: Callable[[str], None] = lambda text: None,
        placement: Placement | None = None,
        tiles: int | None = None,
    ) -> None:
        self._tokens, self._progress = tokens, progress
        self._rates = rates
        self.hints = as_flags(source.flags, source.takes)
        self._steps = ConfigSteps(source, tokens, batch)
        offload = None if placement is None else placement.offload
        blocks = self._steps.blocks
        super().__init__(source.model, blocks, allowed(compress, False, offload, blocks, tiles), placement)
        self.device_blocks = held_blocks(source.model, {**source.fixed, **source.extra})
        self.costs = _Estimates(self, rates)
        self.step_seconds = rates.of_step(self.traces[RECOMPUTE])

    @contextlib.contextmanager
    def _progressing(self) -> Iterator[Callable[[str], None]]:
        yield self._progress
        self._progress("choosing")

    def _trace(self, options: Sequence[Option], concentrated: bool) -> StepTrace:
        def active(short: Blocks) -> AbstractContextManager[Any]:
            return self.setting([options[each.start] for each in short.copies], short.modules).active(self.model)

        return self._steps.trace(active, self._tokens, options, concentrated=concentrated)


def plan_source(
    source: Any,
    tokens: int | None,
    batch: int,
    budget: Budget,
    *,
    compress: Any = None,
    device: Device | None = None,
    offload: Offload | None = None,
    link: Link | None = None,
    tiles: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Return the fastest plan of a :class:`gradckpt._planning.config_model.ConfigModel` within a
    budget.

    Raises:
        NoPlan: There is none.
        NotOnPaper, ValueError: As :class:`ConfigProfile`.
    """
    rated = find(_USUAL_DEVICE) if device is None else device
    rates = rates_of(rated, source.computes_in_16_bits)
    placement = None
    if offload is not None:
        known = isinstance(offload.host_budget, int) and offload.place == "cpu"
        found = link_of_device(rated, offload.place) if link is None else link
        placement = Placement(offload, found, False, offload.host_bytes() if known else None)
    profile = ConfigProfile(
        source, tokens, batch, compress=compress, rates=rates, progress=progress, placement=placement, tiles=tiles
    )
    fixed = {**source.fixed, **source.extra}
    chosen = profile.fastest(profile.chain(), budget, fixed)
    about = [*source.about, _times(rated, device is None)]
    if any(profile.options[option].codec for option in chosen.choice):
        about.append("Errors of gradients need weights: gradckpt.gradient_error(model, batch) measures them.")
    return profile.result(chosen, budget, fixed, about)


def _times(device: Device, is_usual: bool) -> str:
    text = f"Times are estimates by the data sheet of {device.name}"
    return f"{text}; name another device with --device." if is_usual else f"{text}."
