"""Selective recompute among threads, interrupts, modes, transforms and compilers."""

import contextlib
import threading

import pytest
import torch
from processes import Alarm, in_threads
from selective_ways import (
    DOUBLE,
    FAILS,
    SQUARE,
    Watch,
    aten,
    calls,
    catches_nothing,
    chain,
    fails,
    gradients,
    kept,
    key_is_on,
    leaf,
    our_way,
    same,
    square,
    torchs_contexts,
)
from selective_ways import _nothing_left_behind as _nothing_left_behind
from torch._subclasses.fake_tensor import FakeTensorMode

import gradckpt

pytestmark = pytest.mark.usefixtures("_nothing_left_behind")
__all__ = ["our_way"]
checkpoint, contexts = gradckpt.checkpoint, gradckpt.compat.create_selective_checkpoint_contexts


# ---- threads ----


def test_regions_of_two_threads_do_not_mix():
    meet = threading.Barrier(2, timeout=30)

    def work(seed, ops):
        torch.manual_seed(seed)
        x = leaf(8, 8)

        def region(t):
            t = (t @ t).sin()
            meet.wait()
            return (t @ t).exp().sin() @ t

        want = gradients(region, (x,))[1]
        for _ in range(20):
            assert same(gradients(lambda t: checkpoint(region, t, **kept(ops)), (x,))[1], want)

    in_threads(lambda: work(1, [aten.mm.default]), lambda: work(2, [aten.exp.default, aten.sin.default]))


def test_a_thread_without_a_region_is_not_caught():
    meet = threading.Barrier(2, timeout=30)
    made = []

    def region(t):
        meet.wait()
        meet.wait()
        return square(t)

    def bystander():
        meet.wait()
        square(torch.ones(3))
        meet.wait()

    def work():
        checkpoint(region, leaf(3), context_fn=lambda: made.append(contexts([SQUARE])) or made[0])

    in_threads(work, bystander)
    assert list(made[0][0].storage[SQUARE]) == [0]


def test_backward_in_another_thread(our_way):
    x = leaf(8)
    want = torch.autograd.grad(chain(x).sum(), x)
    y = checkpoint(chain, x, context_fn=our_way.contexts([SQUARE])).sum()
    calls.clear()
    got = []
    in_threads(lambda: got.extend(torch.autograd.grad(y, x)))
    assert same(got, want)
    assert calls == {"double": 2}


@pytest.mark.parametrize("decide", [False, True], ids=["reusable", "discrete"])
def test_two_threads_recompute_one_region_at_once(decide):
    """Each counts its own calls. By two outputs: autograd lets one thread at a time into a node."""
    meet, again = threading.Barrier(2, timeout=20), [False]

    def product(t):
        return t.sort(1)[0] * t.argsort(1) if decide else t @ t

    def region(t):
        a = product(t).sin()
        if again[0]:
            meet.wait()
        b = product(a)
        return b.exp(), b.sin()

    x = leaf(32, 32)
    options = {"compress": "int8"} if decide else kept([aten.mm.default], reusable=True)
    outputs = checkpoint(region, x * 1, early_stop=False, **options)
    want = [torch.autograd.grad(y.sum(), x, retain_graph=True) for y in outputs]
    again[0] = True

    def backward(i):
        assert same(torch.autograd.grad(outputs[i].sum(), x, retain_graph=True), want[i])

    in_threads(lambda: backward(0), lambda: backward(1))


# ---- exceptions ----


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["forward", "recompute"])
def test_an_exception_in_the_region_leaves_nothing(our_way, error, when):
    runs = iter(["forward", "recompute"])

    def region(t):
        y = (t @ t).exp()
        if next(runs) == when:
            raise error
        return y.sin()

    with pytest.raises(error), our_way.around():
        checkpoint(region, leaf(4, 4), context_fn=our_way.contexts([aten.mm.default])).sum().backward()
    assert not key_is_on()
    assert catches_nothing()


@pytest.mark.parametrize("policy", [[SQUARE], lambda ctx, op, *args, **kwargs: op is SQUARE], ids=["list", "function"])
def test_an_exception_in_a_kept_operator(policy):
    for each in (policy, [FAILS]):
        with pytest.raises(ZeroDivisionError):
            checkpoint(lambda t: fails(square(t)), leaf(4), **kept(each))
        with pytest.raises(ZeroDivisionError):
            gradckpt.SelectiveRecompute.apply(lambda t: fails(square(t)), each, leaf(4))


def test_interrupts_at_any_moment_leave_the_key_off():
    rang, x = 0, leaf(8, 8)

    def work(pair_of):
        y = checkpoint(lambda t: (t @ t).exp().sin(), x, context_fn=lambda: pair_of)
        return torch.autograd.grad((y,), (x,), (torch.ones(8, 8),))

    with Alarm() as alarm:
        for i in range(600):
            pair_of = contexts([aten.mm.default, aten.exp.default])
            rang += alarm.during(2e-6 * (1 + i % 150), work, pair_of) is None
            assert not key_is_on()
            while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                torch._C._autograd._pop_saved_tensors_default_hooks()
    assert rang > 50
    assert catches_nothing()


def test_a_context_is_left_where_it_was_entered():
    forward, recompute = contexts([SQUARE])
    x = torch.ones(4)
    with forward as entered:
        assert entered is forward
        assert key_is_on()
        square(x)
        with contexts([DOUBLE])[0]:
            square(x)
        square(x)
    assert not key_is_on()
    square(x)
    calls.clear()
    for _ in range(2):  # a second time: in torch's words
        with contextlib.suppress(RuntimeError), recompute:
            assert [square(x).sum().item() for _ in range(3)] == [4.0] * 3
    assert calls == {}
    assert [type(c).__mro__[2] for c in (forward, recompute)] == [type(c) for c in torchs_contexts([SQUARE])]


# ---- modes, transforms, compilers ----


def test_a_mode_around_backward_only_or_forward_only():
    x = leaf(8)
    want = gradients(chain, (x,))[1]
    for first, second in ((Watch, contextlib.nullcontext), (contextlib.nullcontext, Watch)):
        calls.clear()
        with first():
            y = checkpoint(chain, x, **kept([SQUARE]))
        with second():
            got = torch.autograd.grad(y, x, torch.arange(1.0, 9))
        assert same(got, want)
        assert calls == {"double": 4, "square": 2}


def test_under_a_fake_mode(our_way):
    with FakeTensorMode():
        x = leaf(8, 8)
        y = checkpoint(lambda t: (t @ t).sin(), x, context_fn=our_way.contexts([aten.mm.default]))
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.shape == (8, 8)
    assert type(grad).__name__ == "FakeTensor"


def test_torch_func_inside(our_way):
    def region(t):
        rows = torch.func.vmap(lambda row: (row @ t).exp())(t)
        return torch.func.functionalize(lambda u: (u @ t).sin())(rows) @ t * rows

    x = leaf(4, 4)
    ops = [aten.mm.default, aten.sin.default, aten.exp.default]
    got = gradients(lambda t: checkpoint(region, t, context_fn=our_way.contexts(ops)), (x,))[1]
    assert same(got, gradients(region, (x,))[1])


def test_an_inference_mode_inside_does_not_stop_the_counting_of_versions(our_way):
    """In place changes are noticed by tensors' versions,
    which count on a key that keeping an output switches."""
    changed = torch.ones(4, 4)

    def region(t):
        with torch.inference_mode():
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))
            changed.add_(1)
        return (t @ t).exp()

    x = leaf(4, 4)
    product = (x * 1) * changed
    checkpoint(region, x, context_fn=our_way.contexts([aten.mm.default]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_tensor_subclass_inside(our_way):
    from torch.testing._internal.two_tensor import TwoTensor

    def region(t):
        return (t @ t).sin() @ t

    x = TwoTensor(torch.randn(4, 4), torch.randn(4, 4)).requires_grad_()
    y = checkpoint(region, x, context_fn=our_way.contexts([aten.mm.default]))
    (got,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(region(x).sum(), x)
    assert torch.equal(got.a, want.a)
    assert torch.equal(got.b, want.b)


def test_without_the_key_modes_do_the_work(request):
    request.addfinalizer(lambda: gradckpt._C.catch_by_mode(False))
    gradckpt._C.catch_by_mode(True)
    with contexts([SQUARE])[0]:
        assert not key_is_on()
        assert torch._C._len_torch_dispatch_stack() == 1
