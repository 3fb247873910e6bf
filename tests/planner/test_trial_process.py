"""Trials in a forked child, and in this process where none can be forked."""

import logging
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from caching_programs import TOKENS, WIDTH, Block, Net
from checkout import ROOT

import gradckpt
from gradckpt import _trial_process
from gradckpt._planning.simulated_tensors import tensors_without_values

X = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5))


class Nothing:
    def restore(self, *, failed=False):
        pass


class OwnError(Exception):
    def __init__(self, a, b):  # which no pickle can make again
        super().__init__(a + b)
        self.b = b


@pytest.fixture
def forks(monkeypatch):
    """Also beside the threads of a test runner."""
    monkeypatch.setattr(_trial_process, "can_fork", lambda: True)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(_trial_process, "can_fork", lambda: False)


def run(trial):
    return _trial_process.apart(trial, Nothing)


@pytest.mark.usefixtures("forks")
class TestChild:
    def test_only_the_result_comes_back(self):
        kept, x = [], torch.arange(4.0)

        def trial():
            kept.append(os.getpid())
            return {"x": x.mul_(2), "pid": os.getpid()}

        found = run(trial)
        assert torch.equal(found["x"], torch.arange(4.0) * 2)
        assert found["pid"] != os.getpid()
        assert not kept
        assert torch.equal(x, torch.arange(4.0))

    def test_errors_of_the_user_are_his_own(self):
        def trial():
            raise OwnError("a", "b")

        with pytest.raises(OwnError, match="ab") as error:
            run(trial)
        assert error.value.b == "b"
        assert error.traceback[-1].name == "trial"

    def test_our_errors_come_without_a_second_run(self):
        parent = os.getpid()

        def trial():
            assert os.getpid() != parent
            raise ValueError("gradckpt: no")

        with pytest.raises(ValueError, match="gradckpt: no"):
            run(trial)

    def test_a_signal_that_kills_it_is_named(self):
        with pytest.raises(RuntimeError, match="SIGKILL has killed a trial step"):
            run(lambda: os.kill(os.getpid(), signal.SIGKILL))

    def test_a_child_that_waits_for_ever_is_ended(self, monkeypatch):
        """As for a thread that it has not; the trial then runs here."""
        monkeypatch.setattr(_trial_process, "_IDLE", 0.3)
        parent = os.getpid()
        assert run(lambda: os.getpid() == parent or threading.Event().wait()) is True

    def test_an_interrupt_ends_the_child(self):
        parent, pipe = os.getpid(), os.pipe()

        def trial():
            os.write(pipe[1], str(os.getpid()).encode())
            time.sleep(0.2)  # the parent waits then
            os.kill(parent, signal.SIGINT)
            while True:
                signal.pause()

        with pytest.raises(KeyboardInterrupt):
            run(trial)
        with pytest.raises(ProcessLookupError):
            os.kill(int(os.read(pipe[0], 20)), 0)

    def test_random_numbers_are_this_process(self):
        random.seed(3)
        state = random.getstate()
        expected = random.random()
        random.setstate(state)
        assert run(random.random) == run(random.random) == random.random() == expected

    def test_warnings_and_records_are_shown_here(self, caplog):
        def trial():
            warnings.warn("of a trial", stacklevel=1)
            logging.getLogger("of.a.user").warning("record %d", 1)

        with pytest.warns(UserWarning, match="of a trial"):
            run(trial)
        with pytest.warns(UserWarning, match="of a trial"):
            run(trial)
        assert [each.getMessage() for each in caplog.records] == ["record 1"]  # of all children once

    def test_candidates_draw_the_same(self):
        class Drawing(Block):
            def scale(self, x):
                return random.random() + 1

        model = Net(Drawing).train()
        assert gradckpt.gradient_error(model, (X,), "none", modules=[model.last])[0].total == 0


def children():
    """The processes that this one has started and not waited for."""
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        return file.read().split()


@pytest.mark.usefixtures("forks")
class TestSideBySide:
    @pytest.mark.parametrize("processors", [1, 3])
    def test_results_are_in_order(self, processors, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
        before, told = children(), []

        def trial(number):
            time.sleep(0.1 * (5 - number))  # the last is the first to end
            return number, os.getpid()

        found = _trial_process.side_by_side([lambda n=n: trial(n) for n in range(5)], Nothing, told.append)
        assert [number for number, _ in found] == told == [0, 1, 2, 3, 4]
        assert len({pid for _, pid in found} - {os.getpid()}) == 5
        assert children() == before

    def test_as_many_as_there_are_processors(self, monkeypatch, tmp_path):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})

        def trial(number):
            (tmp_path / str(number)).touch()
            time.sleep(0.3)
            among = len([*tmp_path.iterdir()])
            (tmp_path / str(number)).unlink()
            return among

        assert max(_trial_process.side_by_side([lambda n=n: trial(n) for n in range(6)])) == 2

    def test_an_error_ends_the_others(self):
        before = children()

        def fail():
            raise ValueError("gradckpt: no")

        began = time.monotonic()
        with pytest.raises(ValueError, match="gradckpt: no"):
            _trial_process.side_by_side([fail, lambda: time.sleep(60)], Nothing)
        assert time.monotonic() - began < 30
        assert children() == before

    def test_a_users_error_is_the_users_own(self):
        with pytest.raises(OwnError) as error:
            _trial_process.side_by_side([lambda: 1, lambda: (_ for _ in ()).throw(OwnError("a", "b"))], Nothing)
        assert error.value.b == "b"

    def test_one_trial_runs_apart_too(self):
        assert _trial_process.side_by_side([os.getpid], Nothing) != [os.getpid()]


@pytest.mark.usefixtures("here")
def test_side_by_side_without_children():
    restored = []

    class Restores(Nothing):
        def restore(self, *, failed=False):
            restored.append(failed)

    assert _trial_process.side_by_side([os.getpid, os.getpid], Restores) == 2 * [os.getpid()]
    assert restored == [False, False]
    assert _trial_process.side_by_side([os.getpid]) == [os.getpid()]


def test_no_fork_beside_a_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not _trial_process.can_fork()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(("part", "name"), [(torch.distributed, "is_initialized"), (torch.accelerator, "is_available")])
def test_no_fork_in_a_process_group_or_beside_an_accelerator(part, name, monkeypatch):
    monkeypatch.setattr(part, name, lambda *_: True)
    assert not _trial_process.can_fork()


PARALLEL = """
import os, torch, gradckpt
from gradckpt import _trial_process
x = torch.randn(512, 512, requires_grad=True)
(x @ x).exp().sum().backward()
assert _trial_process.can_fork()
def trial():
    (x @ x).exp().sum().backward()
    return torch.get_num_threads(), len(os.listdir("/proc/self/task"))
threads, tasks = _trial_process.apart(trial, None)
assert threads == torch.get_num_threads() <= tasks, (threads, tasks)
(x @ x).exp().sum().backward()
print("done")
"""


def test_a_child_has_as_many_threads():
    env = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PARALLEL], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout == "done\n", done.stderr


# ---- here


class InAQueue(Block):
    """Other threads may change it, so nothing puts it back."""

    def prepare(self):
        self.kept = queue.SimpleQueue()

    def scale(self, x):
        self.kept.put(x.detach())
        return self.kept.get() if self.kept.qsize() > 1 else 1.0


class InAQueueOfPython(InAQueue):
    def prepare(self):
        self.kept = queue.Queue()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("block", [InAQueue, InAQueueOfPython])
def test_simulated_tensors_that_stay_are_refused_by_name(block):
    model = Net(block).train()
    with pytest.raises(RuntimeError, match=r"keeps a tensor of a simulated step, which has no values") as error:
        gradckpt.plan(model, (X,), budget="1GiB", modules=[model.last])
    assert ("kept" in str(error.value)) or ("queue" in str(error.value).lower())
    del error, model
    assert not tensors_without_values()
