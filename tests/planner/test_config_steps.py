"""gradckpt._planning.config_profile.ConfigSteps: a shorter model stands for the whole one where it
needs the same, and nowhere else."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradckpt._planning.config_profile import ConfigSteps, shortened
from gradckpt._planning.options import find_blocks
from gradckpt._planning.segments import memory_use
from gradckpt._planning.step_trace import trace_step
from gradckpt._settings import READY

WIDTH, LAYERS = 32, 16


class Block(nn.Module):
    def __init__(self, number=0):
        super().__init__()
        self.layer_idx, self.up, self.down = number, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, *more):
        return sum(more, x) + self.down(F.gelu(self.up(x)))


class ByItsNumber(Block):
    def forward(self, x):
        return super().forward(torch.sigmoid(x) if self.layer_idx % 4 == 3 else x)


class Layers(nn.Module):
    kind = Block

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.kind(i) for i in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class NumberedBlocks(Layers):
    kind = ByItsNumber


class Taps(Layers):
    """Intermediate supervision."""

    def forward(self, x):
        taps = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            taps += [x] if i % 4 == 3 else []
        return sum(F.relu(tap).square().mean() for tap in taps)


class Skips(Layers):
    """As U-ViT."""

    def forward(self, x):
        states, half = [], len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = block(x)
            states.append(x)
        for block in self.blocks[half:]:
            x = block(x, states.pop())
        return x.square().mean()


class ByNumber(Layers):
    def forward(self, x):
        for i in range(LAYERS):
            x = self.blocks[i](x)
        return x.square().mean()


class Shared(Layers):
    """Two blocks that take turns after four of their own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([*self.blocks[:4], *[self.blocks[4], self.blocks[5]] * 6])


class Source:
    """As a ConfigModel."""

    gradient_scale = 1.0

    def __init__(self, kind):
        self.model = kind()
        self.modules = (self.model.kind,)

    def run(self, tokens, batch):
        self.model(torch.zeros(batch, tokens, WIDTH)).backward()


def is_shorter(steps):
    numbers = []

    def active(blocks):
        numbers.extend(blocks.copies)
        return READY[0].active(steps._source.model)

    steps.trace(active, 64)
    return len(numbers) < len(steps.blocks)


@pytest.mark.parametrize("kind", [NumberedBlocks, Taps, Skips, ByNumber, Shared], ids=lambda kind: kind.__name__)
def test_a_step_is_the_whole_ones_where_layers_know_of_each_other(kind):
    source = Source(kind)
    steps = ConfigSteps(source, 64, 2)
    assert not is_shorter(steps)
    blocks = find_blocks(source.model, source.modules)
    for setting in READY:
        active = functools.partial(setting.active, source.model, source.modules)
        with active():
            actual = trace_step(source.model, lambda _: source.run(64, 2), blocks=blocks, cuda=True)
        found = steps.trace(lambda _, active=active: active(), 64)
        assert [peak.size for peak in found.peaks()] == [peak.size for peak in actual.peaks()]
        assert memory_use(found.segments) == memory_use(actual.segments)


def test_the_others_are_shorter():
    steps = ConfigSteps(Source(Layers), 64, 2)
    assert is_shorter(steps)
    with shortened(steps._source.model, steps.blocks) as short:
        assert len(short.modules) == 6
