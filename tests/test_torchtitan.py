"""torchtitan: its Llama under its policies and ours; what torchtitan_checks.py checks."""

import subprocess
import sys
from pathlib import Path

import frameworks

CHECKS = Path(__file__).parent / "scripts" / "torchtitan_checks.py"


def test_policies():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", CHECKS]
    env = {**frameworks.environment(frameworks.ENGINES), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
