"""Grad mode, inference mode, default device and other modes: what the recompute runs under,
and what it leaves."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from behaviours import behaviour, leaf
from torch.utils.checkpoint import DefaultDeviceType


@contextlib.contextmanager
def setting(change, value, before):
    change(value)
    try:
        yield
    finally:
        change(before)


def device(*names):
    """Contexts in one another, the innermost last."""
    stack = contextlib.ExitStack()
    for name in names:
        stack.enter_context(torch.device(name))
    return stack


#: The modes around the forward, and those around the backward.
AROUND = {
    "backward under no_grad": (contextlib.nullcontext, torch.no_grad),
    "backward under inference mode": (contextlib.nullcontext, torch.inference_mode),
    "device": (lambda: device("cpu"), lambda: device("meta")),
    "another device": (lambda: device("meta"), lambda: device("cpu")),
    "innermost device": (lambda: device("meta", "cpu"), contextlib.nullcontext),
    "default device": (lambda: setting(torch.set_default_device, "meta", None), contextlib.nullcontext),
    "device of the backward": (contextlib.nullcontext, lambda: device("meta")),
    "default dtype is not kept": (
        contextlib.nullcontext,
        lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    ),
    "anomaly mode": (torch.autograd.detect_anomaly, torch.autograd.detect_anomaly),
    "deterministic algorithms": (
        lambda: setting(torch.use_deterministic_algorithms, True, False),
        lambda: setting(torch.use_deterministic_algorithms, True, False),
    ),
}


@pytest.mark.parametrize(("forward", "backward"), AROUND.values(), ids=AROUND)
@behaviour
def test_modes_around_forward_and_backward(run, forward, backward):
    def fn(t):
        run.log(torch.ones(1).device, torch.get_default_device(), torch.ones(1).dtype)
        return t[torch.tensor([0, 0, 1], device="cpu")].sin().exp()

    x = leaf(4)
    with forward():
        y = run.checkpoint(run.watched(fn), x)
    loss = y.sum()
    with backward():
        run.log(torch.ones(1).device)
        try:
            loss.backward(torch.ones((), device="cpu", dtype=torch.float32))
        except RuntimeError as e:
            run.log(e)
    return x.grad


# ---- grad mode ----


@behaviour
def test_grad_mode_left_off_by_the_function(run):
    """It never switches back: the forward leaves grad off, the recompute does not."""

    def fn(t):
        y = t.sin().exp()
        torch.set_grad_enabled(False)
        return y

    x = leaf(4)
    y = run.checkpoint(fn, x, early_stop=False)
    run.log(torch.is_grad_enabled())
    torch.set_grad_enabled(True)
    y.sum().backward()
    run.log(torch.is_grad_enabled())
    return x.grad


# ---- inference mode ----


@behaviour
def test_inference_tensor_as_an_argument(run):
    with torch.inference_mode():
        c = torch.randn(4)
    x = leaf(4)
    with run.error(RuntimeError, "Inference tensors cannot be saved for backward"):
        run.checkpoint(run.watched(lambda t, c: t.sin() + c), x, c)


@behaviour
def test_inference_tensors_as_a_keyword_and_inside(run):
    with torch.inference_mode():
        c = torch.randn(4)

    def fn(t, *, c):
        with torch.inference_mode():
            s = t.detach().sum()
        run.log(s.is_inference())
        return (t * float(s)).sin() + c

    return run.gradients(run.watched(fn), leaf(4), c=c)


# ---- torch.fx ----


@pytest.mark.parametrize("traced", ["forward", "backward"])
@behaviour
def test_symbolic_trace_around(run, traced):
    """torch since 2.15 sets the flag of the forward in the recompute."""
    x = leaf(4)

    def fn(t):
        run.log(torch.fx._symbolic_trace.is_fx_tracing())
        return t.sin().exp()

    class Net(torch.nn.Module):
        def forward(self, p):
            if traced == "forward":
                self.loss = run.checkpoint(fn, x).sum()
            else:
                self.loss.backward()
                run.log(torch.fx._symbolic_trace.is_fx_tracing())
            return p

    net = Net()
    if traced == "backward":
        net.loss = run.checkpoint(fn, x).sum()
        torch.fx.symbolic_trace(net)
    else:
        torch.fx.symbolic_trace(net)
        net.loss.backward()
    run.log(torch.fx._symbolic_trace.is_fx_tracing())
    return x.grad


# ---- device ----


@behaviour
def test_meta_tensors(run):
    """Alone, and beside others in containers and keywords."""
    x = torch.randn(4, device="meta", requires_grad=True)
    y = run.checkpoint(run.watched(lambda t: F.dropout(t.sin()).exp()), x)
    y.sum().backward()
    z, m = leaf(4), torch.randn(4, device="meta")
    fn = run.watched(lambda t, ms, *, m: F.dropout(t.sin()).exp())
    run.checkpoint(fn, z, [m, {"m": m}], m=m).sum().backward()
    return y, x.grad, z.grad, torch.rand(2)


@pytest.mark.parametrize("name", ["cpu", "cuda", "meta", "xpu"])
@behaviour
def test_default_device_type(run, name):
    """torch.utils.checkpoint.DefaultDeviceType says whose state is kept when no argument does."""
    x = leaf(16)
    with setting(DefaultDeviceType.set_device_type, name, DefaultDeviceType._default_device_type):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run.checkpoint(run.watched(lambda t: F.dropout(t.sin()).exp()), x)
        y.sum().backward()
    return x.grad, torch.rand(2)


# ---- other modes ----


@behaviour
def test_function_mode_around(run):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            name = getattr(func, "__name__", str(func))
            if name in ("sin", "exp", "cos", "tanh"):
                run.log(name)
            return func(*args, **(kwargs or {}))

    x = leaf(4)
    with Mode():
        y = run.checkpoint(lambda t: t.sin().exp(), x)
    run.log("backward")
    y.sum().backward()
    with Mode():
        run.checkpoint(lambda t: t.cos().tanh(), x).sum().backward()
    return x.grad


@pytest.mark.parametrize("reentrant", [True, False])
@behaviour
def test_profiler_record_names(run, reentrant):
    x = leaf(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = run.checkpoint(lambda t: t.sin().exp(), x, use_reentrant=reentrant)
        y.sum().backward()
    wanted = ("sin", "exp", "Sin", "Exp", "Checkpoint", "SumBackward", "engine")
    run.log([e.name for e in profile.events() if any(w in e.name for w in wanted)])


# ---- random numbers: what the forward drew is drawn again, and the generator left as it was ----


@behaviour
def test_seed_set_inside(run):
    def fn(t):
        torch.manual_seed(5)
        return F.dropout(t.sin()).exp()

    x = leaf(16)
    y = run.checkpoint(run.watched(fn), x)
    run.log(torch.rand(2))
    y.sum().backward()
    return x.grad, torch.rand(2)


@behaviour
def test_fork_rng_inside(run):
    """The states before and after are equal, yet numbers were drawn."""

    def fn(t):
        with torch.random.fork_rng(devices=[]):
            mask = torch.rand(16)
        return (t * mask).sin().exp()

    x = leaf(16)
    y = run.checkpoint(run.watched(fn), x)
    torch.rand(3)
    y.sum().backward()
    return x.grad, torch.rand(2)
