"""Other saved-tensor hooks around, inside and instead: save_on_cpu, user hooks, hooks disabled."""

import pytest
import torch
from behaviours import behaviour, leaf, saves_inputs_alone
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    saved_tensors_hooks,
)


class Noting(saved_tensors_hooks):
    def __init__(self, run, name):
        def pack(t):
            run.log("pack", name, t)
            return t

        def unpack(t):
            run.log("unpack", name, t)
            return t

        super().__init__(pack, unpack)


@saves_inputs_alone
@behaviour
def test_hooks_around_the_forward_see_the_inputs(run):
    x, w, c = leaf(4, 4), leaf(4, 4), torch.ones(4, 4)
    with Noting(run, "outer"):
        y = run.checkpoint(run.watched(lambda t, w, c: (t @ w).sin() * c), x * 2, w, c)
    run.log("backward")
    y.sum().backward()
    return x.grad, w.grad


def raises(t):
    raise LookupError("no room")


#: pack and unpack
OUTER = {
    "change the values": (lambda t: t.double(), lambda t: t.float() * 2),
    "change the shape": (lambda t: t, lambda t: t[:2]),
    "pack raises": (raises, lambda t: t),
    "unpack raises": (lambda t: t, raises),
}


@pytest.mark.parametrize("name", OUTER)
@behaviour
def test_outer_hooks(run, name):
    x = leaf(4)
    try:
        with saved_tensors_hooks(*OUTER[name]):
            y = run.checkpoint(run.watched(lambda t: run.log(t) or t.sin().exp()), x * 1)
        y.sum().backward()
    except (RuntimeError, LookupError) as error:
        run.log("error", error)
    return x.grad


@behaviour
def test_disabled_hooks_are_refused(run):
    with disable_saved_tensors_hooks("no hooks here, please"), run.error(RuntimeError, "no hooks here, please"):
        run.checkpoint(run.watched(torch.sin), leaf(4))
    with disable_saved_tensors_hooks("no hooks"), torch.no_grad():
        return run.checkpoint(run.watched(torch.sin), leaf(4))


@behaviour
def test_disabled_hooks_at_the_backward(run):
    x = leaf(4)
    y = run.checkpoint(run.watched(lambda t: t.sin().exp()), x)
    with disable_saved_tensors_hooks("not now"), run.error(RuntimeError, "not now"):
        y.sum().backward(retain_graph=True)
    y.sum().backward()
    return x.grad


@behaviour
def test_disabling_hooks_inside_a_region(run):
    """Torch refuses to disable them while the region's own are in place."""

    def fn(t):
        with disable_saved_tensors_hooks("from inside"):
            return t.sin()

    with run.error(RuntimeError):
        run.checkpoint(run.watched(fn), leaf(4))


@behaviour
def test_mutation_allowed_on_saved_tensors(run):
    x = leaf(4)
    with allow_mutation_on_saved_tensors():
        h = x * 1
        y = run.checkpoint(run.watched(lambda t: t.sin().exp()), h)
        h.add_(1)
        y.sum().backward()
    return x.grad
