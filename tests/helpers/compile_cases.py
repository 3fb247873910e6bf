"""Models and steps of the tests of torch.compile."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import _recursive_joint_graph_passes
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V

import gradckpt
from gradckpt._compile import graph
from gradckpt._engine import torch_private

LAYERS = 3


int8 = functools.partial(gradckpt.checkpoint, compress="int8")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    graph._warn_unpacked.cache_clear()
    gradckpt.stats.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Embeddings, and layers that are regions."""

    def __init__(self, checkpoint, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(dropout), nn.Linear(128, 64)) for _ in range(LAYERS)
        )
        self.checkpoint = checkpoint

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + self.checkpoint(layer, hidden)
        return hidden.square().mean()


IDS = torch.randint(0, 100, (4, 32), generator=torch.Generator().manual_seed(1))


NUMEL = IDS.numel() * 64


def step(model, function=None, ids=IDS):
    model.zero_grad()
    loss = (model if function is None else function)(ids)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def body(x, w):
    return (x @ w).sin() @ w


def weight(n=64):
    return (torch.randn(n, n, generator=torch.Generator().manual_seed(2)) * 0.1).requires_grad_()


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


def gradients(function, *inputs):
    copies = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    out = function(*copies)
    out.sum().backward()
    return [out.detach(), *(x.grad for x in copies)]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def dropout(x, w):
    return int8(lambda t, v: torch.dropout((t @ v).sin(), 0.5, True) @ v, x * 2, w)


#: Before 2.12: of the operator's output there is no node yet that could be marked.
ASKS_POLICIES_BEFORE = not torch_private.asks_policies_after
needs_outputs = pytest.mark.skipif(
    ASKS_POLICIES_BEFORE, reason="torch asks a policy before the operator runs, so a graph cannot pack its output"
)


# ---- Backends of torch.compile that let a test look at the graphs.

PARTITIONS = {"default": default_partition, "min cut": min_cut_rematerialization_partition}


class Graphs:
    """A backend: AOTAutograd, its graphs kept and run as they are."""

    def __init__(self, partition="min cut"):
        self.forward, self.backward = [], []
        self.backend = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=PARTITIONS[partition],
        )

    @staticmethod
    def _keep(modules):
        def compiler(module, inputs):
            modules.append(module)
            return make_boxed_func(module.forward)

        return compiler

    def compile(self, function, **options):
        return torch.compile(function, backend=self.backend, **{"fullgraph": True, **options})

    @property
    def saved(self):
        """What the last forward graph hands to its backward and made itself:
        tensors without data."""
        backward = {node.name for node in self.backward[-1].graph.find_nodes(op="placeholder")}
        nodes = self.forward[-1].graph.output_node().all_input_nodes
        values = [node.meta["val"] for node in nodes if node.op != "placeholder" and node.name in backward]
        return [x for x in values if isinstance(x, torch.Tensor)]

    @property
    def payloads(self):
        return [x for x in self.saved if x.dtype == torch.uint8]

    @property
    def exact(self):
        """What is saved as it is: floating tensors that the forward graph made."""
        return [x for x in self.saved if x.is_floating_point()]

    def calls(self, name, modules=None):
        """The operators of that name in gradckpt's namespace, over all graphs or these."""
        op = getattr(torch.ops.gradckpt, name).default
        modules = [*self.forward, *self.backward] if modules is None else modules
        return [node for m in modules for node in m.graph.find_nodes(op="call_function", target=op)]

    def calls_of(self, name, modules):
        """The operators of that name among torch's own."""
        packet = getattr(torch.ops.aten, name)
        return [
            node for m in modules for node in m.graph.nodes if getattr(node.target, "overloadpacket", None) is packet
        ]


# ---- Functions that passes over joint graphs rewrite, and a backend that runs Inductor's passes
# but compiles nothing.

FUNCTION_WIDTH = 64


def _partition(module, inputs, **options):
    with V.set_fake_mode(detect_fake_mode(inputs)):
        module = _recursive_joint_graph_passes(module) or module
    return min_cut_rematerialization_partition(module, inputs, compiler="inductor", **options)


def _run(module, inputs):
    return make_boxed_func(module.forward)


def passes():
    """A backend: AOTAutograd with Inductor's decompositions, joint graph passes and partitioner."""
    return aot_autograd(
        fw_compiler=_run, bw_compiler=_run, partition_fn=_partition, decompositions=select_decomp_table()
    )


def _heads(x):
    return x.view(1, -1, 4, FUNCTION_WIDTH // 4).transpose(1, 2)


def _attention(x, w, mask=None):
    q, k, v = _heads(x @ w), _heads(x), _heads(x.sin())
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)


def _scaled(x, w):
    h = x @ w
    return torch.softmax(h * 2.0, -1) + torch.softmax(h / torch.full_like(h, 2.0), -1)


#: Each takes a region's input and a weight, and computes something whose backward needs values.
FUNCTIONS = {
    "times one": lambda x, w: torch.tanh(x @ w) + x * 1,
    "times ones": lambda x, w: torch.tanh(x @ w) + x * torch.ones_like(x),
    "plus zeros": lambda x, w: torch.tanh(x @ w) + (x + torch.zeros_like(x)).sin(),
    "divided by ones": lambda x, w: torch.tanh((x / torch.ones_like(x)) @ w),
    "weight times ones": lambda x, w: torch.tanh(x @ (w * torch.ones_like(w))),
    "output times ones": lambda x, w: torch.tanh(x @ w) * torch.ones_like(x),
    "output plus zeros": lambda x, w: torch.tanh(x @ w).exp() + torch.zeros_like(x),
    "to the first": lambda x, w: (x**1).sin() @ w,
    "cat of one": lambda x, w: torch.tanh(torch.cat([x]) @ w),
    "cat of halves": lambda x, w: torch.tanh(torch.cat([x[:8], x[8:]]) @ w),
    "transposed twice": lambda x, w: torch.tanh(x.t().t() @ w.t().t()),
    "all of it": lambda x, w: torch.tanh(x[:, 0:] @ w[:, :]),
    "padded by nothing": lambda x, w: torch.tanh(F.pad(x, (0, 0)) @ w),
    "to its own dtype": lambda x, w: torch.tanh(x.to(x.dtype) @ w.float()),
    "to another and back": lambda x, w: torch.tanh(x.double().float() @ w),
    "clones": lambda x, w: torch.tanh(x.clone().clone().contiguous().clone() @ w),
    "the same twice": lambda x, w: (x @ w).sin() + (x @ w).sin() * (x @ w).sin(),
    "views": lambda x, w: torch.tanh(x.view(-1).view(x.shape).reshape(x.shape) @ w),
    "split and joined": lambda x, w: torch.tanh(torch.cat(x.split(16)) @ w),
    "stack and unbind": lambda x, w: torch.tanh(sum(torch.stack([x, x.sin()]).unbind()) @ w),
    "dropout of nothing": lambda x, w: F.dropout(torch.tanh(x @ w), 0.0),
    "addmm": lambda x, w: torch.addmm(x, x, w).sin(),
    "linear": lambda x, w: F.linear(F.linear(x, w, w[0]).relu(), w),
    "bmm of one": lambda x, w: torch.bmm(x[None], w[None])[0].sin(),
    "scaled softmax": _scaled,
    "softmax": lambda x, w: torch.softmax(x @ w, -1) @ x.t() @ x,
    "log softmax": lambda x, w: torch.log_softmax(x @ w, -1) * x,
    "attention": _attention,
    "masked attention": lambda x, w: _attention(x, w, torch.zeros(x.shape[0], x.shape[0])),
    "sdpa": lambda x, w: F.scaled_dot_product_attention(_heads(x @ w), _heads(x), _heads(x)).reshape(x.shape),
    "layer norm": lambda x, w: F.layer_norm(x @ w, (FUNCTION_WIDTH,)),
    "rms norm": lambda x, w: F.rms_norm(x, (FUNCTION_WIDTH,)) @ w,
    "where true": lambda x, w: torch.where(torch.ones_like(x, dtype=torch.bool), x, x.exp()) @ w,
    "masked fill": lambda x, w: (x @ w).masked_fill(torch.zeros_like(x, dtype=torch.bool), 0.0).sin(),
    "gathered": lambda x, w: (x @ w)[torch.arange(x.shape[0])].sin(),
    "rounded": lambda x, w: (x.sin() * w.sum()).round() * x,
    "one hot": lambda x, w: F.one_hot((x @ w).argmax(-1), FUNCTION_WIDTH).float() @ w * x,
    "returns a view": lambda x, w: torch.tanh(x @ w).t().t()[:, :],
    "gelu": lambda x, w: F.gelu(x @ w) @ w,
    "batch norm": lambda x, w: F.batch_norm(x @ w, None, None, training=True),
    "chained": lambda x, w: (((x * 1 + 0).t().t() * torch.ones_like(x)).clone() @ w).tanh() * torch.ones_like(x),
}  # fmt: skip


#: What runs outside the region: before it, and after it, where its output may be computed again.
AROUND = {
    "plain": (lambda x: x * 2, lambda y: y),
    "norm": (lambda x: F.rms_norm(x, (FUNCTION_WIDTH,)), lambda y: F.layer_norm(y, (FUNCTION_WIDTH,))),
    "residual": (
        lambda x: x + x * torch.ones_like(x),
        lambda y: F.rms_norm(y + y * torch.ones_like(y), (FUNCTION_WIDTH,)),
    ),
}
