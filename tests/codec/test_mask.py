"""`mask`: one bit for each bool."""

import numpy as np
import pytest
import torch
from codec_kernels import (
    check_everywhere,
)

import gradckpt


@pytest.fixture
def same(host_kernels, device_kernels):
    def run(values, **layout):
        check_everywhere(host_kernels, device_kernels, "mask", "bool", np.asarray(values, np.uint8), **layout)

    return run


def random_bools(n, seed=0):
    return np.random.default_rng([31, seed]).integers(0, 2, n, np.uint8)


def test_order_of_the_bits():
    """Value i is bit i % 8 of byte i / 8; 16 bytes for 128 values, what is left over is 0."""
    for i in (0, 1, 7, 8, 127, 128, 130):
        x = torch.zeros(131, dtype=torch.bool)
        x[i] = True
        payload = gradckpt.codecs.encode(x, "mask")
        assert payload.nbytes == 32
        assert int.from_bytes(payload.codes.numpy().tobytes(), "little") == 1 << i
        assert torch.equal(payload.decode(), x)
    assert gradckpt.codecs.encode(torch.ones(5, dtype=torch.bool), "mask").codes.tolist() == [31] + [0] * 15
    assert gradckpt.codecs.info("mask")["bits_per_value"] == 1


def test_every_byte_but_0_is_true(same):
    every = np.arange(256, dtype=np.uint8)
    same(every)
    same(np.tile(every, 40))
    x = torch.from_numpy(np.tile(every, 3)).view(torch.bool)
    restored = gradckpt.codecs.encode(x, "mask").decode()
    assert torch.equal(restored.view(torch.uint8), (x.view(torch.uint8) != 0).to(torch.uint8))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_masks(same, share):
    same(np.random.default_rng(1).random(20000) < share)


def test_large_tensor():
    x = torch.from_numpy(random_bools(33 << 20)).view(torch.bool)
    payload = gradckpt.codecs.encode(x, "mask")
    assert (payload.codes.numpy() == np.packbits(x.numpy(), bitorder="little")).all()
    assert torch.equal(payload.decode(), x)


def test_layouts_of_tensors():
    base = torch.from_numpy(random_bools(9000)).view(torch.bool)
    for x in (base[:4200].view(60, 70).t(), base[1:3001], base[3].expand(7, 50), base[:0], base[17], base[5::3]):
        payload = gradckpt.codecs.encode(x, "mask")
        assert torch.equal(payload.codes, gradckpt.codecs.encode(x.contiguous(), "mask").codes)
        assert torch.equal(payload.decode(), x)
        data = torch.ops.gradckpt.encode(x, "mask")
        assert torch.equal(torch.ops.gradckpt.decode(data, "mask", list(x.shape), torch.bool), x)
