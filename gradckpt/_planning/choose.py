"""Choose an option for each region, within a budget: :class:`Chooser`; and what other budgets would
give: :func:`front_of`. A ``profile`` is a :class:`gradckpt._planning.step_profile.StepProfile`.

The planner solves the chain; a trace of its plan corrects what the chain does not know (tensors
that regions share), until a plan's trace stays within the budget and the planner knows no better.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from gradckpt import _C
from gradckpt._planning.chain import UNAVAILABLE, Chain, Choice, Chosen, Costs
from gradckpt._planning.options import KEEP
from gradckpt._planning.segments import StepTrace

_Point = TypeVar("_Point", bound=tuple[Any, ...])

#: Traces of plans to correct the chain.
_ROUNDS = 8

#: Options of all blocks that are called several times: if there are more, not all are tried.
_COMBINATIONS = 256

#: Byte buckets of the planner, when exact labels are too many.
_BUCKETS = 16384

#: Bytes that no step needs, and that the planner can count.
_LARGEST = 1 << 60


@dataclasses.dataclass(frozen=True)
class _Solution:
    choice: Choice | None
    seconds: float
    bound: float
    smallest: int
    front: tuple[tuple[int, float], ...]


class Chooser:
    """The choices of one step.

    Args:
        chain: The regions; it is corrected by the traces of plans.
        costs: Of each call and option.
        error_limit: The sum of squares of the calls' relative errors, or None.
        run: Return the trace of a plan's step, which runs once.
        lift: Return the bytes that a step's allocator needs beyond its peak; limits hold both.
        improve: Return a faster plan within a limit, from one.
    """

    def __init__(
        self,
        chain: Chain,
        costs: Costs,
        error_limit: float | None,
        run: Callable[[Choice], StepTrace],
        lift: Callable[[StepTrace], int] = lambda trace: 0,
        improve: Callable[[Choice, int], Choice] = lambda choice, limit: choice,
    ) -> None:
        self.lift = lift
        self.improve = improve
        self.chain = chain
        self.costs = costs
        self.error_limit = error_limit
        self.run = run
        #: Steps with one option in all calls, by its number.
        self.uniform = [(option,) * len(chain.calls) for option in range(len(chain.options))]
        #: Blocks that the step calls several times; their calls share an option.
        self.shared = [block for block in dict.fromkeys(chain.calls) if chain.calls.count(block) > 1]

    # ---- the planner

    def solve(self, limit: int) -> _Solution:
        """Return the planner's choice; calls of one block have the same option in it."""
        if not self.shared:
            return self._solve(limit, {})
        found: dict[Choice, _Solution] = {}

        def of(options: Choice) -> _Solution:
            """Solve with these options of the shared blocks."""
            if options not in found:
                found[options] = self._solve(limit, dict(zip(self.shared, options, strict=True)))
            return found[options]

        def rank(options: Choice) -> tuple[float, int, Choice]:
            return of(options).seconds, of(options).smallest, options

        every = range(len(self.chain.options))
        if len(every) ** len(self.shared) <= _COMBINATIONS:
            best = min(itertools.product(every, repeat=len(self.shared)), key=rank)
            bound = min(each.bound for each in found.values())
        else:
            best = self._improve(min(((option,) * len(self.shared) for option in every), key=rank), rank)
            bound = self._solve(limit, {}).bound  # where each call chooses
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

    def _solve(self, limit: int, given: Mapping[int, int]) -> _Solution:
        kept, need, last_need = self.chain.numbers(given)
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
        found = self.run(choice)
        self.chain.correct(choice, self._levels(found))
        return found

    def _levels(self, trace: StepTrace) -> list[int]:
        return self.chain.levels_of(trace.segments, self.lift(trace))

    def peak(self, choice: Choice) -> int:
        return self._peak_of(self.trace(choice))

    def _peak_of(self, trace: StepTrace) -> int:
        return max(self._levels(trace))

    def seconds(self, choice: Choice) -> float:
        return sum(self.costs.seconds[call][option] for call, option in enumerate(choice))

    # ---- plans

    def choose(self, limit: int) -> Chosen:
        """Return the fastest plan whose step stays within ``limit`` bytes above its start; if none
        does, the one that needs least.
        """
        found = self._best(limit)
        least = self.smallest()
        choice, solution = found or (least[1], self.solve(least[0]))
        seconds = self.seconds(choice)
        return Chosen(choice, self.trace(choice), seconds, min(solution.bound, seconds), least, solution.front)

    def within(self, limits: Iterable[int]) -> list[Choice]:
        """Return the planner's choice within each limit that has one, as the chain has it: none is
        traced. None where calls share a block.
        """
        found = [] if self.shared else [self.solve(limit).choice for limit in limits]
        return [choice for choice in dict.fromkeys(found) if choice is not None]

    def _best(self, limit: int) -> tuple[Choice, _Solution] | None:
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
            self.trace(self.uniform[option])  # the chain is exact around it, and has no plan's corrections
            self._try(limit, tried, bounds)
        candidates = [*tried, *(choice for choice in self.uniform if self._permits(choice))]
        within = [choice for choice in dict.fromkeys(candidates) if self._peak_of(self.run(choice)) <= limit]
        if not within:
            return None
        best = min(within, key=lambda choice: (self.seconds(choice), choice))
        best = self.improve(best, limit)
        self.trace(best)  # correct around it
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


def fastest_by_bytes(points: Iterable[_Point]) -> tuple[_Point, ...]:
    """Return the points (bytes, seconds, ...) that are faster than all of fewer bytes, by bytes."""
    front: list[_Point] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return tuple(front)


#: Squares of errors are counted in this many units of the limit.
_ERROR_UNITS = 1 << 20


def _units(error: float, unit: float) -> int:
    return math.ceil(error / unit) if error <= unit * (1 << 40) else 1 << 40  # also of one that is no number


#: New traces of changes whose peaks are about within the limit by the chain, for each that is made;
#: with places changes are of two blocks, too, if there are not more of one.
_TRIES, _NEARLY, _FEW = 4, 1.015, 64


def improved(
    profile: Any, choice: Choice, chain: Chain, limit: int, squares: float | None, most: float = math.inf
) -> Choice:
    """Change options of one block, or with places of two of few, while the step becomes faster,
    waits included, and its trace stays within the limit; ``most``: choices that may have been
    traced.
    """

    def within(each: Choice) -> bool:
        trace = profile.trace_of(each)
        chain.correct(each, chain.levels_of(trace.segments, profile.lift(trace)))
        return bool(profile.size_of(trace) <= limit)

    def changed() -> Choice | None:
        tries = 0
        for other in _faster(profile, choice, chain, limit, squares):
            is_new = other not in profile.seen
            if tries == _TRIES or (is_new and len(profile.seen) >= most):
                break
            tries += is_new
            if within(other):
                return other
            within(choice)  # correct around it again
        return None

    for _ in profile.calls:
        if not within(choice) or (other := changed()) is None:
            break
        choice = other
    return choice


def _faster(profile: Any, choice: Choice, chain: Chain, limit: int, squares: float | None) -> list[Choice]:
    """Return choices that differ in one block or in two, and are faster, by their times; their
    peaks are about within the limit by the chain.
    """
    changes = [(block, o) for block in dict.fromkeys(profile.calls) for o in range(len(profile.options))]
    sets: list[tuple[tuple[int, int], ...]] = [(change,) for change in changes]
    if profile.places and len(changes) <= _FEW:
        sets += itertools.combinations(changes, 2)
    now, found = profile.seconds(choice), []
    for each in sets:
        of = dict(each)
        other = tuple(of.get(block, option) for block, option in zip(profile.calls, choice, strict=True))
        if other == choice or max(chain.levels(other)) > limit * _NEARLY:
            continue
        if squares is not None and not profile.expected(other) ** 2 <= squares:  # also an error that is no number
            continue
        if (seconds := profile.seconds(other)) < now:
            found.append((seconds, other))
    return [other for _, other in sorted(set(found))]


#: Prices of placed bytes that plans are made for, in parts of what they take on a busy link.
PRICES = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0)

#: Limits that plans with places are looked for in, and how many of these are traced.
_LIMITS, _POINTS = 32, 12


def front_of(profile: Any, chosen: Chosen, squares: float | None) -> tuple[tuple[int, float], ...]:
    """Return bytes and seconds of plans, from the smallest one on: the planner's, and the two that
    were traced. Where payloads may have a place, each is traced, and then known to the profile,
    since the planner knows neither a ring nor waits; ``squares``: the most of their errors.
    """
    size, choice = chosen.smallest
    found = [(size, profile.seconds(choice)), (chosen.peak + profile.lift(chosen.trace), chosen.seconds)]
    if not profile.places:
        found += chosen.front
    else:
        found += [(profile.needs(each), profile.seconds(each)) for each in _traced(profile, chosen, squares)]
    return fastest_by_bytes(point for point in found if point[0] >= size)


def _traced(profile: Any, chosen: Chosen, squares: float | None) -> list[Choice]:
    """Return choices that are faster than all of fewer bytes, by their traces."""
    permitted = [each for each in profile.seen if squares is None or profile.expected(each) ** 2 <= squares]
    sizes = {each: profile.size_of(profile.trace_of(each)) for each in permitted}
    new = [each for each in _front(profile, _estimates(profile, chosen, squares) | sizes) if each not in sizes]
    step = max(-(-len(new) // _POINTS), 1)
    sizes |= {each: profile.size_of(profile.trace_of(each)) for each in new[::step]}
    has_room = profile.placement.holds
    return _front(profile, {each: size for each, size in sizes.items() if has_room(profile.trace_of(each))})


def _front(profile: Any, sizes: dict[Choice, int]) -> list[Choice]:
    """Return those that are faster than all of fewer bytes, by bytes."""
    return [each for _, _, each in fastest_by_bytes((sizes[each], profile.seconds(each), each) for each in sizes)]


def _estimates(profile: Any, chosen: Chosen, squares: float | None) -> dict[Choice, int]:
    """Return about the bytes of choices that may be the fastest of some budget, by a chain that is
    exact for the chosen one.
    """
    chain, trace = profile.chain(), chosen.trace
    chain.correct(chosen.choice, chain.levels_of(trace.segments, profile.lift(trace) - trace.ring))
    rings = max(each.ring for each in profile.largest.values())
    least, most = chosen.smallest[0] - rings, profile.size_of(profile.largest[KEEP])
    limits = [least + (most - least) * i // (_LIMITS - 1) for i in range(_LIMITS)]
    sizes: dict[Choice, int] = {}
    for kinds in profile.kinds():
        for price in PRICES if kinds else PRICES[:1]:
            costs = profile.call_costs(squares is not None, price, kinds)
            choices = Chooser(chain, costs, squares, profile.trace_of).within(limits)
            for each in choices:
                sizes[each] = max(chain.levels(each)) + _ring(profile, each)
            if not any(map(profile.waits, choices)):
                break  # nothing waits where a place costs nothing
    return sizes


def _ring(profile: Any, choice: Sequence[int]) -> int:
    """Return the bytes of the budget that the place of a choice takes."""
    calls = zip(profile.calls, choice, strict=True)
    payloads = [(profile.options[option].recomputes, *profile.placed_by(block, option)) for block, option in calls]
    found: int = profile.placement.ring(payloads)
    return found
