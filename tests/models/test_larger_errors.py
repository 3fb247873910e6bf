"""gradckpt.enable says for which modules gradients have larger errors, once, at INFO,
without running the model."""

import logging

import pytest
from test_huggingface import build as llama
from torch import nn

import gradckpt
from gradckpt._models.kinds import width_of


class Block(nn.Module):
    def __init__(self, width=64, norm=nn.LayerNorm, act=nn.GELU):
        super().__init__()
        self.norm, self.up, self.act, self.down = norm(width), nn.Linear(width, 256), act(), nn.Linear(256, width)

    def forward(self, x):
        raise AssertionError("the model is not run")


def net(*args, **kwargs):
    return nn.Sequential(*(Block(*args, **kwargs) for _ in range(3)))


@pytest.fixture
def said(caplog):
    """The lines since the last look, without what was chosen."""
    caplog.set_level(logging.DEBUG, "gradckpt")

    def look():
        lines = [record.getMessage() for record in caplog.records if "handle" not in record.getMessage()]
        assert {record.levelname for record in caplog.records} <= {"INFO"}
        caplog.clear()
        return lines

    return look


@pytest.mark.parametrize("codec", ["int8", "int8_plain", "int6", "int4"])
def test_a_width_whose_rows_share_steps(said, codec):
    model = net(48)
    gradckpt.enable(model, codec)
    (line,) = said()
    assert line.startswith("gradckpt: width 48 is less than 64")
    gradckpt.enable(model, codec)
    assert said() == [], "again with equal arguments"


@pytest.mark.parametrize("compress", [None, "raw", "lossless", "fp8"])
def test_codecs_with_an_error_of_each_value(said, compress):
    gradckpt.enable(net(48), compress)
    assert said() == []


def test_other_widths(said):
    for width in (64, 192, 256):
        gradckpt.enable(net(width), "int8")
        assert said() == []


def test_each_width_is_named_once(said):
    model = nn.Sequential(Block(48), Block(32), Block(48), Block(96))
    gradckpt.enable(model, "int8")
    (line,) = said()
    assert line.startswith("gradckpt: width 32, 48 is less")


def test_the_layers_of_transformers(said):
    gradckpt.enable(llama(), "int8")
    (line,) = said()
    assert line.startswith("gradckpt: width 32 is less")


def test_relu_and_batch_norm(said):
    gradckpt.enable(net(128, nn.BatchNorm1d, nn.ReLU), "fp8")
    (line,) = said()
    assert line.startswith("gradckpt: Block has ReLU and BatchNorm")
    gradckpt.enable(net(128, nn.BatchNorm1d, nn.ReLU), "lossless")
    gradckpt.enable(net(128, nn.BatchNorm1d, nn.GELU), "int8")
    gradckpt.enable(net(128, nn.LayerNorm, nn.ReLU), "int8")
    assert said() == []


class Hollow(nn.Linear):
    def __init__(self):
        nn.Module.__init__(self)


@pytest.mark.parametrize(
    ("module", "width"),
    [
        (Block(192), 192),
        (nn.Linear(48, 64), 48),
        (nn.RMSNorm((4, 32)), 32),
        (nn.LazyLinear(64), None),
        (nn.Sequential(nn.Conv2d(3, 48, 3), nn.Linear(48, 64)), None),
        (nn.Identity(), None),
        (Hollow(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_width_is_read_and_never_raises(module, width):
    assert width_of(module) == width
