"""Callers of checkpoint, early and late, and the check that patched() left nothing behind."""

import functools
import inspect
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.utils.checkpoint
import transformers.modeling_utils  # noqa: F401 (gradckpt listens from then on, patched or not)
from checkout import ROOT
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint as early
from torch.utils.checkpoint import checkpoint_sequential

import gradckpt

WIDTH = 64


early_partial = functools.partial(early, use_reentrant=False)


def default_argument(layer, x, function=early, **keywords):
    return function(layer, x, **keywords)


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))


def gradients(layers, call, **keywords):
    """Of one step through the layers, each of them a region."""
    torch.manual_seed(1)
    x = torch.randn(32, WIDTH, requires_grad=True) * 1
    for layer in layers:
        x = call(layer, x, **keywords)
    return torch.autograd.grad(x.square().sum(), list(layers.parameters()))


def compressed(function, *args, **keywords):
    """What the function returns, and how many tensors it compressed."""
    before = gradckpt.stats()["compressed"]
    result = function(*args, **keywords)
    return result, gradckpt.stats()["compressed"] - before


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def error(a, b):
    a, b = (torch.cat([x.flatten() for x in tensors]) for tensors in (a, b))
    return ((a - b).norm() / b.norm()).item()


def stock():
    """torch's functions as a user can look at them."""
    found = []
    for function in (early, checkpoint_sequential):
        inner = inspect.unwrap(function)
        own = {key: value for key, value in vars(inner).items() if key != "__dynamo_disable"}
        found += [function, inner, inner.__code__, inner.__defaults__, inner.__kwdefaults__, own]
        found += [
            inner.__globals__,
            inner.__closure__,
            inner.__module__,
            inner.__qualname__,
            inspect.signature(function),
        ]
    hooks = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    return [*found, torch.utils.checkpoint.checkpoint, *(list(h) for h in hooks)]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    gradckpt.stats.reset()  # graphs that an earlier test compiled may be running, as far as patched() knows
    before = stock()
    yield
    after = stock()
    assert all(a is b or a == b for a, b in zip(before, after, strict=True))


def alone(script):
    """Standard output of a program of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
