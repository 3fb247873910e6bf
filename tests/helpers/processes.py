"""Processes for tests: a function of a test file in an interpreter of its own, and one in a forked child."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import HELPERS, ROOT

REFUSED = 77  # exit status of a child in which torch's engine refuses
WAIT = 30  # seconds, for what happens at once unless something is broken


def alone(script, *arguments):
    """Run a function of a test file in a process of its own: it ends with 0 and writes nothing to stderr."""
    file = Path(script.__code__.co_filename)
    path = os.pathsep.join([str(ROOT), str(HELPERS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(file), script.__name__, *arguments]
    env = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=4 * WAIT)
    assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr


def in_child(function):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException as error:
            code = REFUSED if "autograd's threading" in str(error) else 1
            print(repr(error), flush=True)
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == REFUSED:
        pytest.skip("an earlier test made torch's engine start threads: a forked child has no backward then")
    assert status == 0
