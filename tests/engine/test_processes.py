"""What needs a process of its own: fork, and the end of the interpreter, with live regions; and
torch 2.11, which lacks `_make_saved_tensor`, so that the engine keeps inputs and their versions
itself."""

import functools
import os
import subprocess
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


class Kept:
    """Counts at the end of the interpreter who holds what a region got."""

    def __init__(self):
        self.argument = []

    def uses(self, count=sys.getrefcount):
        return count(self.argument)

    def __del__(self, sleep=time.sleep):
        sleep(0.3)
        assert self.uses() == self.then


def leave_a_daemon(way):
    """Its thread is ended within a region, without the GIL."""
    kept, inside = Kept(), threading.Event()

    def region(t, argument):
        inside.set()
        while True:
            time.sleep(0.05)

    def work(argument):
        with torch.set_grad_enabled(way == "grad"):
            gradckpt.checkpoint(region, leaf(2), argument=argument)

    threading.Thread(target=work, args=(kept.argument,), daemon=True).start()
    assert inside.wait(WAIT)
    time.sleep(0.1)
    kept.then = kept.uses()
    globals()["KEPT"] = kept


def test_a_thread_that_ends_with_the_interpreter_releases_nothing():
    """Main collects garbage then, and no list of its collector may change."""
    for way in ("grad", "no grad"):
        alone(leave_a_daemon, way)


# ---- torch 2.11 ----


PROGRAM = """
import torch, torch.utils.checkpoint
import torch.autograd.forward_ad as fw
if hasattr(torch._C._autograd, "_make_saved_tensor"):
    del torch._C._autograd._make_saved_tensor
import gradckpt
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 64))

def run(call):
    torch.manual_seed(0)
    x = torch.randn(128, 64, requires_grad=True)
    h = x * 1
    for _ in range(3):
        h = call(net, h)
    net.zero_grad()
    h.square().mean().backward()
    return [h.detach(), x.grad, *[p.grad.clone() for p in net.parameters()], torch.get_rng_state()]

def duals(call):
    torch.manual_seed(0)
    x, t = torch.randn(4, 64, requires_grad=True), torch.randn(4, 64)
    with fw.dual_level():
        y = call(lambda z: (z * z).sin(), fw.make_dual(x, t) * 1)
        return [part for z in (y, *torch.autograd.grad(y.sum(), x)) for part in fw.unpack_dual(z)]

def same(a, b):
    return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))

def nested(compress):
    inner = lambda f, x: gradckpt.checkpoint(f, x, compress=compress)
    return lambda f, x: gradckpt.checkpoint(lambda y: inner(f, y), x)

plain = run(lambda f, x: f(x))
assert same(plain, run(gradckpt.checkpoint)), "bit-equal"
assert same(plain, run(lambda f, x: gradckpt.checkpoint(f, x, compress="raw"))), "raw payloads"
assert same(plain, run(nested("raw"))), "nested"
with torch.autograd.graph.save_on_cpu():
    assert same(plain, run(gradckpt.checkpoint)), "under save_on_cpu"
assert same(duals(lambda f, x: f(x)), duals(nested(None))), "forward mode in nested regions"

gradckpt.stats.reset()
with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
    h = torch.randn(64, 64, requires_grad=True) * 1
    y = gradckpt.compress_saved({"codec": "int8", "min_numel": 1})(lambda: h @ net[0].weight)()
assert gradckpt.stats()["compressed"] == 1, "what waits under other hooks"
y.sum().backward()

x = torch.randn(8, 8, requires_grad=True) * 1
y = gradckpt.checkpoint(torch.sin, x)
x.add_(1)
try:
    y.sum().backward()
except RuntimeError as error:
    assert "modified by an inplace operation" in str(error)
else:
    raise AssertionError("a change in place")
"""


def test_without_make_saved_tensor():
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
