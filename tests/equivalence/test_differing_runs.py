"""A recompute that does something else than the forward is right, or raises and says where; one
that differs harmlessly is right: caches of the first call, counters, metrics, gathered and
exchanged parameters."""

from collections import Counter

import differing_runs
import harmless_runs
import pytest

DIFFERING, HARMLESS = differing_runs.programs(), harmless_runs.programs()
SHARES = 8
#: Of `make test`.
CORE = ("torch", "None", "lossless", "int8", "save_matmuls", "policy function", "one node int8", "saved int8")


def check(chosen, runs, modes=None):
    """Each in these modes, or in all; what is wrong, with the command that runs it alone."""
    found = []
    for program in chosen:
        for mode in runs.modes_of(program):
            if modes is None or mode in modes:
                wrong = runs.verdict(program, mode)
                wrong = wrong[1] if isinstance(wrong, tuple) else wrong
                if wrong is not None:
                    found.append(f"python {runs.__name__}.py {program.number} '{mode}': {program}: {wrong}")
    assert not found, f"{len(found)} programs:\n" + "\n".join(found)


@pytest.mark.parametrize("share", range(SHARES))
def test_a_recompute_that_differs_is_right_or_says_where(share):
    check(DIFFERING[share::SHARES], differing_runs)


@pytest.mark.parametrize("share", range(SHARES))
def test_a_recompute_that_differs_harmlessly_is_right(share):
    check(HARMLESS[share::SHARES], harmless_runs)


def test_each_difference_is_noticed_or_costs_nothing():
    """One program of each difference, at another position each."""
    count = len(differing_runs.DIFFERENCES)
    check([DIFFERING[i % 7 * count + i] for i in range(count)], differing_runs)


def test_each_harmless_difference_is_right_at_one_position():
    count = len(harmless_runs.MAKERS)
    check([HARMLESS[i % 4 * count + i] for i in range(count)], harmless_runs, CORE)


@pytest.mark.parametrize(("programs", "least"), [(DIFFERING, 300), (HARMLESS, 150)], ids=["differing", "harmless"])
def test_there_are_enough_programs(programs, least):
    assert len(programs) >= least
    assert len({str(program) for program in programs}) == len(programs)


def test_most_differences_raise():
    chosen = [(program, mode) for program in DIFFERING[::11] for mode in differing_runs.MODES]
    counts = Counter(differing_runs.verdict(*each)[0] for each in chosen)
    assert counts["raises"] > counts["right"] / 2
