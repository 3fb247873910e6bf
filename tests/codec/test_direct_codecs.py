"""Casts, `lossless` and `mask`, which take a value at a time: tails, strides, large tensors and
payloads of any bytes, with the oracle's bytes on every instruction set and on a device."""

import itertools

import direct_oracle as oracle
import numpy as np
import pytest
import torch
from codec_inputs import DTYPES, bits_of
from codec_kernels import (
    STRIDED,
    Layout,
    aligned,
    assert_same,
    check,
    check_everywhere,
    every_pair,
    everywhere,
    nbytes,
)
from processes import case

import gradckpt


def ordinary(n, dtype, seed=0):
    """Bits of normal values, or of their signs."""
    x = np.random.default_rng([22, seed]).standard_normal(n).astype(np.float32)
    return (x > 0).astype(np.uint8) if dtype == "bool" else bits_of(torch.from_numpy(x).to(DTYPES[dtype])).copy()


@pytest.fixture
def same(host_kernels, device_kernels, ampere_kernels):
    """Asserts equal bytes everywhere, and that the values fit: of `lossless` they come back."""

    def run(codec, dtype, bits, **layout):
        assert check_everywhere(host_kernels, device_kernels, codec, dtype, bits, **layout)
        if codec == "lossless":
            payload, _ = oracle.encode(codec, bits, dtype)
            assert_same(oracle.decode(codec, payload, bits.size, dtype), bits, "oracle")
        if codec in ("bf16", "fp16"):
            check(ampere_kernels, codec, dtype, bits, "sm_80", **layout)

    return run


@every_pair
def test_tails_and_alignment(same, codec, dtype):
    lengths = (0, 1, 7, 8, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097)
    for n, offset in itertools.product(lengths, (0, 1, 3)):
        with case(n, offset):
            same(codec, dtype, ordinary(n, dtype, n), offset=offset)


@every_pair
def test_strides(same, codec, dtype):
    for layout, (sizes, strides) in STRIDED.items():
        with case(layout):
            same(codec, dtype, ordinary(int(np.prod(sizes)), dtype), offset=1, sizes=sizes, strides=strides)


@every_pair
def test_any_payload_decodes(host_kernels, device_kernels, codec, dtype):
    """Also damaged ones: the same values everywhere, and nothing beyond them is read or written."""
    rng = np.random.default_rng(8)
    for n in (1, 4096, 9000, 65536):
        payload = aligned(nbytes(codec, dtype, n))
        every = np.arange(payload.size // 2 + 1, dtype=np.uint32).astype(np.uint16).view(np.uint8)
        for made in (every[: payload.size], *(rng.integers(0, 256, payload.size) for _ in range(2))):
            payload[:] = made
            want = oracle.decode(codec, payload, n, dtype)
            for name, kernels in everywhere(host_kernels, device_kernels):
                layout = Layout(n, dtype)
                out = layout.memory()
                kernels.decode(codec, payload, layout.tensor(out, kernels.device))
                assert_same(layout.values(out), want, name)


def test_order_of_the_bits_of_a_mask():
    """Value i is bit i % 8 of byte i / 8; 16 bytes for 128 values, what is left over is 0."""
    for i in (0, 1, 7, 8, 127, 128, 130):
        x = torch.zeros(131, dtype=torch.bool)
        x[i] = True
        payload = gradckpt.codecs.encode(x, "mask")
        assert payload.nbytes == 32
        assert int.from_bytes(payload.codes.numpy().tobytes(), "little") == 1 << i
        assert torch.equal(payload.decode(), x)


def test_every_byte_of_a_mask_but_0_is_true(same):
    every = np.arange(256, dtype=np.uint8)
    same("mask", "bool", np.tile(every, 40))
    x = torch.from_numpy(np.tile(every, 3)).view(torch.bool)
    restored = gradckpt.codecs.encode(x, "mask").decode()
    assert torch.equal(restored.view(torch.uint8), (x.view(torch.uint8) != 0).to(torch.uint8))
