"""A recompute that differs harmlessly is right: caches of the first call, counters, metrics,
gathered and exchanged parameters."""

import pytest
from harmless_runs import MAKERS, MODES, modes_of, programs, verdict

PROGRAMS = programs()
SHARES = 8
#: Of `make test`.
CORE = ("torch", "None", "lossless", "int8", "save_matmuls", "policy function", "one node int8", "saved int8")


def check(chosen, modes=tuple(MODES)):
    """Each in these modes, torch's own first; what is wrong, with the command that runs it."""
    found = []
    for program in chosen:
        for mode in (mode for mode in modes_of(program) if mode in modes):
            wrong = verdict(program, mode)
            if wrong is not None:
                found.append(f"python harmless_runs.py {program.number} '{mode}': {program}: {wrong}")
    assert not found, f"{len(found)} programs:\n" + "\n".join(found)


@pytest.mark.parametrize("share", range(SHARES))
def test_a_recompute_that_differs_harmlessly_is_right(share):
    check(PROGRAMS[share::SHARES])


def test_each_harmless_difference_is_right_at_one_position():
    check([PROGRAMS[i % 4 * len(MAKERS) + i] for i in range(len(MAKERS))], CORE)


def test_there_are_enough_programs():
    assert len(PROGRAMS) >= 150
    assert len({str(program) for program in PROGRAMS}) == len(PROGRAMS)
