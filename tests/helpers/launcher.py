"""``python -m gradckpt.run`` in a process of its own."""

import os
import subprocess
import sys

from checkout import ROOT

ENV = {
    **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
LAUNCH = ["-m", "gradckpt.run"]


def call(*command, cwd, status=0, env=ENV):
    """A Python process: its output, with the exit status that is expected."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done
