"""Processes and threads for tests: a program or a function of a test file in an interpreter of
its own, one in a forked child, and several in threads."""

import os
import subprocess
import sys
import threading
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


def in_threads(*functions):
    """Each in a thread of its own; what one raised is raised here. No thread may hang."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * WAIT)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


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
