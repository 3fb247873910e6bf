"""gradckpt.checkpoint without compression: errors are torch's, and leave everything as it was."""

import contextlib
import functools
import gc
import inspect
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from call_faults import ACCELERATED, PRETENDED
from python_callbacks import instead
from test_checkpoint import BOTH, _nothing_left_behind, hooks_top, leaf, quiet_log, theirs  # noqa: F401
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torchs_own import replays_devices, saves_inputs_alone, tells_contexts

import gradckpt
from gradckpt._engine.callbacks import TABLE

# ---- contexts, modes, hooks ----


@tells_contexts
@BOTH
def test_context_fn_order(ck):
    log = []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            log.append(f"+{self.name}")

        def __exit__(self, kind, *rest):
            log.append(f"-{self.name} {kind.__name__ if kind else None}")

    y = ck(lambda t: log.append("run") or t.sin().exp(), leaf(4), context_fn=lambda: (Context("f"), Context("r")))
    y.sum().backward()
    assert log == ["+f", "run", "-f None", "+r", "run", "-r _StopRecomputationError"]
    with pytest.raises(ZeroDivisionError):
        ck(lambda t: 1 / 0, leaf(4), context_fn=lambda: (Context("f"), Context("r")))
    assert log[-2:] == ["+f", "-f ZeroDivisionError"]


@tells_contexts
@BOTH
def test_context_that_suppresses(ck):
    quiet = functools.partial(contextlib.suppress, ZeroDivisionError, torch_checkpoint._StopRecomputationError)
    with pytest.raises(RuntimeError, match="forward context provided by context_fn suppressed"):
        ck(lambda t: 1 / 0, leaf(4), context_fn=lambda: (quiet(), quiet()))
    x = leaf(4)
    ck(lambda t: t.sin().exp(), x, context_fn=lambda: (contextlib.nullcontext(), quiet())).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


@BOTH
def test_no_grad_calls_once_without_contexts(ck):
    made = []
    with torch.no_grad():
        y = ck(lambda t: t.sin(), leaf(4), context_fn=lambda: made.append(1) or torch_checkpoint.noop_context_fn())
    assert not y.requires_grad
    assert made == [1]


@saves_inputs_alone
def test_runs_under_outer_hooks():
    def run(ck):
        counts = [0, 0]

        def pack(t):
            counts[0] += 1
            return t

        def unpack(t):
            counts[1] += 1
            return t

        x = leaf(8, 8)
        with save_on_cpu(), saved_tensors_hooks(pack, unpack):
            y = ck(lambda a, b: ck(torch.exp, a * b).sin(), x * 1, x.detach())
        y.sum().backward()
        return counts

    assert run(gradckpt.checkpoint) == run(theirs)


@BOTH
def test_disabled_hooks_are_refused(ck):
    message = "saved tensors default hooks are disabled"
    with torch.autograd.graph.disable_saved_tensors_hooks(message), pytest.raises(RuntimeError, match=message):
        ck(torch.sin, leaf(4))


@replays_devices
@BOTH
def test_device_context_is_replayed(ck):
    seen = []

    def fn(t):
        seen.append(torch.ones(1).device.type)
        return t.sin().exp()

    with torch.device("meta"):
        y = ck(fn, leaf(4))
    y.sum().backward()
    assert seen == ["meta", "meta"]


@BOTH
def test_autocast_of_the_forward_counts(ck):
    seen = []

    def fn(t):
        seen.append(
            (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())
        )
        return (t @ t).sin().exp()

    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        y = ck(fn, leaf(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.sum().backward()
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        y = ck(fn, leaf(4, 4))
    y.sum().backward()
    with torch.autocast("cpu", enabled=False):
        y = ck(fn, leaf(4, 4))
    with torch.autocast("cpu"):
        y.sum().backward()
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[4][0] is seen[5][0] is False


def test_grad_mode_of_the_recompute():
    seen = []
    y = gradckpt.checkpoint(lambda t: seen.append(torch.is_grad_enabled()) or t.sin().exp(), leaf(4))
    with torch.no_grad():
        y.grad_fn._saved_result  # noqa: B018 - outside backward, grad off
        assert not torch.is_grad_enabled()
    assert seen == [True, True]


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


def fails(ck, first, again, **options):
    """A region whose recompute runs another function than its forward."""
    functions = iter([first, again, again])
    x = leaf(4, 4)
    y = ck(lambda t: next(functions)(t), x, **options)
    with pytest.raises(BaseException) as caught:
        y.sum().backward()
    assert hooks_top() is None
    return type(caught.value), str(caught.value)


MISMATCHES = {
    "fewer": (lambda t: t.sin().exp().tanh(), lambda t: t.sin() + 1, {}),
    "more": (lambda t: t.sin().exp(), lambda t: t.sin().exp().tanh(), {"early_stop": False}),
    "shape": (lambda t: t.exp().sin(), lambda t: t[:2].exp().sin(), {}),
    "dtype": (lambda t: t.exp().sin(), lambda t: t.double().exp().sin(), {}),
    "exception": (lambda t: t.exp().sin(), lambda t: t.exp() / t.no_such_attribute, {}),
    "exit": (lambda t: t.exp().sin(), lambda t: exit(3), {}),
    "debug": (lambda t: t.sin().exp().tanh(), lambda t: t.sin() + 1, {"debug": True}),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_has_torchs_class_and_text(name, quiet_log):  # noqa: F811
    first, again, options = MISMATCHES[name]
    mine, other = fails(gradckpt.checkpoint, first, again, **options), fails(theirs, first, again, **options)
    assert mine[0] is other[0]
    if name != "debug":
        assert mine[1] == other[1]
    else:
        assert "Operations executed during recomputation" in mine[1]


@pytest.mark.parametrize("initialized", [(False, True), (False, False), (True, True)])
def test_a_device_that_wakes_up_in_a_region_is_refused(initialized, monkeypatch):
    device = types.SimpleNamespace(_initialized=initialized[0])
    monkeypatch.setattr(torch, PRETENDED, device, raising=False)

    def wakes(t):
        device._initialized = initialized[1]
        return t.sin()

    if initialized != (False, True):
        ACCELERATED.checkpoint(wakes, leaf(4)).sum().backward()
        return
    with pytest.raises(RuntimeError, match="device state was initialized in the forward pass"):
        ACCELERATED.checkpoint(wakes, leaf(4))


def test_determinism_check_of_the_users_own(monkeypatch):
    monkeypatch.setitem(torch_checkpoint._allowed_determinism_checks_to_fns, "values", lambda x: x.tolist())
    factors = iter([1.0, 1.0, 2.0])
    y = gradckpt.checkpoint(lambda t: (t * next(factors)).exp().sin(), leaf(4), determinism_check="values")
    y.sum().backward(retain_graph=True)
    with pytest.raises(torch_checkpoint.CheckpointError, match="different metadata"):
        y.sum().backward()


def test_determinism_none_lets_shapes_pass():
    x = leaf(1, 4)
    sizes = iter([1, 2])
    y = gradckpt.checkpoint(lambda t: t.expand(next(sizes), 4).exp().sin().sum(), x, determinism_check="none")
    y.backward()
    assert x.grad is not None


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


@BOTH
def test_region_that_raised_can_be_differentiated_in_part(ck):
    kept = []

    def fn(t):
        kept.append(t.sin().cos())
        if len(kept) == 1:
            raise ValueError
        return kept[-1].sin().sin()

    x = leaf(4)
    with pytest.raises(ValueError):
        ck(fn, x, early_stop=False)
    kept[0].sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("inplace", [lambda t: t.add_(1), lambda t: t.detach().zero_()])
@BOTH
def test_changed_input_is_noticed(ck, inplace):
    h = leaf(4) * 2
    y = ck(lambda t: t.sin().exp(), h)
    inplace(h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


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


def test_debug_notices_changed_parameters():
    x, linear = leaf(3, 4), torch.nn.Linear(4, 4)
    y = gradckpt.checkpoint(linear, x, debug=True)
    with torch.no_grad():
        linear.bias.mul_(2)
    with pytest.raises(RuntimeError, match=r"would be wrong; call optimizer.* backward: bias \(version 1, now 2\)$"):
        y.sum().backward()


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


@pytest.mark.parametrize("reentrant", [True, None])
def test_reentrant_is_torchs(reentrant):
    ignore = pytest.warns(UserWarning, match="use_reentrant") if reentrant is None else contextlib.nullcontext()
    x = leaf(4)
    with ignore:
        y = gradckpt.checkpoint(lambda t: F.dropout(t.sin()), x, use_reentrant=reentrant)
    assert "CheckpointFunction" in type(y.grad_fn).__name__
    y.sum().backward()
    for options in ({"other": 1}, {"debug": True}, {"context_fn": list}):
        with pytest.raises(ValueError) as theirs_said:
            torch_checkpoint.checkpoint(torch.sin, x, use_reentrant=True, **options)
        with pytest.raises(ValueError) as said:
            gradckpt.checkpoint(torch.sin, x, use_reentrant=True, **options)
        assert str(said.value) == str(theirs_said.value)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda ck: ck(3, leaf(2)), TypeError),
        (lambda ck: ck(torch.sin, leaf(2), determinism_check="hash"), ValueError),
        (lambda ck: ck(torch.sin, leaf(2), debug=True, context_fn=list), ValueError),
        (lambda ck: ck(torch.sin, leaf(2), leaf(2), leaf(2)), TypeError),
        (lambda ck: ck(torch.sin, leaf(2), context_fn=lambda: 3), TypeError),
        (lambda ck: ck(torch.sin, leaf(2), context_fn=3), TypeError),
    ],
)
def test_bad_calls(call, error):
    with pytest.raises(error) as other:
        call(theirs)
    with pytest.raises(error) as mine:
        call(gradckpt.checkpoint)
    if error is ValueError:
        assert str(mine.value) == str(other.value)


@pytest.mark.parametrize("given", [gradckpt.policies.save_matmuls, "save_matmuls", (1, 2)])
def test_what_is_no_context_fn_is_named(given):
    with pytest.raises(TypeError, match="context_fn is a function that returns two context managers, not ") as said:
        gradckpt.checkpoint(torch.sin, leaf(2), context_fn=given)
    assert repr(given) in str(said.value)
    with pytest.raises(TypeError, match=f"'{type(given).__name__}' object is not callable"):
        gradckpt.compat.checkpoint(torch.sin, leaf(2), use_reentrant=False, context_fn=given)


def test_signature_has_torchs_keywords():
    mine = inspect.signature(gradckpt.checkpoint).parameters
    other = inspect.signature(torch_checkpoint.checkpoint).parameters
    assert {*other, "preserve_rng_state"} <= {*mine}
    of_newer_torch = {"preserve_rng_state", "respect_saved_tensors_hooks"}
    assert {*mine} - {*other} - of_newer_torch == {"buffers", "compress", "offload", "policy"}
    assert mine["use_reentrant"].default is False
    assert gradckpt.checkpoint.__doc__


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
