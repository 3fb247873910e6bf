"""Functions of bounded inputs: those with a pole or an edge that the inputs come near, and harmless
ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH = 64, 256


class Case(NamedTuple):
    inputs: Callable[[Tensor], Tensor]  # of normal values, outside of the region
    function: Callable[[Tensor], Tensor]  # the region


# ---- inputs ----


def softmax(s):
    return (4 * s).softmax(-1)


def sigmoid(s):
    return (4 * s).sigmoid()


def exp(s):
    return (2 * s).exp()


def square(s):
    return s.square() + 1e-6


def relu(s):
    return s.relu() + 1e-6


def tanh(s):
    return 0.999 * s.tanh()


def normalized(s):
    return 0.999 * F.normalize(s.view(-1, 4), dim=-1).view_as(s)


def small_rows(s):
    sizes = torch.rand(s.shape, generator=torch.Generator().manual_seed(1)) ** 6
    return s * sizes


def same(s):
    return s * 1.0


# ---- functions ----

_GENERATOR = torch.Generator().manual_seed(2)
LARGE = 50 + 100 * torch.rand(ROWS, WIDTH, generator=_GENERATOR)
LABELS = torch.arange(ROWS)


def _entropy(p):
    return -(p * p.log()).sum(-1)


#: Each is named for a codec, or its gradient is at most three times as far off as bf16's.
NEAR_POLES: dict[str, Case] = {
    "log of softmax": Case(softmax, lambda p: p.log()),
    "log of sigmoid": Case(sigmoid, lambda p: p.log()),
    "log of square": Case(square, lambda p: p.log()),
    "log of sigmoid + eps": Case(sigmoid, lambda p: (p + 1e-7).log()),
    "log(1 - sigmoid)": Case(lambda s: 0.9999 * sigmoid(s), lambda p: (1 - p).log()),
    "log1p near -1": Case(lambda s: -0.9999 * sigmoid(s), lambda p: p.log1p()),
    "entropy of softmax": Case(softmax, _entropy),
    "entr of sigmoid": Case(sigmoid, torch.special.entr),
    "xlogy of softmax": Case(softmax, lambda p: torch.xlogy(p, p).sum(-1)),
    "xlogy of sigmoid": Case(sigmoid, lambda p: torch.xlogy(2.0, p)),
    "kl_div of softmax": Case(softmax, lambda p: F.kl_div(p.log(), torch.full_like(p, 1 / WIDTH), reduction="sum")),
    "sqrt of relu": Case(relu, lambda p: p.sqrt()),
    "sqrt of exp": Case(exp, lambda p: p.sqrt()),
    "rsqrt of exp": Case(exp, lambda p: p.rsqrt()),
    "1 / sigmoid": Case(sigmoid, lambda p: 1 / p),
    "div by sigmoid": Case(sigmoid, lambda p: (1 - p) / p),
    "logit of sigmoid": Case(lambda s: 0.9999 * sigmoid(s), torch.logit),
    "logit with eps": Case(sigmoid, lambda p: torch.logit(p, eps=1e-6)),
    "acos of normalized": Case(normalized, torch.acos),
    "asin of normalized": Case(normalized, torch.asin),
    "atanh of tanh": Case(tanh, torch.atanh),
    "acosh": Case(lambda s: 1.001 + square(s), torch.acosh),
    "erfinv of tanh": Case(tanh, torch.erfinv),
    "tan": Case(lambda s: 1.5 * s.tanh(), torch.tan),
    "pow 0.3 of relu": Case(relu, lambda p: p**0.3),
    "pow -1.5 of exp": Case(exp, lambda p: p**-1.5),
    "pow of tensors": Case(sigmoid, lambda p: p ** torch.full_like(p, 0.25)),
    "digamma of square": Case(square, torch.digamma),
    "lgamma of sigmoid": Case(sigmoid, torch.lgamma),
    "norm of small rows": Case(small_rows, lambda p: p.view(-1, 4).norm(dim=-1)),
    "normalize small rows": Case(small_rows, lambda p: F.normalize(p.view(-1, 4), dim=-1)[:, 0]),
    "std of small rows": Case(small_rows, lambda p: p.view(-1, 4).std(-1)),
    "hypot of small values": Case(small_rows, lambda p: torch.hypot(p, p.roll(1, -1))),
}


def harmless() -> dict[str, Case]:
    """Return functions of which none is to be named."""
    torch.manual_seed(3)
    linear, other, conv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Conv1d(8, 8, 3, padding=1)
    layer_norm, rms_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
    mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    return {
        "matmul": Case(same, lambda h: h @ linear.weight),
        "linear": Case(same, lambda h: linear(h)),
        "gelu": Case(same, lambda h: F.gelu(h)),
        "conv": Case(same, lambda h: conv(h.view(8, 8, WIDTH))),
        "LayerNorm": Case(same, lambda h: layer_norm(h)),
        "RMSNorm": Case(same, lambda h: rms_norm(h)),
        "RMSNorm by hand": Case(same, lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)),
        "LayerNorm by hand": Case(same, lambda h: (h - h.mean(-1, keepdim=True)) / h.std(-1, keepdim=True)),
        "RMSNorm of padding": Case(
            lambda s: s * (torch.arange(ROWS) < ROWS - 8).view(-1, 1),
            lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6),
        ),
        "normalize": Case(same, lambda h: F.normalize(h, dim=-1)),
        "cosine similarity": Case(same, lambda h: F.cosine_similarity(h, LARGE, dim=-1)),
        "softmax": Case(same, lambda h: h.softmax(-1)),
        "softmax by hand": Case(same, lambda h: h.exp() / h.exp().sum(-1, keepdim=True)),
        "logsumexp": Case(same, lambda h: h.logsumexp(-1)),
        "attention": Case(same, lambda h: F.scaled_dot_product_attention(*(h.view(1, 4, 16, WIDTH),) * 3)),
        "eager attention": Case(same, lambda h: (h @ h.T / 16).softmax(-1) @ h),
        "residual MLP": Case(same, lambda h: h + mlp(h)),
        "SwiGLU": Case(same, lambda h: F.silu(linear(h)) * other(h)),
        "exp of bounded values": Case(same, lambda h: h.tanh().exp()),
        "log(1 + x^2)": Case(same, lambda h: (1 + h * h).log()),
        "sqrt(1 + x^2)": Case(same, lambda h: (1 + h * h).sqrt()),
        "1 / large values": Case(lambda s: 100 + 50 * s.tanh(), lambda h: 1 / h),
        "mse_loss": Case(same, lambda h: F.mse_loss(h, LARGE)),
        "cross_entropy": Case(same, lambda h: F.cross_entropy(h, LABELS, reduction="sum")),
        "binary_cross_entropy_with_logits": Case(
            same, lambda h: F.binary_cross_entropy_with_logits(h, torch.ones_like(h), reduction="sum")
        ),
        # the derivative before the pole is as small as the value
        "log of softmax inside": Case(same, lambda h: h.softmax(-1).log()),
        "entropy of softmax inside": Case(same, lambda h: _entropy(h.softmax(-1))),
        "sqrt of exp inside": Case(same, lambda h: (2 * h).exp().sqrt()),
        "1 / exp inside": Case(same, lambda h: 1 / (2 * h).exp()),
        "atanh of tanh inside": Case(same, lambda h: (0.999 * h.tanh()).atanh()),
    }
