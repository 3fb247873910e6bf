"""The memory of a step as a chain of regions, each in one of its options: :class:`Chain`; and the
search for plans of an error budget: :func:`approach`.

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
import math
from collections.abc import Callable, Mapping, Sequence

from gradckpt._planning.options import RECOMPUTE, Option
from gradckpt._planning.segments import Segment, StepTrace

Choice = tuple[int, ...]  # the option of each call, by number

#: ``need`` of an option that a region does not have.
UNAVAILABLE = 2**63 - 1
_FORWARD, _END, _BACKWARD = "forward", "end", "backward"


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
    changes = (size for segment in segments for size, _ in segment.events)
    sizes = list(itertools.accumulate(changes, initial=0))
    return _Size(sizes[-1], max(sizes))


def _tops(sizes: Sequence[_Size]) -> list[int]:
    """Return the highest point of each of these, one after another."""
    starts = itertools.accumulate((size.net for size in sizes), initial=0)
    return [start + size.top for start, size in zip(starts, sizes, strict=False)]


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

    def levels(self, choice: Sequence[int]) -> list[int]:
        """Return the highest point of each stretch, in bytes above the start of the step, for an
        option of each call.
        """
        sizes = [each[self._option(i, choice)] for i, each in enumerate(self._sizes)]
        return [top + more for top, more in zip(_tops(sizes), self._corrections, strict=True)]

    def _option(self, stretch: int, choice: Sequence[int]) -> int:
        """Return the option of a stretch; the loss has that of the call before it."""
        call = self._stretches[stretch].call
        if call is None and stretch:
            call = self._stretches[stretch - 1].call
        return self._base if call is None else choice[call]

    def levels_of(self, segments: Sequence[Segment], lift: int = 0) -> list[int]:
        """Return the same of a trace; ``lift``: bytes that its allocator needs beyond."""
        sizes = [_size([segments[i] for i in stretch.segments]) for stretch in self._stretches]
        return [top + lift for top in _tops(sizes)]

    def correct(self, choice: Sequence[int], actual: Sequence[int]) -> None:
        """Let the levels of a choice be those of its trace; those of others move with them, and the
        planner's numbers are exact for it.
        """
        self._reference = list(choice)
        for i, (level, known) in enumerate(zip(self.levels(choice), actual, strict=True)):
            self._corrections[i] += known - level

    # ---- the planner's numbers

    def kept(self, call: int, option: int) -> int:
        """Return the bytes that a call leaves for its backward."""
        return self._sizes[self._forwards[call]][option].net

    def numbers(self, given: Mapping[int, int]) -> tuple[array.array[int], array.array[int], int]:
        """Return ``kept`` and ``need`` of each call and option, and ``need`` after the last call;
        ``given``: the options that blocks must have.

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
                need.append(top if given.get(self.calls[call], option) == option else UNAVAILABLE)
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


@dataclasses.dataclass(frozen=True)
class Costs:
    """``seconds[call][option]``: of forward and backward. ``errors[call][option]``: squares of
    relative errors, or None where errors are not limited.
    """

    seconds: list[list[float]]
    errors: list[list[float]] | None = None


@dataclasses.dataclass(frozen=True)
class Chosen:
    """``choice``: the option of each call. ``trace``: its step. ``seconds``: of all calls.
    ``bound``: no plan is faster. ``smallest``: the least bytes of a plan, and that plan,
    with what its allocator needs beyond its peak. ``front``: (bytes, seconds) of faster and faster
    plans. ``excess``: bytes that a real step needs beyond its trace.
    """

    choice: Choice
    trace: StepTrace
    seconds: float
    bound: float
    smallest: tuple[int, Choice]
    front: tuple[tuple[int, float], ...]
    excess: int = 0

    @property
    def peak(self) -> int:
        """Bytes above the start of the step."""
        return self.trace.peak().size + self.excess


#: Of the error budget: what is aimed at, and what is enough.
_AIM, _ENOUGH = 0.95, 0.9

#: Limits that are tried, beside those whose choices are measured anyway.
_TURNS = 12

#: What is expected to have so many times the error budget is not measured.
_FAR = 2.0

#: Limits whose ratio is smaller are not told apart; a limit is not below this part of the last one.
_SAME, _LEAST = 1.01, 0.05


def approach(
    error: float,
    pick: Callable[[float | None], Choice | None],
    expected: Callable[[Choice], float],
    known: dict[Choice, float],
    measure: Callable[[Choice], float],
    steps: int,
) -> None:
    """Measure the errors of choices until one is a little below the error budget.

    Errors of regions, added as squares, order choices, and say about what the whole error is. So
    what is looked for is the limit of that sum, between one whose choice is within the budget and
    one whose choice is not.

    Args:
        error: The budget.
        pick: Return the best choice within a limit of expected errors, or without one; None if
            there is none.
        expected: Return the expected error of a choice.
        known: The errors of choices; those that are measured are added.
        measure: Measure an error.
        steps: How many choices to measure at most.
    """

    def error_of(choice: Choice) -> float:
        nonlocal steps
        if choice not in known:
            known[choice] = measure(choice)
            steps -= 1
        return known[choice]

    choice = pick(None)
    if choice is None:
        return
    below, within = 0.0, 0.0  # a limit, and the error of its choice
    above, over = expected(choice), expected(choice)
    if choice in known or over <= _FAR * error:
        over = error_of(choice)
        if over <= error:
            return
    for _ in range(_TURNS):
        if steps < 1 or within >= _ENOUGH * error or above < below * _SAME:
            break
        limit = _limit_between(below, within, above, over, _AIM * error)
        choice = pick(limit)
        if choice is None:
            below = limit
        elif error_of(choice) > error:
            above, over = expected(choice), error_of(choice)
        else:
            below, within = limit, error_of(choice)
    if not within:
        pick(0.0)


def _limit_between(below: float, within: float, above: float, over: float, aim: float) -> float:
    """Return a limit whose choice might have the error ``aim``, as far as errors grow evenly."""
    if not within:
        limit = above * max(aim / over, _LEAST)
        return limit if limit > below else math.sqrt(below * above)
    part = math.log(aim / within) / math.log(over / within)
    return below * math.pow(above / below, min(max(part, 0.1), 0.9))
