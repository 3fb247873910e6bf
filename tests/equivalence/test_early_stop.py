"""When the recompute happens, how far it goes, and how often: early stop and its switches."""

import pytest
import torch
from behaviours import behaviour, leaf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop


class Count(TorchDispatchMode):
    """Logs the operators that compute something."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "detach" not in str(func):
            self.run.log(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("outside", [True, False, None])
@pytest.mark.parametrize("argument", [True, False])
@behaviour
def test_context_manager_beats_the_argument(run, outside, argument):
    x = leaf(4)
    with set_checkpoint_early_stop(outside):
        y = run.checkpoint(run.watched(lambda t: t.sin() + 1), x, early_stop=argument)
    y.sum().backward()
    return x.grad


@behaviour
def test_context_manager_counts_at_the_forward(run):
    x = leaf(4)
    y = run.checkpoint(run.watched(lambda t: t.sin() + 1), x)
    with set_checkpoint_early_stop(False):
        y.sum().backward()
    return x.grad


@behaviour
def test_context_managers_nest(run):
    x = leaf(4)
    with set_checkpoint_early_stop(False):
        with set_checkpoint_early_stop(True):
            a = run.checkpoint(run.watched(lambda t: t.sin() + 1, "a"), x)
        b = run.checkpoint(run.watched(lambda t: t.sin() + 1, "b"), x)
    c = run.checkpoint(run.watched(lambda t: t.sin() + 1, "c"), x)
    (a + b + c).sum().backward()
    return x.grad


@behaviour
def test_context_manager_as_decorator_of_a_module(run):
    class Model(torch.nn.Module):
        @set_checkpoint_early_stop(False)
        def forward(self, t):
            return run.checkpoint(run.watched(lambda u: u.sin() + 1), t)

    x = leaf(4)
    Model()(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("early_stop", [True, False])
@behaviour
def test_the_last_operator_is_not_run_again(run, early_stop):
    """Early stop fires while the operator saves its input, before its kernel."""
    x = leaf(4)
    y = run.checkpoint(run.watched(torch.sin), x, early_stop=early_stop)
    with Count(run):
        y.sum().backward()
    return x.grad


@pytest.mark.parametrize("early_stop", [True, False])
@behaviour
def test_no_recompute_when_nothing_was_saved(run, early_stop):
    x = leaf(4)
    y = run.checkpoint(run.watched(lambda t: (t + 1).view(2, 2).clone() * 2), x, early_stop=early_stop)
    with Count(run):
        y.sum().backward()
    return x.grad


@behaviour
def test_stop_falls_in_the_middle_of_the_function(run):
    def fn(t):
        run.log("one")
        t = t.sin()
        run.log("two")
        t = t.exp()
        run.log("three")
        return t.detach().cos() + t

    x = leaf(4)
    run.checkpoint(run.watched(fn), x).sum().backward()
    return x.grad


@behaviour
def test_stop_passes_finally_and_with_blocks(run):
    def fn(t):
        try:
            with torch.no_grad():
                s = t.exp()
            with torch.autograd.profiler.record_function("block"):
                return t.sin() * s
        except Exception as e:
            run.log("except", type(e))
            raise
        finally:
            run.log("finally", torch.is_grad_enabled())

    x = leaf(4)
    run.checkpoint(fn, x).sum().backward()
    return x.grad


@behaviour
def test_function_that_swallows_the_stop_and_saves_more(run):
    def fn(t):
        try:
            return t.sin().exp()
        except Exception:
            return t.cos().tanh()

    y = run.checkpoint(run.watched(fn), leaf(4))
    with run.error(AssertionError, "early_stop is set"):
        y.sum().backward()
