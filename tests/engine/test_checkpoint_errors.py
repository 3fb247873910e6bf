"""gradckpt.checkpoint without compression: errors are torch's, and leave everything as it was."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from python_callbacks import instead
from test_checkpoint import BOTH, _nothing_left_behind, hooks_top, leaf, quiet_log, theirs  # noqa: F401
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import gradckpt
from gradckpt._engine.callbacks import TABLE

# ---- contexts, modes, hooks ----


@pytest.mark.parametrize("around", ["forward", "backward"])
def test_views_of_reshape_are_alike_with_and_without_a_mode(around):
    """reshape() makes its view by another operator while a dispatch mode is on."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def fn(q, k):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q.sin(), k, k, is_causal=True).exp()

    modes = {name: Mode() if name == around else contextlib.nullcontext() for name in ("forward", "backward")}
    q, k = leaf(2, 8, 32, 16), leaf(2, 8, 32, 16)
    expected = torch.autograd.grad(fn(q, k).sum(), (q, k))
    with modes["forward"]:
        y = gradckpt.checkpoint(fn, q, k)
    with modes["backward"]:
        got = torch.autograd.grad(y.sum(), (q, k))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---- errors ----


def test_determinism_check_of_the_users_own(monkeypatch):
    monkeypatch.setitem(torch_checkpoint._allowed_determinism_checks_to_fns, "values", lambda x: x.tolist())
    factors = iter([1.0, 1.0, 2.0])
    y = gradckpt.checkpoint(lambda t: (t * next(factors)).exp().sin(), leaf(4), determinism_check="values")
    y.sum().backward(retain_graph=True)
    with pytest.raises(torch_checkpoint.CheckpointError, match="different metadata"):
        y.sum().backward()


@pytest.mark.parametrize("where", ["forward", "recompute"])
@BOTH
def test_exceptions_restore_everything(ck, where):
    class Oops(BaseException):
        pass

    runs = []

    def fn(t):
        y = F.dropout(t.sin()).exp()
        torch.set_grad_enabled(False)
        runs.append(torch.rand(3))
        if len(runs) == (1 if where == "forward" else 2):
            raise Oops(where)
        torch.set_grad_enabled(True)
        return y.sin()

    x = leaf(4)
    with torch.autocast("cpu"), contextlib.ExitStack() as stack:
        if where == "forward":
            with pytest.raises(Oops, match=where):
                ck(fn, x)
            torch.set_grad_enabled(True)
            return
        y = ck(fn, x)
        state = torch.get_rng_state()
        stack.enter_context(torch.autocast("cpu", enabled=False))
        with pytest.raises(Oops, match=where):
            y.sum().backward(retain_graph=True)
        assert torch.equal(state, torch.get_rng_state())
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
    if ck is gradckpt.checkpoint:  # torch cannot try again in the same graph task, but in the next
        y.sum().backward()
        assert x.grad is not None


def test_failing_restore_of_contexts_is_reported_as_itself():
    plan = TABLE["device_plan"]
    with torch.autocast("cpu"), torch.device("cpu"):
        y = gradckpt.checkpoint(lambda t: F.dropout(t @ t).sin().exp(), leaf(4, 4))
    state = torch.get_rng_state()

    def failing(device, with_device, enter, leave):
        leave.append((exec, ("raise KeyboardInterrupt",)))
        return plan(device, with_device, enter, leave)

    with instead(device_plan=failing), pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    assert torch.equal(state, torch.get_rng_state())


def test_recompute_that_unpacks_its_own_region():
    made = []

    def fn(t):
        if made:
            made[0].grad_fn._saved_result  # noqa: B018
        made.append(t.sin().exp())
        return made[-1]

    x = leaf(4)
    y = gradckpt.checkpoint(fn, x)
    with pytest.raises(RuntimeError, match="was unpacked by the recompute of that same region"):
        y.sum().backward(retain_graph=True)
    made.clear()
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_unpack_refuses_what_its_region_did_not_pack():
    hooks = []

    def fn(t):
        hooks.append(hooks_top())
        return t.sin().exp()

    mine, other = (gradckpt.checkpoint(fn, leaf(4)) for _ in range(2))
    unpack, held = hooks[0][1], mine.grad_fn._raw_saved_result.data
    for thing in (leaf(4), None, other.grad_fn._raw_saved_result.data):
        with pytest.raises(TypeError, match="unpack was called with something that this region did not pack"):
            unpack(thing)
    assert torch.equal(unpack(held), mine)


def test_warning_of_a_backward_as_an_error():
    """The gradients are there in the next step."""
    gradckpt.stats.reset()
    x = leaf(4).double()  # which no codec takes

    def gradient():
        return torch.autograd.grad(gradckpt.checkpoint(lambda t: t.sin().exp(), x, compress="int8").sum(), x)

    first = gradient()
    with pytest.raises(gradckpt.GradckptInactiveWarning, match="nothing was compressed by the second backward"):
        gradient()
    assert torch.equal(*first, *gradient())


@BOTH
def test_odd_objects_raise_as_in_torch(ck):
    class Liar:
        __class__ = property(lambda self: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        ck(lambda t, _: t.sin(), leaf(4), Liar())


@pytest.mark.parametrize("given", [gradckpt.policies.save_matmuls, "save_matmuls", (1, 2)])
def test_what_is_no_context_fn_is_named(given):
    with pytest.raises(TypeError, match="context_fn is a function that returns two context managers, not ") as said:
        gradckpt.checkpoint(torch.sin, leaf(2), context_fn=given)
    assert repr(given) in str(said.value)
    with pytest.raises(TypeError, match=f"'{type(given).__name__}' object is not callable"):
        gradckpt.compat.checkpoint(torch.sin, leaf(2), use_reentrant=False, context_fn=given)


# ---- torch's words ----


def test_a_hook_of_a_recompute_that_is_over():
    """It was left on the stack by the region's own code."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)

    def region(x):
        y = x.sin().exp()
        hooks.__enter__()
        return y

    x = leaf(4)
    y = gradckpt.checkpoint(region, x, early_stop=False)
    hooks.__exit__()
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with pytest.raises(Exception):  # noqa: B017  torch raises CheckpointError, by chance
        torch.autograd.grad(y.sum(), x, create_graph=True)
    while top(False) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def test_torchs_errors_and_warnings_under_a_transform():
    def differentiate(**options):
        torch.func.grad(lambda x: gradckpt.compat.checkpoint(lambda y: y.sin().sum(), x, **options))(torch.ones(3))

    with pytest.raises(ValueError, match="determinism_check"):
        differentiate(use_reentrant=False, determinism_check="typo")
    with pytest.warns(UserWarning, match=r"^torch\.utils\.checkpoint: "), contextlib.suppress(RuntimeError):
        differentiate()


def test_stop_iteration_in_a_region_leaves_nothing():
    made = []

    def region(x):
        y = x * 2
        made.append(weakref.ref(y))
        next(iter(()))
        return y

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            gradckpt.checkpoint(region, leaf(1000))
        assert made[0]() is None
    finally:
        gc.enable()
