"""A small net of equal blocks, times of its blocks that do not depend on the machine, what a step
takes and a refused plan says, and a check that planning leaves a model as it was."""

import gc
import re

import pytest
import torch
from torch import nn

import gradckpt
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


@pytest.fixture
def short_measurements(monkeypatch):
    """Each option of a region is measured once; of what earlier tests left, nothing counts."""
    gc.collect()
    monkeypatch.setattr(options, "_SECONDS", 0.0)
    monkeypatch.setattr(options, "_LEAST", 1)


def smallest_of(call):
    """The smallest budget, from the refusal of a smaller one."""
    with pytest.raises(ValueError, match="no plan stays within") as error:
        call()
    return int(re.search(r"\((\d+) bytes\)", str(error.value))[1])


def peak_of(step):
    with gradckpt.track_memory() as memory:
        step()
    return memory.peak


def net(layers=LAYERS):
    torch.manual_seed(0)
    return Net(layers).train()


class Untouched:
    """Checks that the block leaves the model and all generators and counters as they were."""

    def __init__(self, model):
        self.model = model

    def state(self):
        parameters = list(self.model.parameters())
        return {
            "values": [p.detach().clone() for p in parameters],
            "random": torch.get_rng_state(),
            "rounding": gradckpt.config.get_rounding_state(),
            "stats": dict(gradckpt.stats()),
            "buffers": {name: x.clone() for name, x in self.model.named_buffers()},
            "same buffers": [id(x) for x in self.model.buffers()],
            "gradients": [None if p.grad is None else p.grad.clone() for p in parameters],
            "same gradients": [id(p.grad) for p in parameters],
            "requires_grad": [p.requires_grad for p in parameters],
            "attributes": [dict(vars(module)) for module in self.model.modules()],
            "handle": gradckpt.config.Handle(self.model).modules,
        }

    def __enter__(self):
        self.before = self.state()

    def __exit__(self, *_):
        after = self.state()
        for key, value in self.before.items():
            tensors = [x for x in torch.utils._pytree.tree_leaves([value, after[key]]) if isinstance(x, torch.Tensor)]
            if key in ("values", "random", "buffers", "gradients"):
                half = len(tensors) // 2
                assert all(map(torch.equal, tensors[:half], tensors[half:])), key
            else:
                assert value == after[key], key
