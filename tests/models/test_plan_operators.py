"""Blocks of single operators: the simulated peak is that of real steps, in each ready setting."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradckpt

ROWS, WIDTH, BLOCKS = 1024, 128, 8
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
TARGETS = torch.zeros(ROWS, dtype=torch.long)

#: The states of random generators that regions keep, which are not counted.
STATES = 2 * BLOCKS * 5056

#: Where autograd computes out of place under a dispatch mode, and in place without one.
ERRORS = {"bce": 0.18}

#: What a block does to the result of its linear layer.
OPERATORS = {
    "relu": lambda s, h: torch.relu(h),
    "gelu": lambda s, h: F.gelu(h),
    "batch_norm": lambda s, h: F.batch_norm(h, None, None, training=True),
    "softmax": lambda s, h: h.softmax(-1),
    "in place": lambda s, h: h.clone().add_(1).tanh_(),
    "topk": lambda s, h: h.scatter(1, h.topk(4, -1).indices, 0.0),
    "sort": lambda s, h: h.sort(-1).values,
    "cumsum": lambda s, h: h.cumsum(0),
    "index": lambda s, h: h[torch.arange(ROWS).flip(0)],
    "gather": lambda s, h: h.gather(1, torch.arange(WIDTH).flip(0).expand(ROWS, -1)),
    "index_select": lambda s, h: h.index_select(0, torch.arange(ROWS).flip(0)),
    "largest": lambda s, h: h + h.max(-1, keepdim=True).values + h.topk(4, -1).values.sum(-1, keepdim=True),
    "where": lambda s, h: torch.where(h > 0, h, h * 0.1),
    "max_pool1d": lambda s, h: F.max_pool1d(h[None], 3, 1, 1)[0],
    "logsumexp": lambda s, h: h - h.logsumexp(-1, keepdim=True),
    "einsum": lambda s, h: torch.einsum("ij,kj->ik", h, s.linear.weight),
    "dropout": lambda s, h: F.dropout(h, 0.3),
    "sizes from integers": lambda s, h: h[torch.unique(torch.arange(ROWS) // 2 * 2)].repeat_interleave(2, 0),
    "norm": lambda s, h: h / h.norm(dim=-1, keepdim=True),
    "qr": lambda s, h: h @ torch.linalg.qr(s.linear.weight)[0],
    "rfft": lambda s, h: torch.fft.rfft(h).abs().repeat(1, 2)[:, :WIDTH],
    "cat": lambda s, h: torch.cat([h[:, :64], h[:, 64:].sin()], 1),
    "stack": lambda s, h: torch.stack([h, h.cos()]).sum(0),
    "pad": lambda s, h: F.pad(h, (1, 1))[:, 1:-1],
    "torch's checkpoint": lambda s, h: torch.utils.checkpoint.checkpoint(torch.tanh, h, use_reentrant=False),
    "float64": lambda s, h: h.double().sin().float(),
    "attention": lambda s, h: attention(h.view(4, 4, 64, WIDTH)),
    "clamp": lambda s, h: h.clamp(-1, 1).clamp_min(0) + h.floor(),
    "interpolate": lambda s, h: F.interpolate(h[None, None], scale_factor=2, mode="bilinear")[0, 0, ::2, ::2],
    "cross_entropy": lambda s, h: h + F.cross_entropy(h, TARGETS),
    "bce": lambda s, h: h + F.binary_cross_entropy_with_logits(h, torch.ones(ROWS, WIDTH)),
    "masked_fill": lambda s, h: h.masked_fill(torch.ones(ROWS, 1).bernoulli(0.5).bool(), 0),
    "conv1d": lambda s, h: F.conv1d(h[None].transpose(1, 2), s.linear.weight[:, :, None], padding=0)[0].T,
}


def attention(q):
    return F.scaled_dot_product_attention(q, q, q).reshape(ROWS, WIDTH)


class Block(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.linear, self.operator = nn.Linear(WIDTH, WIDTH), operator

    def forward(self, x):
        return self.operator(self, self.linear(x))


@pytest.mark.parametrize("name", OPERATORS)
def test_the_peak_is_that_of_a_real_step(name):
    model = nn.Sequential(*(Block(OPERATORS[name]) for _ in range(BLOCKS)))

    def step():
        return model(X).square().mean()

    simulated = gradckpt.plan(model, step)
    assert not any("cannot be simulated" in sentence for sentence in simulated.about), simulated.about
    gradckpt.plan(model, step, measure=True)  # buffers that are made once
    measured = gradckpt.plan(model, step, measure=True)
    for row in measured.rows:
        if row.name != "lossless":  # whose bytes depend on the values
            expected = pytest.approx(row.peak.size, rel=ERRORS.get(name, 0.01), abs=STATES)
            assert simulated[row.name].peak.size == expected, row.name
