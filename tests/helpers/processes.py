"""What tests do with processes and signals: functions in interpreters of their own and in forked
children, alarms, counts that processes share; and cases in loops.
"""

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import HELPERS, ROOT

# ---- Processes and threads for tests: a program or a function of a test file in an interpreter
# of its own, one in a forked child, and several in threads.

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


# ---- Loops inside a test: the report of a failure still names the case.


@contextlib.contextmanager
def case(*words: object) -> Iterator[None]:
    """Add the case to whatever its block raises.

    For cases by the hundred that differ in a number: one test, not a hundred ids. What a reader
    looks for in a list of tests, such as the codec and the dtype, stays a parameter.
    """
    try:
        yield
    except BaseException as error:
        error.add_note("case: " + ", ".join(map(str, words)))
        raise


# ---- Folders of frameworks that must not lie in the tests' own site-packages; only processes of
# their own import them.
#
# ``frameworks.txt`` says what is in which, and why there are two; ``make test_all`` installs
# them.

#: timm, torchvision.
FRAMEWORKS = Path(sys.prefix) / "frameworks"

#: DeepSpeed, torchtitan.
ENGINES = Path(sys.prefix) / "engines"


def environment(folder: Path = FRAMEWORKS) -> dict[str, str]:
    """Of a process that imports gradckpt, the tests' helpers and what is in the folder."""
    if not folder.is_dir():
        pytest.fail(f"{folder} is missing; `make test_all` installs what the tests need there", pytrace=False)
    path = os.pathsep.join(map(str, (ROOT, HELPERS, folder)))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


# ---- A number that forked children of this process add to, as well: :class:`SharedCount`.


class SharedCount:
    def __init__(self):
        self._memory = mmap.mmap(-1, 8)

    @property
    def value(self):
        return int.from_bytes(self._memory[:], "little")

    def add(self, n=1):
        """Children run one after another, and nothing beside them."""
        self._memory[:] = (self.value + n).to_bytes(8, "little")

    def clear(self):
        self._memory[:] = bytes(8)


# ---- KeyboardInterrupt after a while.


class Alarm:
    """Raises KeyboardInterrupt in the main thread, once, after a while, unless disarmed before.

    The timer is pytest-timeout's, too: afterwards that goes on with the time it had left.

    An interrupt in a callback of the collector (hypothesis has one) is swallowed there, and pytest
    keeps it for its report, with the traceback and so the frames of the region around. Meanwhile no
    such callback runs, and what is swallowed elsewhere (in a weak reference's callback) is counted
    in ``swallowed``, not kept.
    """

    def __enter__(self):
        self.callbacks, self.hook, self.swallowed = gc.callbacks[:], sys.unraisablehook, 0
        gc.callbacks.clear()
        sys.unraisablehook = self.swallow
        self.armed = False
        self.timer = signal.setitimer(signal.ITIMER_REAL, 0)
        self.before = signal.signal(signal.SIGALRM, self.ring)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)
        signal.setitimer(signal.ITIMER_REAL, *self.timer)
        gc.callbacks[:] = self.callbacks
        sys.unraisablehook = self.hook

    def swallow(self, _):
        self.swallowed += 1

    def ring(self, *_):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def during(self, delay, function, *args):
        """function(*args), or None when it was interrupted; `delay` in seconds, None:
        without an alarm."""
        try:
            if delay is not None:
                self.armed = True
                signal.setitimer(signal.ITIMER_REAL, delay)
            result = function(*args)
            self.armed = False
            return result
        except KeyboardInterrupt:
            return None
        except BaseException:
            self.armed = False  # not while pytest reports it
            raise


# ---- What a test that interrupts Python between any two lines has to put right itself.

_set = ctypes.pythonapi.PyErr_SetExcInfo
_set.argtypes, _set.restype = [ctypes.c_void_p] * 3, None


def forget_handled_exception():
    """Call it from a function outside any ``except``.

    CPython itself leaves the exception being handled on its stack when an interrupt lands between
    the last line of a handler and the instruction that ends it; from then on it is the context of
    every exception raised, and with its traceback it keeps the tensors of all its frames alive.
    """
    _set(None, None, None)
