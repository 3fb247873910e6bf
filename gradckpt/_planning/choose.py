"""Choose an option for each region, within a budget: :func:`choose`.

The planner solves the chain; a trace of its plan corrects what the chain does not know (tensors
that regions share), until a plan's trace stays within the budget and the planner knows no better.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gradckpt import _C
from gradckpt._planning.chain import UNAVAILABLE, Chain, Level
from gradckpt._planning.step_trace import StepTrace

__all__ = ["Choice", "Chosen", "Costs", "Infeasible", "choices_within", "choose", "fastest_by_bytes", "smallest"]

#: Traces of plans: to correct the chain, and to try what is a little over the budget by it.
_ROUNDS, _TRIES = 8, 4
#: Of the budget: how much higher a plan may be by the chain and still be tried.
_NEAR = 0.015
#: Options of all blocks that are called several times: if there are more, not all are tried.
_COMBINATIONS = 256
#: Byte buckets of the planner, when exact labels are too many.
_BUCKETS = 16384

#: Bytes that no step needs, and that the planner can count.
_LARGEST = 1 << 60

Choice = tuple[int, ...]


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


class Infeasible(Exception):
    """``smallest``: the least bytes of a plan, and that plan; ``trace``: its step."""

    def __init__(self, smallest: tuple[int, Choice], trace: StepTrace) -> None:
        super().__init__(smallest)
        self.smallest = smallest
        self.trace = trace


@dataclasses.dataclass(frozen=True)
class _Solution:
    choice: Choice | None
    seconds: float
    bound: float
    smallest: int
    front: tuple[tuple[int, float], ...]


def _no_lift(trace: StepTrace) -> int:
    return 0


class _Chooser:
    def __init__(
        self,
        chain: Chain,
        costs: Costs,
        error_limit: float | None,
        run: Callable[[Choice], StepTrace],
        uniform: Sequence[StepTrace] = (),
        lift: Callable[[StepTrace], int] = _no_lift,
    ) -> None:
        self.lift = lift
        self.chain = chain
        self.costs = costs
        self.error_limit = error_limit
        self.run = run
        #: Steps with one option in all calls, by its number.
        self.uniform = [(option,) * len(chain.calls) for option in range(len(uniform))]
        self.traces: dict[Choice, StepTrace] = dict(zip(self.uniform, uniform, strict=True))
        #: Blocks that the step calls several times; their calls share an option.
        self.shared = [block for block in dict.fromkeys(chain.calls) if chain.calls.count(block) > 1]

    # ---- the planner

    def solve(self, limit: int) -> _Solution:
        """Return the planner's choice; calls of one block have the same option in it."""
        if not self.shared:
            return self._solve(limit, lambda call, option: True)
        found: dict[Choice, _Solution] = {}

        def of(options: Choice) -> _Solution:
            """Solve with these options of the shared blocks."""
            if options not in found:
                given = dict(zip(self.shared, options, strict=True))
                found[options] = self._solve(limit, lambda call, o: given.get(self.chain.calls[call], o) == o)
            return found[options]

        def rank(options: Choice) -> tuple[float, int, Choice]:
            return of(options).seconds, of(options).smallest, options

        every = range(len(self.chain.options))
        if len(every) ** len(self.shared) <= _COMBINATIONS:
            best = min(itertools.product(every, repeat=len(self.shared)), key=rank)
            bound = min(each.bound for each in found.values())
        else:
            best = self._improve(min(((option,) * len(self.shared) for option in every), key=rank), rank)
            bound = self._solve(limit, lambda call, option: True).bound  # where each call chooses
        return dataclasses.replace(
            found[best],
            bound=bound,
            smallest=min(each.smallest for each in found.values()),
            front=fastest_by_bytes(point for each in found.values() for point in each.front),
        )

    def _improve(self, options: Choice, rank: Callable[[Choice], Any]) -> Choice:
        """Change options of one or two neighbouring shared blocks, until no change is better."""
        every = range(len(self.chain.options))
        before = None
        while options != before:
            before = options
            for i in range(max(len(options) - 1, 1)):
                pairs = itertools.product(every, repeat=2)
                options = min(((*options[:i], *pair, *options[i + 2 :]) for pair in pairs), key=rank)
        return options

    def _solve(self, limit: int, available: Callable[[int, int], bool]) -> _Solution:
        kept, need, last_need = self.chain.numbers(available)
        seconds = array.array("q", [round(s * 1e9) for row in self.costs.seconds for s in row])
        errors, error_limit = None, 0
        if self.costs.errors is not None and self.error_limit is not None:
            unit = self.error_limit / _ERROR_UNITS if self.error_limit else 1.0
            errors = array.array("q", [_units(e, unit) for row in self.costs.errors for e in row])
            error_limit = _ERROR_UNITS if self.error_limit else 0
        found = _C.choose_options(
            len(self.chain.calls),
            len(self.chain.options),
            kept,
            need,
            seconds,
            errors,
            last_need,
            min(limit, _LARGEST),
            error_limit,
            _BUCKETS,
        )
        smallest = found["smallest_budget"]
        return _Solution(
            found["choices"],
            math.inf if found["time"] is None else found["time"] / 1e9,
            math.inf if found["lower_bound"] is None else found["lower_bound"] / 1e9,
            UNAVAILABLE if smallest is None else smallest,
            tuple((size, time / 1e9) for size, time, error in found["front"] if error <= error_limit),
        )

    # ---- traces

    def trace(self, choice: Choice) -> StepTrace:
        """Return the step of a choice, after which the chain knows its levels."""
        if choice not in self.traces:
            self.traces[choice] = self.run(choice)
        found = self.traces[choice]
        self.chain.correct(choice, self._levels(found))
        return found

    def _levels(self, trace: StepTrace) -> list[Level]:
        return self.chain.levels_of(trace.segments, self.lift(trace))

    def peak(self, choice: Choice) -> int:
        return self._peak_of(self.trace(choice))

    def _peak_of(self, trace: StepTrace) -> int:
        return max(level.size for level in self._levels(trace))

    def seconds(self, choice: Choice) -> float:
        return sum(self.costs.seconds[call][option] for call, option in enumerate(choice))

    # ---- plans

    def best(self, limit: int) -> tuple[Choice, _Solution] | None:
        """Return the fastest plan whose trace stays within the limit.

        The bound is the least that any state of the chain gave: each leaves out other tensors that
        regions share.
        """
        tried: dict[Choice, None] = {}
        bounds: list[float] = []
        for _ in range(_ROUNDS):
            if not self._try(limit, tried, bounds):
                break
        for option in sorted({option for choice in tried for option in choice}):
            if self.uniform:  # the chain is exact around it, and has no plan's corrections
                self.trace(self.uniform[option])
                self._try(limit, tried, bounds)
        candidates = [*tried, *(choice for choice in self.uniform if self._permits(choice))]
        within = [choice for choice in dict.fromkeys(candidates) if self._peak_of(self.traces[choice]) <= limit]
        if not within:
            return None
        best = min(within, key=lambda choice: (self.seconds(choice), choice))
        self.trace(best)  # correct around it
        for _ in range(len(best)):
            faster = self._faster(best, limit)
            if faster is None:
                break
            best = faster
        self.trace(best)
        solution = self.solve(limit)
        return best, dataclasses.replace(solution, bound=min([*bounds, solution.bound]))

    def _try(self, limit: int, tried: dict[Choice, None], bounds: list[float]) -> bool:
        """Trace the planner's present choice; return whether it is a new one."""
        solution = self.solve(limit)
        if solution.choice is None:
            return False
        bounds.append(solution.bound)
        if solution.choice in tried:
            return False
        self.trace(solution.choice)
        tried[solution.choice] = None
        return True

    def _faster(self, choice: Choice, limit: int) -> Choice | None:
        """Return a faster plan that differs in one block and is within the limit by its trace."""
        tries = 0
        for _, candidate in sorted(self._changes(choice, limit)):
            if tries == _TRIES:
                return None
            if candidate not in self.traces:
                tries += 1
            if self.peak(candidate) <= limit:
                return candidate
            self.trace(choice)  # correct around the plan again
        return None

    def _changes(self, choice: Choice, limit: int) -> Iterator[tuple[float, Choice]]:
        now = self.seconds(choice)
        for block in dict.fromkeys(self.chain.calls):
            calls = [call for call, each in enumerate(self.chain.calls) if each == block]
            for option in range(len(self.chain.options)):
                changed = list(choice)
                for call in calls:
                    changed[call] = option
                candidate = tuple(changed)
                seconds = self.seconds(candidate)
                if seconds >= now or not self._permits(candidate):
                    continue
                if max(level.size for level in self.chain.levels(candidate)) <= limit * (1 + _NEAR):
                    yield seconds, candidate

    def _permits(self, choice: Choice) -> bool:
        """Return whether the error of a choice is within its limit."""
        if self.costs.errors is None or self.error_limit is None:
            return True
        return sum(self.costs.errors[call][option] for call, option in enumerate(choice)) <= self.error_limit

    def smallest(self) -> tuple[int, Choice]:
        """Return the least bytes that a plan needs by its trace, and that plan."""
        found = {choice: self.peak(choice) for choice in self.uniform if self._permits(choice)}
        if found:
            self.trace(min(found, key=lambda each: found[each]))  # correct around it
        for _ in range(_ROUNDS):
            choice = self.solve(self.solve(0).smallest).choice
            if choice is None or choice in found:
                break
            found[choice] = self.peak(choice)
        best = min(found, key=lambda each: (found[each], each))
        return found[best], best


def fastest_by_bytes(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return those that are faster than all of fewer bytes, by bytes."""
    front: list[tuple[int, float]] = []
    for size, seconds in sorted(points):
        if not front or seconds < front[-1][1]:
            front.append((size, seconds))
    return tuple(front)


#: Squares of errors are counted in this many units of the limit.
_ERROR_UNITS = 1 << 20


def _units(error: float, unit: float) -> int:
    return math.ceil(error / unit) if error <= unit * (1 << 40) else 1 << 40  # also of one that is no number


def choose(
    chain: Chain,
    costs: Costs,
    limit: int,
    error_limit: float | None,
    run: Callable[[Choice], StepTrace],
    uniform: Sequence[StepTrace] = (),
    lift: Callable[[StepTrace], int] = _no_lift,
) -> Chosen:
    """Return the fastest plan whose step stays within ``limit`` bytes above its start.

    Args:
        chain: The regions; it is corrected by the traces of plans.
        costs: Of each call and option.
        limit: In bytes.
        error_limit: The sum of squares of the calls' relative errors, or None.
        run: Return the trace of a plan's step.
        uniform: Known traces: for each option of the chain, with that option in all calls.
        lift: Return the bytes that a step's allocator needs beyond its peak; the limit holds both.

    Raises:
        Infeasible: No plan stays within the limit.
    """
    chooser = _Chooser(chain, costs, error_limit, run, uniform, lift)
    found = chooser.best(limit)
    least = chooser.smallest()
    if found is None:
        size, choice = least
        if size > limit:
            raise Infeasible(least, chooser.trace(choice))
        found = choice, chooser.solve(size)
    choice, solution = found
    seconds = chooser.seconds(choice)
    return Chosen(choice, chooser.trace(choice), seconds, min(solution.bound, seconds), least, solution.front)


def choices_within(
    chain: Chain, costs: Costs, limits: Iterable[int], error_limit: float | None, run: Callable[[Choice], StepTrace]
) -> list[Choice]:
    """Return the planner's choice within each limit that has one, as the chain has it: none is
    traced. None where calls share a block; otherwise as :func:`choose`.
    """
    chooser = _Chooser(chain, costs, error_limit, run)
    found = [] if chooser.shared else [chooser.solve(limit).choice for limit in limits]
    return [choice for choice in dict.fromkeys(found) if choice is not None]


def smallest(
    chain: Chain,
    costs: Costs,
    error_limit: float | None,
    run: Callable[[Choice], StepTrace],
    uniform: Sequence[StepTrace] = (),
    lift: Callable[[StepTrace], int] = _no_lift,
) -> tuple[int, Choice]:
    """Return the least bytes that a plan needs, and that plan; as :func:`choose`."""
    return _Chooser(chain, costs, error_limit, run, uniform, lift).smallest()
