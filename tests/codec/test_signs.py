"""A tensor of one sign comes back with that sign."""

import pytest
import torch
from codec_libraries import ISAS, forced
from processes import case

import gradckpt

CODECS = ["int8", "int8_plain", "int6", "int4", "fp8_e4m3", "fp8_e5m2"]
GAUSSIAN = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0))
OF_ONE_SIGN = {
    "relu": GAUSSIAN.relu(),
    "softmax": (2 * GAUSSIAN).softmax(-1),
    "peaked softmax": (6 * GAUSSIAN).softmax(-1),
    "softmax of odd rows": (2 * GAUSSIAN[:, :100]).softmax(-1),
    "sigmoid": (3 * GAUSSIAN).sigmoid(),
    "exponential": (3 * GAUSSIAN).exp(),
    "squares": GAUSSIAN.square(),
    "few of many": torch.where(GAUSSIAN > 1.7, GAUSSIAN, 0),
    "two clusters": torch.where(GAUSSIAN > 0, GAUSSIAN * 0.01, 2 + GAUSSIAN * 0.01).abs(),
    "large offset": GAUSSIAN * 0.01 + 1,
    "faint": GAUSSIAN.square() * 1e-20,
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_signs_stay(codec, dtype):
    for name, positive in OF_ONE_SIGN.items():
        for sign in (1, -1):
            x = (sign * positive).to(dtype)
            for isa in ISAS:
                with forced(isa), case(name, sign, isa):
                    assert (sign * gradckpt.codecs.encode(x, codec).decode()).min() >= 0


def test_stochastic_rounding_has_no_bias_at_zero():
    """A bound would be one: there a value may change its sign."""
    x = torch.tensor([0.01, 3.0]).repeat(64)
    restored = [gradckpt.codecs.encode(x, "int8", dither=(1, 1, n)).decode() for n in range(400)]
    mean = torch.stack(restored).mean(0)
    assert (mean - x).abs().max() < 0.02
