"""Models and steps of the tests of torch.compile."""

import functools

import pytest
import torch
from torch import nn

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
