"""gradckpt.checkpoint without compression: what it leaves behind, code of the user that runs in the
middle of it, and errors. What torch's function does, too, is compared in tests/equivalence."""

import contextlib
import gc
import weakref

import behaviours
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from call_faults import instead
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradckpt
from gradckpt._engine.callbacks import TABLE

theirs = behaviours.checkpoint
BOTH = pytest.mark.parametrize("ck", [theirs, gradckpt.checkpoint], ids=["torch", "gradckpt"])


def hooks_top():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    torch.manual_seed(0)
    yield
    assert hooks_top() is None
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


@BOTH
def test_no_random_state_is_left_after_the_backward(ck):
    """A state is 5 KiB of a step's peak, also on the next step."""
    size = torch.get_rng_state().numel()
    gc.collect()
    before = {id(x) for x in gc.get_objects() if isinstance(x, torch.Tensor)}
    x = leaf(8, 8)
    for _ in range(2):
        x = ck(lambda t: F.dropout(t, 0.5).exp(), x, use_reentrant=False)
    x.sum().backward()
    left = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and id(x) not in before]
    assert not [x for x in left if x.numel() == size]


# ---- reading, freeing, sharing a graph ----


def test_cycle_through_the_function_is_collected():
    class Owner:
        def __call__(self, t):
            return t * 1.5

    owner = Owner()
    owner.result = gradckpt.checkpoint(owner, leaf(4))
    dead = weakref.ref(owner)
    del owner
    gc.collect()
    assert dead() is None


def test_backward_inside_a_region_that_goes_on():
    """Tables made while the region records are shorter than its final number of slots."""

    def fn(t):
        a, b = t.sin(), t.cos()
        torch.autograd.grad(a.sum(), t, retain_graph=True)
        for _ in range(200):
            b = b.sin()
        return a + b

    def run(ck, backward):
        x = leaf(64)
        for _ in range(20):
            y = ck(fn, x)
            if backward:
                y.sum().backward()
            del y
        return x.grad

    run(gradckpt.checkpoint, backward=False)
    torch.manual_seed(0)
    mine = run(gradckpt.checkpoint, backward=True)
    torch.manual_seed(0)
    assert torch.equal(mine, run(theirs, backward=True))


# ---- contexts, modes, hooks ----


@pytest.mark.parametrize("around", ["forward", "backward"])
def test_views_of_reshape_are_alike_with_and_without_a_mode(around):
    """reshape() makes its view by another operator while a dispatch mode is on."""

    def fn(q, k):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q.sin(), k, k, is_causal=True).exp()

    modes = {"forward": contextlib.nullcontext(), "backward": contextlib.nullcontext(), around: behaviours.Operators()}
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
