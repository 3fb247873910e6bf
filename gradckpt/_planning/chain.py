"""The memory of a step as a chain of regions, each in one of its options: :class:`Chain`.

A trace of the step with all regions in one option tells what each region adds and how high it
rises in that option. In a mixed step, what lies before a region depends on the options of the
regions before it alone, and so a plan's peak is a sum along the chain. The loss is as in a step
with the option of the last region, whose input may be freed in it. Where regions share a tensor
this is off by that tensor; :meth:`Chain.correct` takes the difference from a trace of the plan.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from gradckpt._planning.options import RECOMPUTE, Option
from gradckpt._planning.step_trace import Segment

__all__ = ["UNAVAILABLE", "Chain", "Level"]

#: ``need`` of an option that a region does not have.
UNAVAILABLE = 2**63 - 1

_FORWARD, _END, _BACKWARD = "forward", "end", "backward"


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """The highest point of a stretch of the step: ``size`` bytes above the start of the step."""

    name: str
    size: int


@dataclasses.dataclass(slots=True)
class _Stretch:
    """The forward or the backward of a call, or what lies outside of all: one or more segments."""

    phase: str  # forward, backward, or "" outside
    call: int | None
    segments: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Size:
    """What a stretch adds, and how high it rises above its start."""

    net: int
    top: int


def _size(segments: Sequence[Segment]) -> _Size:
    total = top = 0
    for segment in segments:
        for size, _ in segment.events:
            total += size
            if total > top:
                top = total
    return _Size(total, top)


def _stretches(segments: Sequence[Segment]) -> tuple[list[_Stretch], list[int]]:
    """Return the stretches of a trace in order, and the block of each call."""
    found: list[_Stretch] = []
    calls: list[int] = []
    open_calls: dict[int, list[int]] = {}
    for i, segment in enumerate(segments):
        phase, call = segment.phase, None
        if segment.block is None:
            phase = ""
        elif phase == _FORWARD:
            call = len(calls)
            calls.append(segment.block)
            open_calls.setdefault(segment.block, []).append(call)
        elif phase == _END:
            phase, call = _FORWARD, open_calls[segment.block][-1]
        elif open_calls.get(segment.block):
            call = open_calls[segment.block].pop()
        else:
            raise ValueError(f"gradckpt: the backward of region {segment.block} ran twice; such a step has no plan")
        if found and (found[-1].phase, found[-1].call) == (phase, call):
            found[-1].segments.append(i)
        else:
            found.append(_Stretch(phase, call, [i]))
    return found, calls


class Chain:
    """``calls``: the number of the block that each call in the step's forward calls. ``options``:
    their order is that of the numbers in a choice.
    """

    def __init__(self, traces: Mapping[Option, Sequence[Segment]]) -> None:
        self.options = list(traces)
        base = traces[RECOMPUTE]
        shape = [(segment.phase, segment.block) for segment in base]
        for option, segments in traces.items():
            if [(segment.phase, segment.block) for segment in segments] != shape:
                raise ValueError(
                    f"gradckpt: with {option.name!r} the step calls its regions in another order; choose other modules="
                )
        self._stretches, self.calls = _stretches(base)
        self._base = self.options.index(RECOMPUTE)
        self._sizes = [
            [_size([traces[option][i] for i in stretch.segments]) for option in self.options]
            for stretch in self._stretches
        ]
        self._corrections = [0] * len(self._stretches)
        self._reference = [self._base] * len(self.calls)  # the other calls, in a call's numbers
        self._forwards = {s.call: i for i, s in enumerate(self._stretches) if s.phase == _FORWARD}
        self._backwards = {s.call: i for i, s in enumerate(self._stretches) if s.phase == _BACKWARD}
        #: The loss, by the call before it, which its size depends on.
        self._losses = {
            before.call: i
            for i, (before, stretch) in enumerate(itertools.pairwise(self._stretches), 1)
            if stretch.call is None and before.call is not None
        }

    # ---- a plan's levels

    def levels(self, choice: Sequence[int]) -> list[Level]:
        """Return the highest point of each stretch, in order, for an option of each call."""
        alive = 0
        found = []
        for i, stretch in enumerate(self._stretches):
            size = self._sizes[i][self._option(i, choice)]
            found.append(Level(self._name(stretch), alive + size.top + self._corrections[i]))
            alive += size.net
        return found

    def _option(self, stretch: int, choice: Sequence[int]) -> int:
        """Return the option of a stretch; the loss has that of the call before it."""
        call = self._stretches[stretch].call
        if call is None and stretch:
            call = self._stretches[stretch - 1].call
        return self._base if call is None else choice[call]

    def levels_of(self, segments: Sequence[Segment], lift: int = 0) -> list[Level]:
        """Return the same of a trace; ``lift``: bytes that its allocator needs beyond."""
        alive = 0
        found = []
        for stretch in self._stretches:
            size = _size([segments[i] for i in stretch.segments])
            found.append(Level(self._name(stretch), alive + size.top + lift))
            alive += size.net
        return found

    def _name(self, stretch: _Stretch) -> str:
        if stretch.call is None:
            return "before the layers" if stretch is self._stretches[0] else "loss"
        return f"{stretch.phase} of layer {self.calls[stretch.call]}"

    def correct(self, choice: Sequence[int], actual: Sequence[Level]) -> None:
        """Let the levels of a choice be those of its trace; those of others move with them, and the
        planner's numbers are exact for it.
        """
        self._reference = list(choice)
        for i, (level, known) in enumerate(zip(self.levels(choice), actual, strict=True)):
            self._corrections[i] += known.size - level.size

    # ---- the planner's numbers

    def kept(self, call: int, option: int) -> int:
        """Return the bytes that a call leaves for its backward."""
        return self._sizes[self._forwards[call]][option].net

    def numbers(self, available: Callable[[int, int], bool]) -> tuple[array.array[int], array.array[int], int]:
        """Return ``kept`` and ``need`` of each call and option, and ``need`` after the last call.

        ``need``: bytes above what the calls before keep, at the highest point of the call's forward
        and backward.
        """
        kept, need = array.array("q"), array.array("q")
        before, after = self._outside()
        for call in range(len(self.calls)):
            forward, backward = self._forwards[call], self._backwards.get(call)
            loss = self._losses.get(call)
            for option in range(len(self.options)):
                size = self._sizes[forward][option]
                top = before + size.top + self._corrections[forward]
                kept_here = size.net
                if loss is not None:
                    in_loss = self._sizes[loss][option]
                    top = max(top, before + size.net + in_loss.top + self._corrections[loss])
                    kept_here += in_loss.net - self._sizes[loss][self._reference[call]].net
                if backward is not None:
                    above = after[call] + kept_here + self._sizes[backward][option].top + self._corrections[backward]
                    top = max(top, above)
                kept.append(size.net)
                need.append(top if available(call, option) else UNAVAILABLE)
        return kept, need, self._last_need(before)

    def _outside(self) -> tuple[int, dict[int, int]]:
        """Return what is alive besides what calls keep: in the forward, and in the backward of each
        call.
        """
        before = alive = 0
        after: dict[int, int] = {}
        for i, stretch in enumerate(self._stretches):
            size = self._sizes[i][self._option(i, self._reference)]
            if stretch.call is None:
                alive += size.net
                before = alive if i == 0 else before
            elif stretch.phase == _BACKWARD:
                after[stretch.call] = alive
                alive += size.net + self._sizes[self._forwards[stretch.call]][self._reference[stretch.call]].net
        return before, after

    def _last_need(self, before: int) -> int:
        top = alive = 0
        losses = set(self._losses.values())
        for i, stretch in enumerate(self._stretches):
            if stretch.call is not None or i in losses:
                continue
            size = self._sizes[i][self._base]
            top = max(top, alive + size.top + self._corrections[i])
            alive += size.net
        return max(top, before)
