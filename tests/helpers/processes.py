"""Processes for tests: a program or a function of a test file in an interpreter of its own,
and one in a forked child."""

import os
import subprocess
import sys
from pathlib import Path

from checkout import HELPERS, ROOT

WAIT = 30  # seconds, for what happens at once unless something is broken


PATH = os.pathsep.join(filter(None, [str(ROOT), str(HELPERS), os.environ.get("PYTHONPATH", "")]))


def printed_by(*arguments):
    """What Python prints with these arguments, with the package and the helpers on its path, and
    without a GPU; it ends with 0."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PATH}
    done = subprocess.run([sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def alone(script, *arguments):
    """Run a function of a test file in a process of its own:
    it ends with 0 and writes nothing to stderr."""
    file = Path(script.__code__.co_filename)
    command = [sys.executable, str(file), script.__name__, *arguments]
    env = {**os.environ, "PYTHONPATH": PATH}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=4 * WAIT)
    assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr


def in_child(function):
    """For a process of its own: once torch's engine has started threads,
    a forked child has no backward."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException as error:
            print(repr(error), flush=True)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
