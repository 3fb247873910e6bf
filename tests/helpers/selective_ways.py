"""What tests of selective recompute share: the checkpoints and contexts they compare,
and operators that count."""

import contextlib
import functools
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torchs_contexts

import gradckpt

aten = torch.ops.aten
calls = Counter()


@torch.library.custom_op("gradckpt_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    calls["double"] += 1
    return x * 2


@torch.library.custom_op("gradckpt_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    calls["square"] += 1
    return x * x


@torch.library.custom_op("gradckpt_tests::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    calls["pair"] += 1
    return x.sin(), x.cos()


@torch.library.custom_op("gradckpt_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> list[torch.Tensor]:
    calls["halves"] += 1
    return [each.clone() for each in x.chunk(2)]


@torch.library.custom_op("gradckpt_tests::fails", mutates_args=())
def fails(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


def _saves(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _rotated(a, b, x):
    return a * x.cos() - b * x.sin()


double.register_autograd(lambda ctx, grad: grad * 2)
square.register_autograd(lambda ctx, grad: grad * 2 * ctx.saved_tensors[0], setup_context=_saves)
pair.register_autograd(lambda ctx, a, b: _rotated(a, b, *ctx.saved_tensors), setup_context=_saves)
halves.register_autograd(lambda ctx, grads: torch.cat(grads))
double.register_fake(torch.empty_like)
square.register_fake(torch.empty_like)

DOUBLE, SQUARE = torch.ops.gradckpt_tests.double.default, torch.ops.gradckpt_tests.square.default
PAIR, HALVES = torch.ops.gradckpt_tests.pair.default, torch.ops.gradckpt_tests.halves.default

theirs = functools.partial(torchs_checkpoint, use_reentrant=False)
FAILS = torch.ops.gradckpt_tests.fails.default

CHECKPOINTS = pytest.mark.parametrize("ck", [theirs, gradckpt.checkpoint], ids=["torchs checkpoint", "ours"])


class Watch(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func] += 1
        return func(*args, **(kwargs or {}))


class Contexts:
    """A context_fn; `made`: the pair of contexts that it made last."""

    def __init__(self, make):
        self.make, self.made = make, None

    def __call__(self):
        self.made = self.make()
        return self.made


class Way:
    """One way to keep what a list of operators returns."""

    def __init__(self, name):
        self.name = name
        gradckpt._C.catch_by_mode(name == "by mode")

    def contexts(self, ops, **options):
        """The context_fn of these operators."""
        ops = list(ops)
        policy = (lambda ctx, op, *args, **kwargs: op in ops) if self.name == "by function" else ops
        make = torchs_contexts if self.name == "torch" else gradckpt.compat.create_selective_checkpoint_contexts
        return Contexts(functools.partial(make, policy, **options))

    def around(self):
        return Watch() if self.name == "under a mode" else contextlib.nullcontext()


OURS = ["by key", "by mode", "by function", "under a mode"]


@pytest.fixture(params=["torch", *OURS])
def way(request):
    yield Way(request.param)
    gradckpt._C.catch_by_mode(False)


@pytest.fixture(params=OURS)
def our_way(request):
    yield Way(request.param)
    gradckpt._C.catch_by_mode(False)


def key_is_on():
    return torch._C._dispatch_tls_is_dispatch_key_included("Negative")


@pytest.fixture
def _nothing_left_behind():
    torch.manual_seed(0)
    calls.clear()
    yield
    assert not key_is_on()
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded("ADInplaceOrView")
    assert torch._C._len_torch_dispatch_stack() == 0
    assert catches_nothing()


def catches_nothing():
    """A region of now keeps its own outputs, and no other region does."""
    context_fn = Way("by key").contexts([aten.mm.default])
    x = torch.ones(4, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(gradckpt.checkpoint(lambda t: t.mm(t).exp(), x, context_fn=context_fn).sum(), x)
    want = torch.autograd.grad(x.mm(x).exp().sum(), x)[0]
    return torch.equal(grad, want) and len(context_fn.made[0].storage[aten.mm.default]) == 1


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def gradients(function, inputs):
    """The output, and gradients of a sum with weights, so that every value of it counts."""
    out = function(*inputs)
    tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    loss = sum((t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum() for t in tensors)
    return out, torch.autograd.grad(loss, inputs, allow_unused=True)


def same(a, b):
    return all((p is q is None) or torch.equal(p, q) for p, q in zip(a, b, strict=True))


def kept(ops, **options):
    return {"context_fn": lambda: gradckpt.compat.create_selective_checkpoint_contexts(ops, **options)}


def chain(x):
    return square(double(square(double(x.sin())))).exp()
