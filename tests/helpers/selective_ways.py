"""What tests of selective recompute share: the checkpoints and contexts they compare,
and operators that count."""

import collections
import contextlib
import functools
import gc
import importlib
import sys
import warnings
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.nn.functional import dropout, gelu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torchs_contexts

import gradckpt
from gradckpt._engine.torch_private import asks_policies_after

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


# ---- A block with a call that is kept and one that runs again, and what its regions did.
#
# ``torch_remat.region`` and ``gradckpt.policies.region`` have the same signature, so one block
# serves both.

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


class KeptBlock(nn.Module):
    """x -> kept(x) -> again -> a tail without a name; ``calls`` counts them."""

    def __init__(self, region, calls, p=0.3):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.out = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 16)
        self.region, self.calls, self.p = region, calls, p

    def kept(self, x):
        self.calls["kept"] += 1
        return dropout(gelu(self.up(x)), self.p)

    def again(self, x):
        self.calls["again"] += 1
        return self.down(x)

    def forward(self, x):
        self.calls["block"] += 1
        h = self.region(self.kept, "kept", recompute=False)(x)
        y = self.region(self.again, "again", recompute=True)(h)
        return x + dropout(self.out(y).tanh(), self.p)


class Plain(nn.Module):
    """Without names."""

    def __init__(self, calls):
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.calls = nn.Linear(16, 16), calls

    def forward(self, x):
        self.calls["plain"] += 1
        return torch.relu(self.linear(x)).square()


class Ran(NamedTuple):
    loss: torch.Tensor
    grads: list
    forward: dict  # calls of each function in the forward
    backward: dict

    def equals(self, other):
        both = zip((self.loss, *self.grads), (other.loss, *other.grads), strict=True)
        return all((a is None and b is None) or torch.equal(a, b) for a, b in both)


def run(function, modules, calls, backwards=1):
    """Train one step of ``function`` on an input that is no leaf; seeds are the same each time."""
    calls.clear()
    x = X.clone().requires_grad_()
    torch.manual_seed(3)
    for module in modules:
        module.zero_grad()
    loss = function(x * 1).square().sum()
    forward = dict(calls)
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    rng = torch.get_rng_state()
    grads = [x.grad, *(p.grad for module in modules for p in module.parameters()), rng]
    calls.subtract(forward)
    return Ran(loss.detach(), grads, forward, {name: n for name, n in calls.items() if n})


@functools.cache
def torch_remat():
    """The library, or a skip. Other tests of the process count what regions do without it, so that
    a test that uses it puts it into ``sys.modules``.
    """
    library = pytest.importorskip("torch_remat", reason="torch_remat is not installed")
    del sys.modules["torch_remat"]
    return library


def counter():
    return collections.Counter()


def checkpointed(function, **options):
    return lambda x: gradckpt.checkpoint(function, x, **options)


def in_sequence(*functions):
    def call(x):
        for function in functions:
            x = function(x)
        return x

    return functions[0] if len(functions) == 1 else call


def nested(text, parts, **ways):
    """What ``text`` says, as in "ours(kept(plain), sin)", where what stands side by side runs one
    after the other; and the same without any of the ``ways``.
    """
    wrap = {name: lambda *inside, way=way: way(in_sequence(*inside)) for name, way in ways.items()}
    return eval(text, {**parts, **wrap}), eval(text, {**parts, **dict.fromkeys(ways, in_sequence)})


def kept_call(function, name="call"):
    return gradckpt.policies.region(function, name, recompute=False)


def ways(block):
    """Forms of a region that honour what the block says of its calls."""
    return {
        "checkpoint": checkpointed(block),
        "lossless": checkpointed(block, compress={"codec": "lossless", "min_numel": 1}),
        "compat": lambda x: gradckpt.compat.checkpoint(block, x, use_reentrant=False),
        "sequential": lambda x: gradckpt.checkpoint_sequential([block, nn.Identity()], 2, x),
        "policy": checkpointed(block, policy="save_matmuls"),
        "no early stop": checkpointed(block, early_stop=False),
        "context_fn": checkpointed(block, context_fn=lambda: (torch.enable_grad(), torch.enable_grad())),
        "debug": checkpointed(block, debug=True),
    }


# ---- Torch's higher order operators, each in a small region, and the ways to run one.
#
# An operator that this torch lacks, or that fails in a plain program, is no case.

N = 64
LOSSY = "int8"


def make(name, function=lambda function, *operands: function(*operands)):
    """A higher order operator that torch has not, as one of a later torch would be written."""

    class New(HigherOrderOperator):
        def __init__(self):
            super().__init__(name)

        def __call__(self, function, *operands):
            return super().__call__(function, *operands)

    op = New()

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, *operands):
            ctx.function = function
            ctx.save_for_backward(*operands)
            with torch._C._AutoDispatchBelowAutograd():
                return op(function, *operands)

        @staticmethod
        def backward(ctx, grad):
            operands = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                out = ctx.function(*operands)
            return None, *torch.autograd.grad(out, operands, grad)

    op.py_impl(torch._C.DispatchKey.Autograd)(Node.apply)
    op.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(function)
    return op


class OperatorBlock(torch.nn.Module):
    """Calls one operator among others."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.norm, self.inner, self.outer = torch.nn.LayerNorm(N), torch.nn.Linear(N, N), torch.nn.Linear(N, N)

    def forward(self, x):
        h = torch.nn.functional.gelu(self.norm(x))
        return x + self.outer(OPERATORS[self.name](self, h).reshape(h.shape).tanh())


def _flex_attention(block, h):
    q = block.inner(h).view(1, 2, -1, N // 2)
    called = importlib.import_module("torch.nn.attention.flex_attention")
    return called.flex_attention(q, q * 1, q * 2, score_mod=lambda score, b, h, i, j: score + (i - j) / 8)


def _cond(block, h):
    return torch.cond(h.sum() > -1e9, lambda h: torch.tanh(block.inner(h)), lambda h: h.sin(), (h,))


def _mapped(module):
    def call(block, h):
        found = importlib.import_module(module)
        return found.map(lambda row: torch.tanh(block.inner(row)), h)

    return call


def _while_loop(block, h):
    found = importlib.import_module("torch._higher_order_ops.while_loop")
    start = torch.tensor(0), block.inner(h)
    return found.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, torch.tanh(y) * 2), start)[1]


def _scan(block, h):
    found = importlib.import_module("torch._higher_order_ops.scan")
    step = lambda carry, row: (torch.tanh(carry + row), (carry + row).clone())  # noqa: E731
    return found.scan(step, torch.zeros(N), block.inner(h))[1]


def _associative_scan(block, h):
    found = importlib.import_module("torch._higher_order_ops.associative_scan")
    return found.associative_scan(lambda a, b: a + b, block.inner(h), 0, combine_mode="generic")


def _invoke_subgraph(block, h):
    return torch.compiler.nested_compile_region(lambda h: torch.tanh(block.inner(h)))(h)


def _switch(block, h):
    found = importlib.import_module("torch._higher_order_ops.switch")
    return found.switch(torch.tensor(0), [lambda h: torch.tanh(block.inner(h)), lambda h: h.sin()], (h,))


def _wrap(block, h):
    return torch.ops.higher_order.wrap(lambda h: torch.tanh(block.inner(h)), h)


@functools.cache
def new():
    """Made when the first region has run."""
    return make("gradckpt_tests_new")


def _made_later(block, h):
    return new()(lambda h, w: torch.tanh(h @ w), h, block.inner.weight)


OPERATORS = {
    "flex_attention": _flex_attention,
    "cond": _cond,
    "functorch's map": _mapped("functorch.experimental.control_flow"),
    "map": _mapped("torch._higher_order_ops.map"),
    "while_loop": _while_loop,
    "scan": _scan,
    "associative_scan": _associative_scan,
    "invoke_subgraph": _invoke_subgraph,
    "switch": _switch,
    "wrap": _wrap,
    "made later": _made_later,
}


@contextlib.contextmanager
def surroundings():
    """On the CPU flex_attention differentiates, but refuses to."""
    torch._dynamo.reset()
    module = importlib.import_module("torch.nn.attention.flex_attention")
    refuses = module._validate_device
    module._validate_device = lambda *_: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            module._validate_device = refuses


# ---- ways: what is around a step, and what calls the block


def _region(**options):
    return lambda block, codec: (
        contextlib.nullcontext(),
        lambda x: gradckpt.checkpoint(block, x, compress=codec, **options),
    )


def _products(ctx, op, *args, **kwargs):
    return op is torch.ops.aten.mm.default or op is torch.ops.aten.addmm.default


def _everything(ctx, op, *args, **kwargs):
    return True


def _node(block, codec):
    call = gradckpt.SelectiveRecompute.apply
    return contextlib.nullcontext(), lambda x: call(block, "save_matmuls", x, compress=codec)


def _saved(block, codec):
    return gradckpt.compress_saved(codec) if codec is not None else contextlib.nullcontext(), block


def _enabled(block, codec):
    return gradckpt.enable(torch.nn.Sequential(block), compress=codec, modules=[block]), block


def _patched(block, codec):
    return gradckpt.patched(compress=codec), lambda x: torchs_checkpoint(block, x, use_reentrant=False)


WAYS = {
    "checkpoint": _region(),
    "reentrant": _region(use_reentrant=True),
    "SelectiveRecompute": _node,
    "save_matmuls": _region(policy="save_matmuls"),
    "save_attention": _region(policy="save_attention"),
    "a function": _region(policy=_products),
    "a function that keeps everything": _region(policy=_everything),
    "compress_saved": _saved,
    "enable": _enabled,
    "patched": _patched,
}


def plain(block, codec=None):
    return contextlib.nullcontext(), block


def torchs(block, codec=None, **options):
    return contextlib.nullcontext(), lambda x: torchs_checkpoint(block, x, **{"use_reentrant": False, **options})


def _torchs_with(policy):
    return functools.partial(torchs, context_fn=functools.partial(torchs_contexts, policy))


#: What torch has for a way; for the others: its checkpoint.
TORCHS = {
    "reentrant": functools.partial(torchs, use_reentrant=True),
    "save_matmuls": _torchs_with(_products),
    "save_attention": _torchs_with([torch.ops.higher_order.flex_attention]),
    "a function": _torchs_with(_products),
    "a function that keeps everything": _torchs_with(_everything),
}


def operator_gradients(name, way, codec=None, compiled=False):
    """The gradients of a step, in one flat tensor."""
    block = OperatorBlock(name)
    x = torch.randn(16, N, generator=torch.Generator().manual_seed(1)).requires_grad_()
    around, run = way(block, codec)
    with around:
        out = (torch.compile(run, backend="aot_eager") if compiled else run)(x * 1)
        out.square().sum().backward()
    return torch.cat([x.grad.flatten(), *(p.grad.flatten() for p in block.parameters() if p.grad is not None)])


@functools.cache
def _known(name, way, compiled):
    return outcome(name, way, None, compiled)


def outcome(name, way, codec=None, compiled=False):
    """The gradients, or the exception."""
    with surroundings():
        try:
            return operator_gradients(name, way, codec, compiled)
        except Exception as error:
            return _without_frames(error)


def _without_frames(error):
    """The exception without the frames of those that led to it: they hold the step, and in the
    compiler the mode of torch's checkpoint, which stays on the stack until its frame goes."""
    each = error
    while each is not None:
        each.__traceback__, each = None, each.__cause__ or each.__context__
    gc.collect()
    return error


def missing(name, compiled=False):
    """Why the operator is no case."""
    found = _known(name, plain, compiled)
    return f"{type(found).__name__}: {found}"[:200] if isinstance(found, Exception) else ""


def fault(name, way, codec, compiled=False):
    """What is wrong with a step; None: nothing is. It may raise where torch's checkpoint does, and
    where torch's has no rule for what is traced, or says the same."""
    got = outcome(name, WAYS[way], codec, compiled)
    want = _known(name, plain, compiled)
    if isinstance(got, Exception):
        # before torch 2.12 we trace with its own contexts
        other = torchs if not compiled or asks_policies_after else TORCHS["a function"]
        theirs = _known(name, TORCHS.get(way, other), compiled)
        same = isinstance(theirs, Exception) and (compiled or str(theirs) == str(got))
        return None if same or isinstance(_known(name, torchs, compiled), Exception) else f"{way} {codec}: {got!r}"
    if codec != LOSSY:
        return None if torch.equal(got, want) else f"{way} {codec}: not equal"
    error = float((got - want).norm() / want.norm())
    return None if error < 2e-2 else f"{way} {codec}: {error:.1e}"
