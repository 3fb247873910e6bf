"""Find plans whose measured error is a little below an error budget: :func:`approach`."""

from __future__ import annotations

import math
from collections.abc import Callable

from gradckpt._planning.choose import Choice

__all__ = ["approach"]

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
        limit = _between(below, within, above, over, _AIM * error)
        choice = pick(limit)
        if choice is None:
            below = limit
        elif error_of(choice) > error:
            above, over = expected(choice), error_of(choice)
        else:
            below, within = limit, error_of(choice)
    if not within:
        pick(0.0)


def _between(below: float, within: float, above: float, over: float, aim: float) -> float:
    """Return a limit whose choice might have the error ``aim``, as far as errors grow evenly."""
    if not within:
        limit = above * max(aim / over, _LEAST)
        return limit if limit > below else math.sqrt(below * above)
    part = math.log(aim / within) / math.log(over / within)
    return below * math.pow(above / below, min(max(part, 0.1), 0.9))
