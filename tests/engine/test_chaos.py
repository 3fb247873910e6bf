"""Getters that run any Python: they drop references, collect garbage,
switch threads and raise (chaos.py)."""

import json
import os
import subprocess
import sys

import pytest
from checkout import HELPERS, ROOT


def run(first, count, tree=ROOT, env=None):
    """In a process of its own: torch's own checkpoint leaves cycles behind when it fails,
    and other tests count."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(tree / HELPERS.relative_to(ROOT) / "chaos.py"),
        str(first),
        str(count),
    ]
    out = subprocess.run(command, env={**os.environ, **(env or {})}, cwd=tree, capture_output=True, text=True)
    assert out.returncode == 0, (first, out.stdout[-1000:], out.stderr[-5000:])
    counts = json.loads(out.stdout)
    assert counts["programs"] == count
    assert counts["raised"] > count / 5
    assert counts["changed"] > count / 50


def test_programs_under_a_mode_that_does_anything():
    """Each exception arrives or reaches sys.unraisablehook, nothing is left behind, and what was
    not disturbed is equal to the last bit."""
    run(0, 500)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_twenty_thousand_under_sanitizers(sanitized):
    tree, env = sanitized
    for first in range(0, 20000, 1000):
        run(first, 1000, tree, env)
