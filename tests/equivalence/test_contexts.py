"""context_fn: when it is called, how its contexts are entered and left,
and what dispatch modes see."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from behaviours import behaviour, leaf, raises_in, saves_inputs_alone, tells_contexts
from torch.utils._python_dispatch import TorchDispatchMode


class Noted:
    """A context that logs; it may swallow, and may fail on the way in or out."""

    def __init__(self, run, name, swallow=False, fail=None):
        self.run, self.name, self.swallow, self.fail = run, name, swallow, fail

    def __enter__(self):
        self.run.log("enter", self.name, torch.is_grad_enabled())
        if self.fail == "enter":
            raise ArithmeticError(self.name)
        return self

    def __exit__(self, kind, value, traceback):
        self.run.log("exit", self.name, kind, str(value)[:60], traceback is not None)
        if self.fail == "exit":
            raise ArithmeticError(self.name)
        return self.swallow


class Operators(TorchDispatchMode):
    def __init__(self, run, name):
        super().__init__()
        self.run, self.name = run, name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.run.log(self.name, str(func))
        return func(*args, **(kwargs or {}))


def pair(run, **second):
    return lambda: run.log("context_fn") or (Noted(run, "forward"), Noted(run, "recompute", **second))


@behaviour
def test_contexts_see_the_hooks_of_the_region(run):
    """The region's hooks are in place before its forward context is entered."""
    x = leaf(4)

    @contextlib.contextmanager
    def saves(name):
        kept = x.exp()
        run.log(name)
        yield
        run.log(name, kept.sum() > 0)

    y = run.checkpoint(run.watched(torch.sin), x, context_fn=lambda: (saves("forward"), saves("recompute")))
    run.log("made")
    with contextlib.suppress(torch_checkpoint._StopRecomputationError):
        y.sum().backward()
    return x.grad


# ---- exceptions ----


@tells_contexts
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, StopIteration, GeneratorExit])
@behaviour
def test_swallowing_forward_context(run, kind):
    swallows = Noted(run, "f", swallow=True), contextlib.nullcontext()
    with run.error(RuntimeError, "suppressed an exception"):
        run.checkpoint(raises_in(1, kind, "swallowed"), leaf(4), context_fn=lambda: swallows)


@behaviour
def test_swallowing_recompute_context_hides_the_early_stop(run):
    return run.gradients(run.watched(lambda t: t.sin().exp()), leaf(4), context_fn=pair(run, swallow=True))


@behaviour
def test_swallowing_recompute_context_leaves_tensors_missing(run):
    y = run.checkpoint(raises_in(2, KeyError), leaf(4), context_fn=pair(run, swallow=True))
    with run.error(torch_checkpoint.CheckpointError, "different number of tensors"):
        y.sum().backward()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("fail", ["enter", "exit"])
@behaviour
def test_context_that_fails(run, which, fail):
    contexts = [Noted(run, "f", fail=fail if which == 0 else None), Noted(run, "r", fail=fail if which == 1 else None)]
    x = leaf(4)
    with run.error(ArithmeticError):
        y = run.checkpoint(run.watched(lambda t: t.sin().exp()), x, context_fn=lambda: tuple(contexts))
        run.log("made")
        y.sum().backward()


@tells_contexts
@behaviour
def test_context_that_raises_another_exception_over_the_first(run):
    fails = Noted(run, "f", fail="exit"), contextlib.nullcontext()
    with run.error(ArithmeticError):
        run.checkpoint(raises_in(1, KeyError, "first"), leaf(4), context_fn=lambda: fails)


@pytest.mark.parametrize("made", [3, None, (1,), (1, 2, 3), (1, 2)])
@behaviour
def test_context_fn_that_returns_no_pair_of_contexts(run, made):
    with run.error((TypeError, ValueError)):
        run.checkpoint(torch.sin, leaf(4), context_fn=lambda: made)


@behaviour
def test_context_fn_may_return_any_iterable_of_two(run):
    return run.gradients(torch.sin, leaf(4), context_fn=lambda: iter([Noted(run, "f"), Noted(run, "r")]))


@behaviour
def test_context_fn_that_raises(run):
    def context_fn():
        raise LookupError("no contexts today")

    with run.error(LookupError):
        run.checkpoint(run.watched(torch.sin), leaf(4), context_fn=context_fn)


@behaviour(ours=("compat",))
def test_context_fn_none_is_called_like_any_other(run):
    with run.error(TypeError):
        run.checkpoint(torch.sin, leaf(4), context_fn=None)


# ---- dispatch modes ----


@pytest.mark.parametrize("early_stop", [True, False])
@behaviour
def test_operators_that_a_mode_sees(run, early_stop):
    def fn(t):
        y = F.layer_norm(F.gelu(t @ t), (4,))
        return y[1:].mul_(2).tanh() + 1

    modes = (Operators(run, "forward"), Operators(run, "recompute"))
    return run.gradients(fn, leaf(4, 4), context_fn=lambda: modes, early_stop=early_stop)


@saves_inputs_alone
@behaviour
def test_mode_around_everything(run):
    """One that is on during both calls sees what the checkpoint itself runs, in torch's order."""
    x = leaf(4)
    with Operators(run, "all"):
        y = run.checkpoint(lambda t: t.sin().exp(), x)
        run.log("backward")
        y.sum().backward()
    return x.grad


@pytest.mark.parametrize("policy", ["list", "bool", "prefer"])
@behaviour
def test_selective_contexts_of_torch(run, policy):
    save = torch.ops.aten.mm.default

    def decide(ctx, op, *args, **kwargs):
        run.log("policy", str(op), ctx.is_recompute)
        if policy == "bool":
            return op is save
        kinds = torch_checkpoint.CheckpointPolicy
        return kinds.PREFER_SAVE if op is save else kinds.PREFER_RECOMPUTE

    def context_fn():
        return torch_checkpoint.create_selective_checkpoint_contexts([save] if policy == "list" else decide)

    x, w = leaf(4, 4), leaf(4, 4)
    y = run.checkpoint(run.watched(lambda t: ((t @ w).sin() @ w).exp()), x, context_fn=context_fn)
    y.sum().backward()
    return y, x.grad, w.grad
