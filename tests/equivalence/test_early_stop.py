"""When the recompute happens, how far it goes, and how often: early stop and its switches."""

import pytest
import torch
from behaviours import behaviour, leaf
from torch.utils.checkpoint import set_checkpoint_early_stop


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

    return run.gradients(fn, leaf(4))
