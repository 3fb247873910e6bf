"""A recompute that does something else than the forward is right, or raises and says where."""

from collections import Counter

import pytest
from differing_runs import DIFFERENCES, MODES, modes_of, programs, verdict

PROGRAMS = programs()
SHARES = 8


def check(chosen):
    """Each in every mode; what is wrong, with the command that runs it alone."""
    found = []
    for program in chosen:
        for mode in modes_of(program):
            _, wrong = verdict(program, mode)
            if wrong is not None:
                found.append(f"python differing_runs.py {program.number} '{mode}': {program}: {wrong}")
    assert not found, f"{len(found)} programs:\n" + "\n".join(found)


@pytest.mark.parametrize("share", range(SHARES))
def test_a_recompute_that_differs_is_right_or_says_where(share):
    check(PROGRAMS[share::SHARES])


def test_each_difference_is_noticed_or_costs_nothing():
    """One program of each difference, at another position each."""
    check([PROGRAMS[i % 7 * len(DIFFERENCES) + i] for i in range(len(DIFFERENCES))])


def test_there_are_enough_and_most_raise():
    assert len(PROGRAMS) >= 300
    assert len({str(program) for program in PROGRAMS}) == len(PROGRAMS)
    counts = Counter(verdict(program, mode)[0] for program in PROGRAMS[::11] for mode in MODES)
    assert counts["raises"] > counts["right"] / 2
