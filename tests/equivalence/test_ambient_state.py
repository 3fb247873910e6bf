"""Grad mode, inference mode, default device and other modes: what the recompute runs under,
and what it leaves."""

import pytest
import torch
import torch.nn.functional as F
from behaviours import behaviour, leaf
from torch.utils.checkpoint import DefaultDeviceType
from torchs_own import replays_devices

# ---- grad mode ----


@behaviour
def test_no_grad_around(run):
    with torch.no_grad():
        y = run.checkpoint(run.watched(lambda t: F.dropout(t.sin()).exp()), leaf(4), determinism_check="none")
    return y


@behaviour
def test_no_grad_around_and_enabled_inside(run):
    x = leaf(4)

    def fn(t):
        with torch.enable_grad():
            return t.sin().exp()

    with torch.no_grad():
        y = run.checkpoint(run.watched(fn), x)
    y.sum().backward()
    return y, x.grad


@behaviour
def test_no_grad_inside(run):
    @torch.no_grad()
    def part(t):
        return t.sin().exp()

    x = leaf(4)
    run.checkpoint(run.watched(lambda t: part(t) * t.cos()), x).sum().backward()
    return x.grad


@behaviour
def test_backward_under_no_grad(run):
    x = leaf(4)
    loss = run.checkpoint(run.watched(lambda t: t.sin().exp()), x).sum()
    with torch.no_grad():
        loss.backward()
    return x.grad


@behaviour
def test_grad_mode_changed_by_the_function(run):
    def fn(t):
        y = t.sin()
        torch.set_grad_enabled(False)
        z = t.cos()
        torch.set_grad_enabled(True)
        return y.exp() * z

    x = leaf(4)
    run.checkpoint(run.watched(fn), x).sum().backward()
    return x.grad


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
def test_inference_mode_around(run):
    with torch.inference_mode():
        y = run.checkpoint(run.watched(lambda t: t.sin().exp()), torch.randn(4))
        run.log(y.is_inference())


@behaviour
def test_inference_mode_inside(run):
    def fn(t):
        with torch.inference_mode():
            s = t.detach().sum()
        run.log(s.is_inference())
        return (t * float(s)).sin().exp()

    x = leaf(4)
    run.checkpoint(fn, x).sum().backward()
    return x.grad


@behaviour
def test_inference_tensor_as_an_argument(run):
    with torch.inference_mode():
        c = torch.randn(4)
    x = leaf(4)
    with run.error(RuntimeError, "Inference tensors cannot be saved for backward"):
        run.checkpoint(run.watched(lambda t, c: t.sin() + c), x, c)


@behaviour
def test_inference_tensor_as_a_keyword(run):
    with torch.inference_mode():
        c = torch.randn(4)
    x = leaf(4)
    run.checkpoint(run.watched(lambda t, *, c: t.sin() + c), x, c=c).sum().backward()
    return x.grad


@behaviour
def test_backward_under_inference_mode(run):
    x = leaf(4)
    loss = run.checkpoint(run.watched(lambda t: t.sin().exp()), x).sum()
    with torch.inference_mode():
        try:
            loss.backward()
        except RuntimeError as e:
            run.log(e)
    return x.grad


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


@replays_devices
@pytest.mark.parametrize("device", ["cpu", "meta"])
@behaviour
def test_device_context_of_the_forward_counts(run, device):
    def fn(t):
        run.log(torch.ones(1).device, torch.get_default_device())
        return t.sin().exp()

    x = leaf(4)
    with torch.device(device):
        y = run.checkpoint(fn, x)
    with torch.device("meta" if device == "cpu" else "cpu"):
        loss = y.sum()
        loss.backward()
        run.log(torch.ones(1).device)
    return x.grad


@behaviour
def test_innermost_device_context_counts(run):
    x = leaf(4)
    with torch.device("meta"), torch.device("cpu"):
        y = run.checkpoint(lambda t: run.log(torch.ones(1).device) or t.sin().exp(), x)
    y.sum().backward()
    return x.grad


@replays_devices
@behaviour
def test_default_device(run):
    x = leaf(4)
    torch.set_default_device("meta")
    try:
        y = run.checkpoint(lambda t: run.log(torch.ones(1).device) or t.sin().exp(), x)
    finally:
        torch.set_default_device(None)
    y.sum().backward()
    return x.grad


@behaviour
def test_no_device_context_in_the_forward_but_in_the_backward(run):
    x = leaf(4)
    y = run.checkpoint(lambda t: run.log(torch.ones(1).device) or t.sin().exp(), x).sum()
    with torch.device("meta"):
        y.backward(torch.ones((), device="cpu"))
    return x.grad


@behaviour
def test_meta_tensors(run):
    x = torch.randn(4, device="meta", requires_grad=True)
    y = run.checkpoint(run.watched(lambda t: F.dropout(t.sin()).exp()), x)
    y.sum().backward()
    return y, x.grad


@behaviour
def test_meta_tensors_in_containers_and_keywords(run):
    x, m = leaf(4), torch.randn(4, device="meta")
    y = run.checkpoint(run.watched(lambda t, ms, *, m: F.dropout(t.sin()).exp()), x, [m, {"m": m}], m=m)
    y.sum().backward()
    return x.grad, torch.rand(2)


@pytest.mark.parametrize("name", ["cpu", "cuda", "meta", "xpu"])
@behaviour
def test_default_device_type(run, name):
    """torch.utils.checkpoint.DefaultDeviceType says whose state is kept when no argument does."""
    before = DefaultDeviceType._default_device_type
    DefaultDeviceType.set_device_type(name)
    try:
        x = leaf(16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run.checkpoint(run.watched(lambda t: F.dropout(t.sin()).exp()), x)
        y.sum().backward()
    finally:
        DefaultDeviceType._default_device_type = before
    return x.grad, torch.rand(2)


# ---- other modes ----


@behaviour
def test_default_dtype_is_not_kept(run):
    x = leaf(4)
    y = run.checkpoint(lambda t: run.log(torch.ones(1).dtype) or t.sin().exp(), x)
    torch.set_default_dtype(torch.float64)
    try:
        y.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    return x.grad


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


@behaviour
def test_anomaly_mode(run):
    x = leaf(4)
    with torch.autograd.detect_anomaly():
        y = run.checkpoint(run.watched(lambda t: t.sin().exp()), x)
        y.sum().backward()
    return x.grad


@behaviour
def test_anomaly_mode_finds_a_nan(run):
    def fn(t):
        return (t * 0).sqrt() * 0

    with torch.autograd.detect_anomaly(), run.error(RuntimeError, "returned nan values in its 0th output"):
        run.checkpoint(run.watched(fn), leaf(4)).sum().backward()


@behaviour
def test_deterministic_algorithms_flag(run):
    torch.use_deterministic_algorithms(True)
    try:
        x = leaf(4)
        run.checkpoint(lambda t: t[torch.tensor([0, 0, 1])].sin().exp(), x).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return x.grad
