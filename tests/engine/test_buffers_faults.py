"""buffers="once": threads, interrupts and failures."""

import copy
import functools
import itertools
import threading

import pytest
import small_models
import torch
from processes import in_threads
from small_models import Norms, different, plainly, step
from test_interrupts import At, _lock_of_its_own  # noqa: F401 (a fixture of every test here)
from torch import nn

import gradckpt
from gradckpt._engine import buffers

_clean = small_models.nothing_left_behind


# ---- threads ----


@pytest.mark.parametrize("first", [0, 1])
def test_recomputes_of_one_module_interleave_on_two_threads(first):
    """Each begins before the other ends; whichever ends last restores what the first found."""
    net = nn.BatchNorm1d(6)
    go = [threading.Event() for _ in range(4)]
    done = [threading.Event() for _ in range(4)]

    def recompute(start, end):
        go[start].wait(10)
        guard = buffers.enter([net])
        net(torch.randn(4, 6))
        done[start].set()
        go[end].wait(10)
        guard.close()
        done[end].set()

    threads = [threading.Thread(target=recompute, args=(i, 2 + i)) for i in range(2)]
    for thread in threads:
        thread.start()
    order = [0, 1, 2 + first, 3 - first]
    for i in order:
        go[i].set()
        assert done[i].wait(10)
    for thread in threads:
        thread.join()
    assert net.num_batches_tracked == 0
    assert net.running_mean.tolist() == [0] * 6


def test_two_threads_run_backward_at_once():
    nets = [Norms() for _ in range(2)]
    plain = [copy.deepcopy(net) for net in nets]
    barrier = threading.Barrier(2)
    expected = [step(net, net, plainly) for net in plain]
    got = [None, None]

    def work(i):
        def region(x):
            if gradckpt.policies.is_recomputing():
                barrier.wait(10)
            return nets[i](x)

        got[i] = step(nets[i], region, functools.partial(gradckpt.checkpoint, buffers=nets[i]))

    in_threads(*(functools.partial(work, i) for i in range(2)))
    assert [different(a, b) for a, b in zip(expected, got, strict=True)] == [[], []]


# ---- what goes wrong ----


def test_a_lost_guard_closes_itself():
    """An interrupt may strike between any two steps."""
    net = nn.BatchNorm1d(6)
    guard = buffers.enter([net])
    net(torch.randn(4, 6))
    del guard
    assert net.num_batches_tracked == 0


def test_an_interrupt_while_saving_leaves_nothing():
    def interrupt(module):
        raise KeyboardInterrupt

    with buffers.register(nn.Linear, interrupt), pytest.raises(KeyboardInterrupt) as caught:
        buffers.enter([nn.BatchNorm1d(6), nn.Linear(6, 6)])
    assert not buffers._entered  # also while the traceback keeps the guard
    del caught


class Resizing(nn.Module):
    def __init__(self, fail):
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.norm = nn.BatchNorm1d(6)
        self.fail = fail

    def forward(self, x):
        y = self.norm(x).sin()
        if gradckpt.policies.is_recomputing():
            self.calls.resize_(2)
            if self.fail:
                raise ValueError("of the region")
        return y


@pytest.mark.parametrize("fail", [False, True])
def test_a_buffer_that_cannot_be_put_back_is_reported(fail):
    """Unless the region failed, whose exception comes first;
    the others are put back all the same."""
    net = Resizing(fail)
    with buffers.register(Resizing, ("calls",)):
        error, text = (ValueError, "of the region") if fail else (RuntimeError, "size")
        with pytest.raises(error, match=text):
            step(net, net, functools.partial(gradckpt.checkpoint, early_stop=False))
    assert net.norm.num_batches_tracked == 1


def test_the_last_of_nested_recomputes_puts_back_what_the_first_found():
    net = nn.BatchNorm1d(6)
    outer, inner = buffers.enter([net]), buffers.enter([net, net])
    net(torch.randn(4, 6))
    inner.close()
    assert net.num_batches_tracked == 1
    outer.close()
    assert net.num_batches_tracked == 0


def test_closing_twice_puts_back_once():
    net = nn.BatchNorm1d(6)
    guard = buffers.enter([net])
    net(torch.randn(4, 6))
    guard.close()
    net(torch.randn(4, 6))
    guard.close()
    assert net.num_batches_tracked == 1
    assert not hasattr(guard, "__del__")  # an interrupt in a finalizer would be lost


REGIONS = {
    "module": lambda net: net,
    "nested": lambda net: lambda x: gradckpt.checkpoint(net, x.sin()),
}


@pytest.mark.parametrize("form", REGIONS)
def test_interrupt_at_each_line_leaves_nothing(form):
    """Statistics are those after the forward, and nothing is kept."""
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6))
    function = REGIONS[form](net)
    for hits in itertools.count():
        y = gradckpt.checkpoint(function, torch.randn(16, 6, requires_grad=True), buffers=net).sum()
        after = {name: b.clone() for name, b in net.named_buffers()}
        at = At(hits + 1, buffers.__file__)
        at.during(y.backward)
        del y
        assert different(after, dict(net.named_buffers())) == [], hits
        assert not buffers._entered, hits
        if at.fired is None:
            break
    assert hits > 50
