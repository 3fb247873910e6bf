"""A block with a call that is kept and one that runs again, and what its regions did.

``torch_remat.region`` and ``gradckpt.policies.region`` have the same signature, so one block serves
both.
"""

import collections
import functools
import sys
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, gelu

import gradckpt

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
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


def chain(*functions):
    def call(x):
        for function in functions:
            x = function(x)
        return x

    return functions[0] if len(functions) == 1 else call


def nested(text, parts, **ways):
    """What ``text`` says, as in "ours(kept(plain), sin)", where what stands side by side runs one
    after the other; and the same without any of the ``ways``.
    """
    wrap = {name: lambda *inside, way=way: way(chain(*inside)) for name, way in ways.items()}
    return eval(text, {**parts, **wrap}), eval(text, {**parts, **dict.fromkeys(ways, chain)})


def kept(function, name="call"):
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
