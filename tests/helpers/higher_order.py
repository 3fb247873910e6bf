"""Torch's higher order operators, each in a small region, and the ways to run one.

An operator that this torch lacks, or that fails in a plain program, is no case.
"""

import contextlib
import functools
import gc
import importlib
import warnings

import torch
from torch._ops import HigherOrderOperator
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torchs_contexts

import gradckpt
from gradckpt._engine.torch_private import asks_policies_after

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


class Block(torch.nn.Module):
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


def gradients(name, way, codec=None, compiled=False):
    """The gradients of a step, in one flat tensor."""
    block = Block(name)
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
            return gradients(name, way, codec, compiled)
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
