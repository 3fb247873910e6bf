"""Code without a framework that is no stack of layers: recurrence in chunks, a scan,
messages on a graph."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradckpt


class Recurrent(nn.Module):
    """An LSTM over chunks of time; its state is a tuple among the arguments of the region."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.out = nn.Linear(8, 32), nn.LSTM(32, 64, num_layers=2), nn.Linear(64, 1)

    def forward(self, x, checkpoint):
        state, total = (torch.zeros(2, 16, 64), torch.zeros(2, 16, 64)), 0.0
        for chunk in self.embed(x).split(8):
            values, state = checkpoint(self.lstm, chunk, state)
            total = total + self.out(values).square().mean()
        return total


class Scan(nn.Module):
    """A state space: a loop with a diagonal transition, chunk by chunk, the state by keyword."""

    def __init__(self):
        super().__init__()
        self.enter, self.rate, self.leave = nn.Linear(8, 64), nn.Parameter(torch.randn(64)), nn.Linear(64, 1)

    def run(self, chunk, *, state):
        outputs = []
        for u in chunk:
            state = self.rate.sigmoid() * state + u.tanh()
            outputs.append(state)
        return torch.stack(outputs), state

    def forward(self, x, checkpoint):
        state, total = torch.zeros(16, 64), 0.0
        for chunk in self.enter(x).split(8):
            values, state = checkpoint(self.run, chunk, state=state)
            total = total + self.leave(values).square().mean()
        return total


class Messages(nn.Module):
    """Messages along the edges of a graph, summed at the nodes; the edges are integers."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 64)
        self.layers = nn.ModuleList(nn.Linear(128, 64) for _ in range(3))

    def forward(self, x, checkpoint):
        nodes = self.enter(x.flatten(0, 1)[:128])
        source, target = torch.arange(512) % 128, torch.arange(512) * 7 // 3 % 128

        def exchange(layer, nodes, edges):
            sent = layer(torch.cat([nodes[edges["from"]], nodes[edges["to"]]], -1))
            return nodes + torch.zeros_like(nodes).index_add(0, edges["to"], sent).tanh()

        for layer in self.layers:
            nodes = checkpoint(exchange, layer, nodes, {"from": source, "to": target})
        return F.softplus(nodes).mean()


def step(model, x, checkpoint):
    loss = model(x, checkpoint)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


#: model -> compressed tensors of a step. The first chunk's state requires no grad.
MODELS = {Recurrent: 4 + 3 * 2, Scan: 4 + 3, Messages: 3}


@pytest.mark.parametrize("kind", MODELS)
def test_like_torch_and_within_bounds(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(32, 16, 8)
    stock_loss, stock = step(copy.deepcopy(model), x, functools.partial(torch_checkpoint, use_reentrant=False))
    none_loss, none = step(copy.deepcopy(model), x, gradckpt.checkpoint)
    assert torch.equal(none_loss, stock_loss)
    assert all(torch.equal(none[name], stock[name]) for name in stock)
    gradckpt.stats.reset()
    loss, int8 = step(copy.deepcopy(model), x, functools.partial(gradckpt.checkpoint, compress="int8"))
    assert gradckpt.stats()["compressed"] == MODELS[kind]
    assert torch.equal(loss, stock_loss)
    a, b = (torch.cat([g[name].flatten() for name in stock]) for g in (int8, stock))
    assert 0 < (a - b).norm() / b.norm() < 0.01
