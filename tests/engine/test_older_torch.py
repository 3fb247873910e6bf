"""torch 2.11 lacks `_make_saved_tensor`;
the engine then keeps inputs and their versions itself."""

import subprocess
import sys

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
