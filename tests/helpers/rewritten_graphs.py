"""Functions that passes over joint graphs rewrite, and a backend that runs Inductor's passes but
compiles nothing.
"""

import math

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import _recursive_joint_graph_passes
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V

WIDTH = 64


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
    return x.view(1, -1, 4, WIDTH // 4).transpose(1, 2)


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
    "times ones alone": lambda x, w: (x * torch.ones_like(x)).sin() @ w,
    "ones on the left": lambda x, w: torch.tanh(x @ w) + torch.ones_like(x) * x,
    "plus zeros": lambda x, w: torch.tanh(x @ w) + (x + torch.zeros_like(x)).sin(),
    "plus zero": lambda x, w: torch.tanh((x + 0) @ w),
    "minus zeros": lambda x, w: (x - torch.zeros_like(x)).exp() @ w,
    "divided by ones": lambda x, w: torch.tanh((x / torch.ones_like(x)) @ w),
    "weight times ones": lambda x, w: torch.tanh(x @ (w * torch.ones_like(w))),
    "output times ones": lambda x, w: torch.tanh(x @ w) * torch.ones_like(x),
    "output plus zeros": lambda x, w: torch.tanh(x @ w).exp() + torch.zeros_like(x),
    "to the first": lambda x, w: (x**1).sin() @ w,
    "cat of one": lambda x, w: torch.tanh(torch.cat([x]) @ w),
    "cat of halves": lambda x, w: torch.tanh(torch.cat([x[:8], x[8:]]) @ w),
    "transposed twice": lambda x, w: torch.tanh(x.t().t() @ w.t().t()),
    "permuted twice": lambda x, w: torch.tanh(x.permute(1, 0).permute(1, 0) @ w),
    "all of it": lambda x, w: torch.tanh(x[:, 0:] @ w[:, :]),
    "padded by nothing": lambda x, w: torch.tanh(F.pad(x, (0, 0)) @ w),
    "constant pad": lambda x, w: torch.tanh(torch.constant_pad_nd(x, [0, 0]) @ w),
    "to its own dtype": lambda x, w: torch.tanh(x.to(x.dtype) @ w.float()),
    "to another and back": lambda x, w: torch.tanh(x.double().float() @ w),
    "clones": lambda x, w: torch.tanh(x.clone().clone().contiguous().clone() @ w),
    "the same twice": lambda x, w: (x @ w).sin() + (x @ w).sin() * (x @ w).sin(),
    "views": lambda x, w: torch.tanh(x.view(-1).view(x.shape).reshape(x.shape) @ w),
    "squeezed": lambda x, w: torch.tanh(x.unsqueeze(0).squeeze(0).expand(x.shape) @ w),
    "flipped twice": lambda x, w: torch.tanh(x.flip(0).flip(0) @ w),
    "split and joined": lambda x, w: torch.tanh(torch.cat(x.split(16)) @ w),
    "stack and unbind": lambda x, w: torch.tanh(sum(torch.stack([x, x.sin()]).unbind()) @ w),
    "dropout of nothing": lambda x, w: F.dropout(torch.tanh(x @ w), 0.0),
    "dropout alone": lambda x, w: F.dropout(x, 0.0) @ w,
    "addmm": lambda x, w: torch.addmm(x, x, w).sin(),
    "mm and bias": lambda x, w: (x @ w + w[0]).sin(),
    "linear": lambda x, w: F.linear(F.linear(x, w, w[0]).relu(), w),
    "bmm of one": lambda x, w: torch.bmm(x[None], w[None])[0].sin(),
    "scaled softmax": _scaled,
    "softmax": lambda x, w: torch.softmax(x @ w, -1) @ x.t() @ x,
    "log softmax": lambda x, w: torch.log_softmax(x @ w, -1) * x,
    "attention": _attention,
    "masked attention": lambda x, w: _attention(x, w, torch.zeros(x.shape[0], x.shape[0])),
    "sdpa": lambda x, w: F.scaled_dot_product_attention(_heads(x @ w), _heads(x), _heads(x)).reshape(x.shape),
    "layer norm": lambda x, w: F.layer_norm(x @ w, (WIDTH,)),
    "layer norm and back": lambda x, w: F.layer_norm(F.layer_norm(x, (WIDTH,)) @ w, (WIDTH,)),
    "rms norm": lambda x, w: F.rms_norm(x, (WIDTH,)) @ w,
    "where true": lambda x, w: torch.where(torch.ones_like(x, dtype=torch.bool), x, x.exp()) @ w,
    "masked fill": lambda x, w: (x @ w).masked_fill(torch.zeros_like(x, dtype=torch.bool), 0.0).sin(),
    "gathered": lambda x, w: (x @ w)[torch.arange(x.shape[0])].sin(),
    "rounded": lambda x, w: (x.sin() * w.sum()).round() * x,
    "one hot": lambda x, w: F.one_hot((x @ w).argmax(-1), WIDTH).float() @ w * x,
    "returns a view": lambda x, w: torch.tanh(x @ w).t().t()[:, :],
    "gelu": lambda x, w: F.gelu(x @ w) @ w,
    "batch norm": lambda x, w: F.batch_norm(x @ w, None, None, training=True),
    "chained": lambda x, w: (((x * 1 + 0).t().t() * torch.ones_like(x)).clone() @ w).tanh() * torch.ones_like(x),
}  # fmt: skip


#: What runs outside the region: before it, and after it, where its output may be computed again.
AROUND = {
    "plain": (lambda x: x * 2, lambda y: y),
    "norm": (lambda x: F.rms_norm(x, (WIDTH,)), lambda y: F.layer_norm(y, (WIDTH,))),
    "residual": (lambda x: x + x * torch.ones_like(x), lambda y: F.rms_norm(y + y * torch.ones_like(y), (WIDTH,))),
}
