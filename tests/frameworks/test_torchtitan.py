"""torchtitan: its Llama under its policies and ours; what torchtitan_checks.py checks."""

import processes
import pytest
import worlds
from checkout import PROGRAMS


def environment():
    return {**processes.environment(processes.ENGINES), "OMP_NUM_THREADS": "1"}


def test_policies():
    worlds.tests_pass(PROGRAMS / "torchtitan_checks.py", environment())


@pytest.mark.parametrize("options", [["--ac", "selective", "--compress", "none"], ["--ac", "full"]])
def test_example(options):
    worlds.example_passes("torchtitan_blocks", *options, env=environment())
