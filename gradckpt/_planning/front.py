"""Budgets, and the seconds of the fastest plan that is known for each: :func:`front_of`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gradckpt._planning.chain import Chain
from gradckpt._planning.choose import Choice, Chosen, Costs, choices_within, fastest_by_bytes
from gradckpt._planning.options import KEEP, Option
from gradckpt._planning.placement import Placement
from gradckpt._planning.step_trace import StepTrace

__all__ = ["PRICES", "front_of"]

#: Prices of placed bytes that plans are made for, in parts of what they take on a busy link.
PRICES = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0)

#: Limits that plans with places are looked for in, and how many of these are traced.
_LIMITS, _POINTS = 32, 12


class Profile(Protocol):
    """What is asked of a :class:`gradckpt._planning.step_profile.StepProfile`."""

    calls: list[int]
    options: list[Option]
    placement: Placement | None
    largest: dict[Option, StepTrace]
    seen: set[Choice]

    @property
    def places(self) -> Mapping[Option, Any]: ...
    def chain(self) -> Chain: ...
    def trace_of(self, choice: Choice) -> StepTrace: ...
    def lift(self, trace: StepTrace) -> int: ...
    def size_of(self, trace: StepTrace) -> int: ...
    def needs(self, choice: Choice) -> int: ...
    def seconds(self, choice: Choice) -> float: ...
    def waits(self, choice: Choice) -> float: ...
    def expected(self, choice: Choice) -> float: ...
    def placed_by(self, block: int, option: int) -> tuple[int, int]: ...
    def kinds(self) -> list[tuple[bool, ...]]: ...
    def call_costs(self, limits_error: bool, price: float = 0.0, kinds: Sequence[bool] = ()) -> Costs: ...


def front_of(profile: Profile, chosen: Chosen, squares: float | None) -> tuple[tuple[int, float], ...]:
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


def _traced(profile: Profile, chosen: Chosen, squares: float | None) -> list[Choice]:
    """Return choices that are faster than all of fewer bytes, by their traces."""
    permitted = [each for each in profile.seen if squares is None or profile.expected(each) ** 2 <= squares]
    sizes = {each: profile.size_of(profile.trace_of(each)) for each in permitted}
    new = [each for each in _front(profile, _estimates(profile, chosen, squares) | sizes) if each not in sizes]
    step = max(-(-len(new) // _POINTS), 1)
    sizes |= {each: profile.size_of(profile.trace_of(each)) for each in new[::step]}
    return _front(profile, {each: size for each, size in sizes.items() if _has_room(profile, each)})


def _has_room(profile: Profile, choice: Choice) -> bool:
    assert profile.placement is not None
    return profile.placement.holds(profile.trace_of(choice))


def _front(profile: Profile, sizes: dict[Choice, int]) -> list[Choice]:
    """Return those that are faster than all of fewer bytes, by bytes."""
    found: list[Choice] = []
    for each in sorted(sizes, key=lambda each: (sizes[each], profile.seconds(each), each)):
        if not found or profile.seconds(each) < profile.seconds(found[-1]):
            found.append(each)
    return found


def _estimates(profile: Profile, chosen: Chosen, squares: float | None) -> dict[Choice, int]:
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
            choices = choices_within(chain, costs, limits, squares, profile.trace_of)
            for each in choices:
                sizes[each] = max(level.size for level in chain.levels(each)) + _ring(profile, each)
            if not any(map(profile.waits, choices)):
                break  # nothing waits where a place costs nothing
    return sizes


def _ring(profile: Profile, choice: Sequence[int]) -> int:
    """Return the bytes of the budget that the place of a choice takes."""
    assert profile.placement is not None
    found = 0
    for kind in (True, False):
        calls = [
            profile.placed_by(block, option)
            for block, option in zip(profile.calls, choice, strict=True)
            if profile.options[option].recomputes == kind
        ]
        found += profile.placement.room(max((one for _, one in calls), default=0), sum(size for size, _ in calls), kind)
    return found
