"""Casts, `lossless` and `mask`, which take a value at a time: tails, strides, large tensors and
payloads of any bytes, with the oracle's bytes on every instruction set and on a device."""

import itertools

import direct_oracle as oracle
import numpy as np
import pytest
import torch
from codec_inputs import DTYPES, bits_of
from codec_kernels import (
    E_OVERFLOW,
    PAIRS,
    Layout,
    aligned,
    assert_same,
    check,
    check_everywhere,
    check_last_values_of_a_huge_tensor,
    every_layout,
    every_pair,
    everywhere,
    nbytes,
)
from processes import case

import gradckpt

#: Of a value that does not fit, as bits of its dtype.
TOO_LARGE = {"bf16": 0x7F7F8000, "fp16": 0x477FF000}
#: With an exponent and a fraction of its own.
VALUE = {"float32": 0xC0490FDB, "float16": 0x4405, "bfloat16": 0x0885, "bool": 1}


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
        if codec in TOO_LARGE:
            check(ampere_kernels, codec, dtype, bits, "sm_80", **layout)

    return run


@every_pair
def test_tails_and_alignment(same, codec, dtype):
    lengths = (0, 1, 7, 8, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097)
    for n, offset in itertools.product(lengths, (0, 1, 3)):
        with case(n, offset):
            same(codec, dtype, ordinary(n, dtype, n), offset=offset)


@every_pair
@every_layout
def test_strides(same, codec, dtype, sizes, strides):
    same(codec, dtype, ordinary(int(np.prod(sizes)), dtype), offset=1, sizes=sizes, strides=strides)


@pytest.mark.parametrize(("codec", "dtype"), [pair for pair in PAIRS if pair[0] != "lossless"])
def test_stores_of_large_tensors(host_kernels, codec, dtype):
    bits = ordinary(8 * 4096, dtype)
    special = [(0x7FC00001, 0), (TOO_LARGE[codec], E_OVERFLOW)] if codec in TOO_LARGE else []
    for value, status in ((bits[0], 0), *special):
        bits[5000] = value
        want, _ = oracle.encode(codec, bits, dtype)
        for isa in host_kernels.isas:
            payload, values, got = host_kernels.choose(isa).stream(codec, dtype, bits)
            assert got == status
            assert_same(payload, want, f"{isa} payload")
            assert_same(values, oracle.decode(codec, want, bits.size, dtype), f"{isa} decoded")


@every_pair
def test_index_arithmetic(host_kernels, codec, dtype):
    check_last_values_of_a_huge_tensor(host_kernels, codec, dtype, VALUE[dtype])


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


@pytest.mark.parametrize(
    ("codec", "takes", "others"),
    [
        *((codec, "float32", (torch.bfloat16, torch.float16, torch.bool)) for codec in TOO_LARGE),
        ("mask", "bool", (torch.float32, torch.bfloat16, torch.uint8)),
    ],
)
def test_other_dtypes_are_refused(codec, takes, others):
    for dtype in others:
        with pytest.raises(TypeError, match=f"takes plain strided {takes} tensors"):
            gradckpt.codecs.encode(torch.zeros(3, dtype=dtype), codec)
