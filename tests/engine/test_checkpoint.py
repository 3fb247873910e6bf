"""gradckpt.checkpoint without compression against torch.utils.checkpoint: the same to the last bit;
errors are torch's, and leave everything as it was."""

import contextlib
import functools
import gc
import weakref
from collections import namedtuple

import behaviours
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from _pytest.logging import LogCaptureHandler
from call_faults import instead
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

import gradckpt
from gradckpt._engine.callbacks import TABLE

theirs = behaviours.checkpoint
compat = functools.partial(gradckpt.compat.checkpoint, use_reentrant=False)
BOTH = pytest.mark.parametrize("ck", [theirs, gradckpt.checkpoint], ids=["torch", "gradckpt"])
Pair = namedtuple("Pair", "a b")


def hooks_top():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    torch.manual_seed(0)
    yield
    assert hooks_top() is None
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.fixture
def quiet_log(monkeypatch):
    """debug=True logs in a way that pytest's own handler cannot format."""
    monkeypatch.setattr(LogCaptureHandler, "handleError", lambda self, record: None)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


# ---- one table, both implementations ----


def nested(ck, depth, x):
    return ck(lambda h: nested(ck, depth - 1, h.tanh()) * h.sin(), x) if depth else x.exp()


def dropout_block(x, w):
    return F.dropout(F.gelu(x @ w), 0.3) @ w


def inside_grad(retain, x):
    y = x.sin().exp()
    (g,) = torch.autograd.grad(y.sum(), x, retain_graph=retain, create_graph=False)
    return (x.cos() * g).exp()


def inside_double(x):
    (g,) = torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)
    return g.exp() * x


def other_device(x):
    return x * torch.ones(8, 8, device="cpu") + x.sin()


def autocast_twice(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ w).sin().float() @ w


def inplace(x):
    y = x * 2
    y.add_(1).sin_()
    return y * x


SPARSE = torch.eye(8).to_sparse()

# name: function of (checkpoint, x, w)
CASES = {
    "one op": lambda ck, x, w: ck(torch.sin, x),
    "identity": lambda ck, x, w: ck(lambda t: t, x) * 2,
    "chain": lambda ck, x, w: ck(lambda t: t.sin().exp().tanh() @ t, x),
    "mlp": lambda ck, x, w: ck(lambda t: F.layer_norm(F.gelu(t @ w), (8,)) + t, x),
    "non-leaf": lambda ck, x, w: ck(lambda t: t.sin() @ w, x * 3),
    "dropout": lambda ck, x, w: ck(dropout_block, x, w),
    "dropout, rng not kept": lambda ck, x, w: ck(lambda t: t.sin().exp(), F.dropout(x, 0.5), preserve_rng_state=False),
    "rng drawn inside": lambda ck, x, w: ck(lambda t: t.exp() * torch.rand(8, 8) + torch.randn(8, 8).sin(), x),
    "kwargs": lambda ck, x, w: ck(lambda t, *, w, k: (t @ w).sin() * k, x, w=w, k=3),
    "tensor only in kwargs": lambda ck, x, w: ck(lambda *, t: t.sin().exp(), t=x * 1),
    "function by keyword": lambda ck, x, w: ck(function=lambda t: t.sin().exp(), t=x),
    "nested args": lambda ck, x, w: ck(
        lambda d: (d["p"].a @ d["l"][1][0]).sin(), {"p": Pair(x * 1, None), "l": [0, (w,)]}
    ),
    "odd args": lambda ck, x, w: ck(
        lambda t, n, s, f: f(t).exp() if n is None and s == "s" else t, x, None, "s", torch.sin
    ),
    "nested outputs": lambda ck, x, w: ck(lambda t: {"a": [t.sin(), None], "b": Pair(t.exp(), (t.detach(), 3))}, x),
    "output without grad": lambda ck, x, w: ck(lambda t: (t > 0, t.sin().exp()), x)[1],
    "int input": lambda ck, x, w: ck(lambda t, i: t[i].sin().exp(), x, torch.tensor([0, 2, 2])),
    "no input needs grad": lambda ck, x, w: ck(lambda t: (t @ w).sin().exp(), x.detach()),
    "no arguments": lambda ck, x, w: ck(lambda: (x @ w).sin()),
    "in-place on own tensor": lambda ck, x, w: ck(inplace, x),
    "no_grad inside": lambda ck, x, w: ck(lambda t: t.sin() * no_grad_part(t), x),
    "sparse input": lambda ck, x, w: ck(lambda t, s: torch.sparse.mm(s, t.t()).sin().exp(), x, SPARSE),
    "same tensor twice": lambda ck, x, w: ck(lambda a, b: (a * b).sin() * a, x, x),
    "chunk and views": lambda ck, x, w: ck(lambda t: torch.cat([c.sin() * c for c in t.t().chunk(2)]).view(-1), x),
    "two in a row": lambda ck, x, w: ck(lambda t: t.cos().exp(), ck(lambda t: t.sin() @ w, x)),
    "nested 2": lambda ck, x, w: nested(ck, 2, x),
    "nested 3": lambda ck, x, w: nested(ck, 3, x),
    "nested with dropout": lambda ck, x, w: ck(lambda t: ck(dropout_block, t.sin(), w) * t, x),
    "grad inside": lambda ck, x, w: ck(functools.partial(inside_grad, False), x),
    "grad inside, retained": lambda ck, x, w: ck(functools.partial(inside_grad, True), x),
    "grad inside, whole pass": lambda ck, x, w: ck(functools.partial(inside_grad, True), x, early_stop=False),
    "double inside": lambda ck, x, w: ck(inside_double, x),
    "early stop off": lambda ck, x, w: ck(lambda t: t.sin().exp() + 1, x, early_stop=False),
    "determinism none": lambda ck, x, w: ck(lambda t: t.sin().exp(), x, determinism_check="none"),
    "autocast inside": lambda ck, x, w: ck(autocast_twice, x, w),
    "device given": lambda ck, x, w: ck(other_device, x),
    "max pool, indices": lambda ck, x, w: ck(lambda t: F.max_pool2d(t.view(1, 1, 8, 8), 2).exp(), x),
    "attention": lambda ck, x, w: ck(lambda t: F.scaled_dot_product_attention(t[None], t[None], w[None]), x),
    "float64": lambda ck, x, w: ck(lambda t: t.double().sin().exp(), x),
}


@torch.no_grad()
def no_grad_part(t):
    return t.exp()


class Counted:
    """checkpoint that counts how often each function starts and ends, and notes the generator."""

    def __init__(self, ck):
        self.ck, self.calls, self.finished, self.seen = ck, 0, 0, []

    def __call__(self, *args, function=None, **kwargs):
        function, args = (args[0], args[1:]) if function is None else (function, args)

        def counted(*a, **k):
            self.calls += 1
            self.seen.append(torch.get_rng_state().sum().item())
            out = function(*a, **k)
            self.finished += 1
            return out

        return self.ck(counted, *args, **kwargs)


def measure(ck, case, backward=1):
    torch.manual_seed(7)
    x, w, counted, packed = leaf(8, 8), leaf(8, 8), Counted(ck), []
    with saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda t: t):
        out = case(counted, x, w)
    loss = sum(t.float().sum() for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad)
    torch.rand(5)  # so that a generator left where the recompute put it is noticed
    for i in range(backward):
        loss.backward(retain_graph=i + 1 < backward)
    tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    after = [torch.get_rng_state(), torch.rand(4)]
    flags = [(t.requires_grad, t.is_leaf, type(t.grad_fn)) for t in tensors]
    packed = [shape for shape in packed if shape != (0,)]  # torch 2.11 saves a dummy with the inputs of a region
    return [loss, x.grad, w.grad, *tensors, *after], [counted.calls, counted.finished, counted.seen, packed, flags]


def assert_same(a, b):
    assert a[1] == b[1]
    assert len(a[0]) == len(b[0])
    for p, q in zip(a[0], b[0], strict=True):
        assert (p is None) == (q is None)
        assert p is None or torch.equal(p, q)


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


@pytest.mark.parametrize("backward", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name, backward):
    wanted = measure(theirs, CASES[name], backward)
    for ours in (gradckpt.checkpoint, compat):
        assert_same(wanted, measure(ours, CASES[name], backward))


@pytest.mark.parametrize("surroundings", ["autocast", "autocast, no cache", "device", "early stop off", "debug"])
@pytest.mark.parametrize("name", ["mlp", "dropout", "nested 2", "two in a row", "rng drawn inside"])
def test_equals_torch_within(name, surroundings, quiet_log):
    enter = {
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "autocast, no cache": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
        "device": lambda: torch.device("cpu"),
        "early stop off": lambda: set_checkpoint_early_stop(False),
        "debug": lambda: set_checkpoint_debug_enabled(name != "nested 2"),
    }[surroundings]

    def case(ck, x, w):
        with enter():
            return CASES[name](ck, x, w)

    assert_same(measure(theirs, case), measure(gradckpt.checkpoint, case))


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
