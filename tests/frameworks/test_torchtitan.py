"""torchtitan: its Llama under its policies and ours; what torchtitan_checks.py checks."""

import subprocess
import sys

import processes
import pytest
from checkout import EXAMPLES, PROGRAMS

CHECKS = PROGRAMS / "torchtitan_checks.py"


def call(*command):
    env = {**processes.environment(processes.ENGINES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def test_policies():
    out = call("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", CHECKS)
    assert " passed" in out
    assert "skipped" not in out


@pytest.mark.parametrize("options", [["--ac", "selective", "--compress", "none"], ["--ac", "full"]])
def test_example(options):
    out = call(EXAMPLES / "torchtitan_blocks.py", *options)
    assert "FAILED" not in out
    assert "24 regions" in out
