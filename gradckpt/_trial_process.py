"""Run trial steps so that nothing of them remains: :func:`apart`, :func:`side_by_side`.

Where this process can be forked, a child runs the trial and only its result comes back. Elsewhere
the trial runs here, and afterwards gets back what can be: :mod:`gradckpt._training_state`.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import gc
import importlib
import logging
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from gradckpt._training_state import host_random

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def shown_as_base(kind: type[E]) -> type[E]:
    """Give a private class of exceptions the name of its base, which is what users may catch.

    Instances pickle with their attributes, as from a child.
    """
    place, base = (kind.__module__, kind.__name__), kind.__mro__[1]

    def reduce(self: E) -> Any:
        return _again, (*place, self.args, vars(self))

    kind.__reduce__ = reduce  # type: ignore[method-assign, assignment]
    kind.__module__, kind.__name__, kind.__qualname__ = base.__module__, base.__name__, base.__qualname__
    return kind


def _again(module: str, name: str, args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    kind = getattr(importlib.import_module(module), name)
    error: Exception = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


#: A child that has done nothing for so many seconds waits for a thread that it has not.
_IDLE = 60.0

#: What children have logged and warned of, which is shown once.
_shown: set[Any] = set()
_registry: dict[Any, Any] = {}


class Restorable(Protocol):
    def restore(self, *, failed: bool = False) -> None:
        """Put back what a trial has changed in this process; ``failed``: it has raised."""


def apart(trial: Callable[[], T], keep: Callable[[], Restorable]) -> T:
    """Return the result of a trial, which leaves no trace in this process.

    Args:
        trial: Its result can be pickled. It runs in a child, or here; where it raises in a child it
            runs here again, so that exceptions are the user's own objects.
        keep: Is called before a trial runs here; returns what restores this process.

    Raises:
        RuntimeError: A signal has killed the child, as when memory ran out.
    """
    if can_fork():
        with _Child(trial) as child:
            answer = child.answer()
        if answer is not None:
            return answer.result()  # type: ignore[no-any-return]
    return _here(trial, keep)


def _here(trial: Callable[[], T], keep: Callable[[], Restorable] | None) -> T:
    if keep is None:
        return trial()
    state = keep()
    try:
        result = contextvars.copy_context().run(trial)
    except BaseException:
        state.restore(failed=True)
        raise
    state.restore()
    return result


def side_by_side(
    trials: Sequence[Callable[[], T]],
    keep: Callable[[], Restorable] | None = None,
    progress: Callable[[int], None] = lambda number: None,
) -> list[T]:
    """Return the results of trials, which run in as many children as there are processors, or here
    in turn, as :func:`apart`; without ``keep`` they may leave traces. ``progress`` is told the
    number of each before the wait for it.

    Raises:
        RuntimeError: As :func:`apart`; other exceptions of a trial arrive unchanged.
    """
    results = []
    ahead = len(os.sched_getaffinity(0)) if (keep is not None or len(trials) > 1) and can_fork() else 0
    with contextlib.ExitStack() as stack:
        children: list[_Child] = []
        for number, trial in enumerate(trials):
            while len(children) < min(number + ahead, len(trials)):
                children.append(stack.enter_context(_Child(trials[len(children)])))
            progress(number)
            answer = children[number].answer() if ahead else None
            results.append(answer.result() if answer is not None else _here(trial, keep))
    return results


def can_fork() -> bool:
    """Return whether a child of this process could run a training step.

    It has no other thread, so none may be needed; it cannot use an accelerator, whose mere presence
    gives autograd threads; and it must not speak in this rank's place.
    """
    return (
        sys.platform == "linux"
        and threading.active_count() == 1
        and not torch.accelerator.is_available()
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
        and _pause_openmp() is not None
    )


@functools.cache
def _pause_openmp() -> Any:
    """Return OpenMP's function that ends its idle threads, which a child would wait for."""
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    try:
        return getattr(ctypes.CDLL(library), "omp_pause_resource_all", None)
    except OSError:  # this torch is built in another way
        return None


class _Answer(NamedTuple):
    """What a child sends: a result or one of our errors, and what it has logged and warned of."""

    value: Any
    error: Exception | None
    records: list[logging.LogRecord]
    warned: list[tuple[str, type[Warning], str, int]]

    def result(self) -> Any:
        for record in self.records:
            key = record.name, record.levelno, record.msg
            if key not in _shown or record.name.startswith("gradckpt"):
                _shown.add(key)
                logging.getLogger(record.name).handle(record)
        for text, kind, file, line in self.warned:
            warnings.warn_explicit(text, kind, file, line, registry=_registry)
        if self.error is not None:
            raise self.error
        return self.value


class _Child:
    """A child that runs a trial; the end of the ``with`` block ends it."""

    def __init__(self, trial: Callable[[], Any]) -> None:
        rewind = host_random()  # Python seeds its generator anew in each child
        self._file = open(os.memfd_create("gradckpt"), "r+b")  # noqa: SIM115  # closed, its pages are free
        self._alive, held = os.pipe()
        self._pid = 0
        try:
            self._pid = _fork()
            if not self._pid:
                _be_child(trial, rewind, self._file)
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.close(held)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            _end(self._pid)
        self._file.close()
        os.close(self._alive)

    def answer(self) -> _Answer | None:
        """Return what it answers, None if the trial has to run here.

        Raises:
            RuntimeError: A signal has killed it.
        """
        if not _wait(self._pid, self._alive):
            return None
        status, self._pid = _status(self._pid), 0
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            why = ", as happens when memory runs out; pass a smaller batch" if name == "SIGKILL" else ""
            raise RuntimeError(f"gradckpt: {name} has killed a trial step{why or '; measure the step in a script'}")
        if os.WEXITSTATUS(status):
            return None
        answer: _Answer = torch.load(f"/proc/self/fd/{self._file.fileno()}", "cpu", weights_only=False, mmap=True)
        return answer


def _fork() -> int:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a closed one, or None
            stream.flush()  # or the child would write it, too
    _pause_openmp()(2)  # omp_pause_hard
    with contextlib.ExitStack() as stack:
        if sys.version_info >= (3, 12):  # it warns of threads, also of those that are not Python's
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _wait(pid: int, alive: int) -> bool:
    """Return whether a child has ended; False: it waits for nothing."""
    seconds = -1
    while not select.select([alive], [], [], _IDLE)[0]:
        before, seconds = seconds, _processor_seconds(pid)
        if seconds == before:
            return False
    return True


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _status(pid)


def _status(pid: int) -> int:
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:  # SIGCHLD is ignored
        return 0


def _processor_seconds(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _be_child(trial: Callable[[], Any], rewind: Callable[[], None], file: Any) -> NoReturn:
    status = 1
    try:
        gc.freeze()  # a collection would write to all pages of the parent
        rewind()
        records: list[logging.LogRecord] = []
        warned: list[tuple[str, type[Warning], str, int]] = []
        logging.Logger.callHandlers = lambda self, record: records.append(record)  # type: ignore[method-assign]
        warnings.showwarning = lambda text, kind, file, line, *_: warned.append((str(text), kind, file, line))
        value, error = None, None
        try:
            value = trial()
        except Exception as raised:
            if not _is_ours(raised):
                raise
            error = raised.with_traceback(None)
        for record in records:
            record.msg, record.args, record.exc_info = record.getMessage(), None, None
        torch.save(_Answer(value, error, records, warned), file)
        file.flush()
        status = 0
    except BaseException:
        pass
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(status)


def _is_ours(error: Exception) -> bool:
    """Return whether an error is as good in another process: its message says all."""
    return type(error).__module__.startswith("gradckpt.") or str(error).startswith("gradckpt: ")
