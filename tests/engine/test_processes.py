"""Processes: fork, and the end of the interpreter, with live regions."""

import functools
import os
import sys
import threading
import time

import torch
from processes import WAIT, alone, in_child
from torch.utils.checkpoint import GraphExecGroup

import gradckpt


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def grad_of(function, x):
    return torch.autograd.grad(function(x).sum(), x)[0]


def block(width=16):
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))


def forward(ck, model, x):
    for layer in model:
        x = ck(lambda t, layer=layer: ck(layer, t.sin()) + t, x)
    return x.square().sum()


# ---- fork ----


def fork_at(moment):
    model, x = torch.nn.ModuleList([block(), block()]), leaf(80, 16)
    plain = functools.partial(forward, lambda f, *a: f(*a), model)

    def step(ck):
        return forward(functools.partial(gradckpt.checkpoint, compress="raw" if ck else None), model, x)

    def check(loss):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], grad_of(plain, x))

    for compress in (False, True):
        if moment == "import":
            in_child(lambda c=compress: check(step(c)))
            continue
        loss = step(compress)
        if moment == "backward":
            check(loss)
        in_child(lambda loss=loss: check(loss))
        check(loss)
        in_child(lambda c=compress: check(step(c)))


def fork_at_each_moment():
    for moment in ("import", "forward", "backward"):
        fork_at(moment)


def test_fork():
    alone(fork_at_each_moment)


# ---- the end of the interpreter ----


def leave(what):
    x = leaf(2048)
    y, z = gradckpt.checkpoint(lambda t: (t.sin().exp(), t.cos().tanh()), x * 1, compress="int8")
    builtin_module = sys.modules["builtins"]
    builtin_module.kept = [x, y, z]  # outlives every other module
    if what == "half done":
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    elif what == "cycle":
        builtin_module.kept = None
        y.cycle = [y, z]
    elif what == "atexit":
        import atexit

        atexit.register(lambda: (y + z).sum().backward())
    elif what in ("in a recompute", "in a wait"):
        started, group, runs = threading.Event(), GraphExecGroup(), []

        def region(t):
            runs.append(1)
            if len(runs) > 1:
                started.set()
                time.sleep(3600)
            return t.sin().exp(), t.cos().exp()

        outputs = gradckpt.checkpoint(region, x)

        def backward(i):
            with group:
                outputs[i].sum().backward()

        for i in range(2 if what == "in a wait" else 1):
            threading.Thread(target=backward, args=(i,), daemon=True).start()
            assert started.wait(WAIT)
        time.sleep(0.05)


def leave_each():
    """Each in a child, which ends as an interpreter does."""
    for what in ("live", "half done", "cycle", "atexit", "in a recompute", "in a wait"):
        child = os.fork()
        if child == 0:
            return leave(what)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, what


def test_interpreter_ends_quietly_with_live_regions():
    alone(leave_each)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
