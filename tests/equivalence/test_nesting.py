"""Checkpoints, hooks and kept calls inside one another, with backwards inside: right, or they raise
where torch's raise."""

import itertools
import random

import pytest
from nestings import ENDINGS, LEVELS, PROGRAMS, Reference, command, pairs, triples, verdict

SHARES = 8  # of the triples, each a test
REFERENCE = Reference()
#: Of `make test`: what was wrong once, and one of each level within each kind of region.
CORE = [
    ("None", "torch", "kept"),
    ("None", "saved lossless", "torch"),
    ("torch", "saved lossless", "torch"),
    ("int8", "saved int8", "torch"),
    ("None", "saved lossless"),
    ("int8", "saved int8"),
    ("policy", "saved lossless"),
    ("one node policy", "policy function"),
    *(("None", name) for name in LEVELS),
    *(("int8", name) for name in LEVELS),
    *((name, "kept") for name in LEVELS),
]


def check(nestings):
    """Every program and ending of these; what is wrong, with the command that runs it alone."""
    programs = itertools.product(nestings, PROGRAMS, ENDINGS)
    found = {command(*each): wrong for each in programs if (wrong := verdict(*each, REFERENCE)) is not None}
    assert not found, f"{len(found)} nestings:\n" + "\n".join(f"{name}: {wrong}" for name, wrong in found.items())


def test_levels_alone():
    check([(name,) for name in LEVELS])


def test_nestings_that_were_wrong_once_and_every_level_in_a_region():
    check(CORE)


@pytest.mark.parametrize("outer", LEVELS)
def test_pairs(outer):
    check([levels for levels in pairs() if levels[0] == outer])


def test_some_triples():
    check(random.Random(0).sample(triples(), 60))


@pytest.mark.soak
@pytest.mark.failed_backward
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("outer", LEVELS)
def test_triples(outer, share):
    check([levels for levels in triples() if levels[0] == outer][share::SHARES])
