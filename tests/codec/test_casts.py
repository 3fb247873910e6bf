"""`bf16` and `fp16`: float32 as torch rounds it, wherever it fits."""

import direct_oracle as oracle
import numpy as np
import pytest
import torch
from codec_inputs import bits_of
from codec_kernels import assert_same, check, check_everywhere

import gradckpt

CODECS = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: The first float32, as bits, that rounds to infinity.
END = {"bf16": 0x7F7F8000, "fp16": 0x477FF000}
every_codec = pytest.mark.parametrize("codec", CODECS)


@pytest.fixture
def same(host_kernels, device_kernels, ampere_kernels):
    """Asserts equal bytes everywhere, and that what fits is rounded as torch does it."""

    def run(bits, codec, fits=True, **layout):
        bits = np.asarray(bits, np.uint32)
        assert check_everywhere(host_kernels, device_kernels, codec, "float32", bits, **layout) == fits
        check(ampere_kernels, codec, "float32", bits, "sm_80", **layout)
        if fits:
            x = tensor(bits)
            theirs = x.to(CODECS[codec]).float()
            ours = tensor(oracle.decode(codec, oracle.encode(codec, bits, "float32")[0], bits.size, "float32"))
            assert_same(bits_of(ours[~x.isnan()]), bits_of(theirs[~x.isnan()]), "torch")
            assert torch.equal(ours.isnan(), x.isnan())

    return run


def tensor(bits):
    return torch.from_numpy(np.asarray(bits, np.uint32).view(np.int32).copy()).view(torch.float32)


def with_signs(magnitudes):
    magnitudes = np.asarray(magnitudes, np.uint32)
    return np.concatenate([magnitudes, magnitudes | 0x80000000])


@pytest.mark.soak
def test_every_bfloat16_and_what_lies_between(same):
    """Each pattern, the middle to the next, and their neighbours; NaN apart,
    up to the last that fits."""
    upper = np.arange(0x7F80, dtype=np.uint32) << 16
    bits = np.concatenate([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    same(with_signs(bits[bits < END["bf16"]]), "bf16")


def test_every_float16_and_what_lies_between(same):
    """Each value, the middle to the next, and their float32 neighbours, subnormals too."""
    values = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middles = np.append((values[1:] + values[:-1]) / 2, 65519.0)
    bits = np.concatenate([v.astype(np.float32).view(np.uint32) for v in (values, middles)])
    bits = np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1])
    same(with_signs(bits[bits < END["fp16"]]), "fp16")


@every_codec
def test_every_binade(same, codec):
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 256, 40000, np.uint32) << 23 | rng.integers(0, 1 << 23, 40000, np.uint32)
    same(with_signs(bits[bits < END[codec]]), codec)


@every_codec
def test_nan_and_infinity(same, codec):
    """NaN becomes quiet and keeps its sign and the first bits of its fraction; infinity stays."""
    special = with_signs([0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FC12345, 0x7FFFFFFF, 0x7F812345])
    bits = np.random.default_rng(2).standard_normal(5000).astype(np.float32).view(np.uint32)
    bits[::17] = np.resize(special, bits[::17].size)
    same(bits, codec)
    same(np.resize(special, 4096), codec)
    payload, _ = oracle.encode(codec, special, "float32")
    nan, first, shift = (0x7FC0, 0x7F, 16) if codec == "bf16" else (0x7E00, 0x3FF, 13)
    infinity = {"bf16": 0x7F80, "fp16": 0x7C00}[codec]
    want = np.where(special << 1 > 0xFF000000, nan | (special >> shift & first), infinity)
    np.testing.assert_array_equal(payload.view(np.uint16), want | (special >> 16 & 0x8000))


@every_codec
def test_first_value_that_does_not_fit(same, codec):
    """It becomes NaN, alone; on the host the codec refuses."""
    ordinary = np.random.default_rng(3).standard_normal(9000).astype(np.float32).view(np.uint32)
    for place in (0, 63, 64, 4095, 4096, 8999):
        for sign in (0, 0x80000000):
            bits = ordinary.copy()
            bits[place] = sign | END[codec] - 1
            same(bits, codec)
            bits[place] += 1
            same(bits, codec, fits=False)
            payload, _ = oracle.encode(codec, bits, "float32")
            restored = tensor(oracle.decode(codec, payload, bits.size, "float32"))
            np.testing.assert_array_equal(np.flatnonzero(restored.isnan()), [place])
    with pytest.raises(ValueError, match=f"codec '{codec}' cannot hold these values"):
        gradckpt.codecs.encode(tensor(bits), codec)
    same(np.full(300, 0x7F7FFFFF), codec, fits=False)


@every_codec
def test_stated_error(codec):
    """max_error x |x|, and for fp16 half of its smallest subnormal:
    the error is relative to the value itself."""
    x = torch.randn(100000, generator=torch.Generator().manual_seed(4)) * 2.0 ** torch.linspace(-40, 15, 100000).floor()
    x = torch.cat([x[x.abs() < 65504], torch.tensor([1 + 2.0**-8, 1 + 2.0**-11, 3e-8, 2.0**-25, 1e-30])])
    error = (gradckpt.codecs.encode(x, codec).decode() - x).abs().double()
    relative = gradckpt.codecs.info(codec)["max_error"]
    assert relative == {"bf16": 2**-8, "fp16": 2**-11}[codec]
    assert (error <= relative * x.abs() + (2**-25 if codec == "fp16" else 0)).all()
    assert (error / x.abs()).max() > relative * 0.99  # it is no looser than need be
