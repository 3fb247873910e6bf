"""A small net of equal blocks, and times of its blocks that do not depend on the machine."""

import torch
from torch import nn

from gradckpt._planning import options
from gradckpt._planning.options import KEEP, Cost

WIDTH, LAYERS, ROWS = 128, 6, 256


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def fixed_costs(monkeypatch):
    """Times that do not depend on the machine: recomputing costs a third, codecs a little."""

    def measured(block, options, args, kwargs):
        seconds = {
            option: 3.0 + (option.name != "keep") * 0.2 + option.name.startswith("recompute") for option in options
        }
        errors = {option: {"int8": 0.01, "int6": 0.03, "int4": 0.1}.get(option.codec, 0.0) for option in options}
        return {option: Cost(seconds[option], errors[option]) for option in (KEEP, *options)}

    monkeypatch.setattr(options, "_measure", measured)


def measured_briefly(monkeypatch):
    """Few options, each of which is measured a few times."""
    monkeypatch.setattr(options, "_SECONDS", 0.0)
    monkeypatch.setattr(options, "_POLICIES", ("save_matmuls",))


def net(layers=LAYERS):
    torch.manual_seed(0)
    return Net(layers).train()
