"""Operators and modules whose arguments are slices, expanded, transposed or in channels_last,
through every entry point and codec (helpers/layout_sweep.py): bit-equal to plain autograd, or as
near as with contiguous arguments."""

import re

import pytest
from checkout import HELPERS
from processes import printed_by

SOAK_PARTS = 8


def sweep(*options):
    """In a process of its own, for OpInfo."""
    printed = printed_by(HELPERS / "layout_sweep.py", *options)
    counts = {name: int(n) for n, name in re.findall(r"(\d+) ([a-z ]+)", printed.splitlines()[0])}
    assert counts["compressed"] > 0.7 * counts["cases"]
    assert counts.get("refused", 0) < 0.05 * counts["cases"]


def test_modules_and_operators_in_some_layouts():
    sweep("modules", "--few", "2")
    sweep("operators", "--few", "1", "--part", "0/2")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["modules", "operators"])
def test_every_layout_with_every_pair_of_entry_point_and_codec(what):
    sweep(what)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(SOAK_PARTS))
@pytest.mark.parametrize("what", ["modules", "operators"])
def test_every_layout_entry_point_and_codec(what, part):
    sweep(what, "--all", "--part", f"{part}/{SOAK_PARTS}")
