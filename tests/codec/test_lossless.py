"""`lossless`: every bit comes back, or the codec says that it cannot hold the values."""

import direct_oracle as oracle
import numpy as np
import pytest
import torch
from codec_inputs import DTYPES, bits_of, tensor
from codec_kernels import assert_same, check_everywhere, nbytes

import gradckpt

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
half_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
EXPONENTS = {"float32": 256, "float16": 32, "bfloat16": 256}
MANTISSA = {"float32": 23, "float16": 10, "bfloat16": 7}


@pytest.fixture
def same(host_kernels, device_kernels):
    """Asserts equal bytes everywhere, and that values which fit come back exactly."""

    def run(bits, dtype, fits=True, **layout):
        assert check_everywhere(host_kernels, device_kernels, "lossless", dtype, bits, **layout) == fits
        payload, _ = oracle.encode("lossless", bits, dtype)
        if fits:
            assert_same(oracle.decode("lossless", payload, bits.size, dtype), bits, "oracle")

    return run


def make(sign, exponent, mantissa, dtype):
    """Bits from their fields."""
    width = MANTISSA[dtype]
    top = oracle.FIELDS[dtype][0] - 1
    sign, exponent, mantissa = (np.asarray(a, np.uint64) for a in (sign, exponent, mantissa))
    return (sign << top | exponent << width | mantissa).astype(oracle.WORDS[dtype])


def noise(exponent, dtype, seed=0):
    """Values of the given exponents, with random signs and fractions."""
    exponent = np.asarray(exponent)
    rng = np.random.default_rng([21, seed])
    sign, mantissa = (rng.integers(0, most, exponent.shape) for most in (2, 1 << MANTISSA[dtype]))
    return make(sign, exponent, mantissa, dtype)


def ordinary(n, dtype, seed=0):
    rng = np.random.default_rng([22, seed])
    return bits_of(torch.from_numpy(rng.standard_normal(n).astype(np.float32)).to(DTYPES[dtype])).copy()


# ---- values ----


@half_dtypes
def test_every_pattern(same, dtype):
    """In order; mixed within every window of 14 exponents; each beside a value that is far away."""
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    same(every, dtype)
    same(np.random.default_rng(2).permutation(every), dtype, fits=False)
    exponent = every >> MANTISSA[dtype] & (EXPONENTS[dtype] - 1)
    rng = np.random.default_rng(1)
    for first in range(0, EXPONENTS[dtype] - 1, 14):
        inside = (exponent >= first) & (exponent < min(first + 14, EXPONENTS[dtype] - 1))
        same(rng.permutation(every[(exponent == 0) | inside]), dtype)
    finite = every[exponent < EXPONENTS[dtype] - 1]
    groups = np.resize(finite, (-(-finite.size // 127), 127))
    for far in (1, EXPONENTS[dtype] - 2):
        beside = np.concatenate([groups, noise(np.full((len(groups), 1), far), dtype)], axis=1)
        same(beside.ravel(), dtype)


def every_exponent(dtype):
    """Each as the largest of its group, above the 13 it has codes for;
    float16 and small ones reach zero."""
    top = np.repeat(np.arange(EXPONENTS[dtype] - 1), 256)
    below = np.random.default_rng(3).integers(0, 14, top.size)
    return noise(np.maximum(top - below, 0), dtype)


def zeros(dtype):
    """Of one sign, of both, and beside subnormal values."""
    made = np.zeros(9000, oracle.WORDS[dtype])
    made[5000::2] = make(1, 0, 0, dtype)
    return np.append(made, make(0, 0, np.random.default_rng(4).integers(0, 1 << MANTISSA[dtype], 5000), dtype))


def relu(dtype):
    made = ordinary(20000, dtype)
    return np.where(made >> (oracle.FIELDS[dtype][0] - 1), 0, made).astype(made.dtype)


def few_that_are_not_finite(dtype):
    """They escape, and NaN keeps all of its bits."""
    special, made = EXPONENTS[dtype] - 1, ordinary(40960, dtype)
    made[7::100] = noise(np.full(made[7::100].shape, special), dtype)
    made[9::700] = make(1, special, 0, dtype)
    return made


def none_that_is_finite(dtype):
    """They have a code, alone or beside zeros only."""
    made = noise(np.full(5000, EXPONENTS[dtype] - 1), dtype)
    made[2500::3] = 0
    return made


def masks(dtype):
    """Of -infinity, and of the lowest value."""
    lowest = make(1, EXPONENTS[dtype] - 2, (1 << MANTISSA[dtype]) - 1, dtype)
    filled = np.random.default_rng(5).random((2, 8192)) < 0.5
    parts = [
        np.where(at, value, 0)
        for at, value in zip(filled, (make(1, EXPONENTS[dtype] - 1, 0, dtype), lowest), strict=True)
    ]
    return np.concatenate(parts).astype(oracle.WORDS[dtype])


def rare_lowest(dtype):
    made = ordinary(40960, dtype)
    if dtype != "float16":  # there 65504 is no further off than other values
        made[::128] = make(1, EXPONENTS[dtype] - 2, (1 << MANTISSA[dtype]) - 1, dtype)
    return made


@every_dtype
@pytest.mark.parametrize(
    "values", [every_exponent, zeros, relu, few_that_are_not_finite, none_that_is_finite, masks, rare_lowest]
)
def test_values(same, dtype, values):
    same(values(dtype), dtype)


@every_dtype
def test_infinity_beside_other_values_does_not_fit(same, dtype):
    masked = ordinary(9000, dtype)
    masked[::3] = make(1, EXPONENTS[dtype] - 1, 0, dtype)
    same(masked, dtype, fits=False)


@every_dtype
def test_one_huge_value_in_each_group(same, dtype):
    """Massive activations, 1e4 and more times the rest: they escape, and nothing else does."""
    for factor in (1e3, 4e3, 1e4, 3e4, 1e5, 3e7) if dtype != "float16" else (1e3, 4e3, 1e4, 3e4, 1e6):
        values = np.random.default_rng(6).standard_normal((64, 128)).astype(np.float32)
        values[:, 5] = factor
        values *= 1 if dtype != "float16" else 1e-2
        bits = bits_of(torch.from_numpy(values).to(DTYPES[dtype])).copy()
        same(bits, dtype)
        payload, _ = oracle.encode("lossless", bits, dtype)
        arenas = payload[-64 - 128 : -64].reshape(2, 64)
        assert (np.count_nonzero(arenas, axis=1) <= 60).all()


# ---- the arena ----


def with_escapes(counts, dtype, seed=0):
    """A block for each count: so many values 20 exponents below the others,
    one or two to a group."""
    exponent = np.full((len(counts), 32, 128), 28 if dtype == "float16" else 120)
    for block, count in enumerate(counts):
        for i in range(count):
            exponent[block, i % 32, (37 * i + i // 32 * 5) % 128] -= 20
    return noise(exponent, dtype, seed).ravel()


@every_dtype
def test_64_escapes_fit_and_65_do_not(same, dtype):
    same(with_escapes([64, 0, 63, 1, 64], dtype), dtype)
    bits = with_escapes([64, 65, 3, 70], dtype)
    same(bits, dtype, fits=False)
    payload, _ = oracle.encode("lossless", bits, dtype)
    restored = oracle.decode("lossless", payload, bits.size, dtype).reshape(4, 4096)
    for block, exact in enumerate([True, False, True, False]):
        assert (restored[block] == (bits.reshape(4, 4096)[block] if exact else oracle.NAN[dtype])).all()
    for count in (64, 65):  # in a block that is not full
        same(with_escapes([2 * count], dtype)[:2050], dtype, fits=count == 64)


@every_dtype
def test_choice_of_the_base(same, dtype):
    """Two escapes stay with the largest exponent; more move the base, if fewer escape then;
    ties do not."""
    high, low = (30, 15) if dtype == "float16" else (200, 120)

    def base_of(n_high, n_low):
        exponent = np.zeros(128, int)
        exponent[:n_high] = high
        exponent[64 : 64 + n_low] = low
        bits = np.random.default_rng(7).permutation(noise(exponent, dtype))
        same(bits, dtype)
        return oracle.encode("lossless", bits, dtype)[0][-1]

    cases = {(50, 0): high, (1, 2): high, (2, 2): high, (1, 3): low, (2, 3): low, (3, 3): high, (4, 3): high}
    assert {counts: base_of(*counts) for counts in cases} == cases
    assert base_of(0, 50) == low
    low = 2
    assert base_of(1, 50) == 14  # the least base there is


# ---- sizes ----


def test_size():
    """At most 12.2 bits of bfloat16."""
    assert gradckpt.codecs.info("lossless")["bits_per_value"] == 12.1875
    ones = gradckpt.codecs.encode(torch.ones(4096 * 10, dtype=torch.bfloat16), "lossless")
    assert ones.nbytes * 8 / 40960 == 12.1875


@every_dtype
def test_the_sparse_form_is_taken_where_it_is_smaller(dtype):
    """On the CPU; its size says which one it is."""
    rng = np.random.default_rng(9)
    for zeros in (0.0, 0.04, 0.1, 0.2, 0.5, 0.95, 1.0):
        for n in (1, 127, 5000, 400000):
            bits = ordinary(n, dtype) | 1
            bits[rng.random(n) < zeros] = 0
            payload = gradckpt.codecs.encode(tensor(bits, dtype), "lossless")
            own = nbytes("lossless", dtype, n)
            count = np.count_nonzero(bits)
            smaller = oracle.head_of(n) + count * bits.itemsize
            assert payload.nbytes == (min(own, smaller) if count < n - n // 20 else own)
            want = oracle.encode_sparse("lossless", bits, dtype) if payload.nbytes < own else None
            want, _ = want or oracle.encode("lossless", bits, dtype)
            assert_same(payload.codes.numpy(), want, f"{zeros} of {n}")
            assert_same(bits_of(payload.decode()), bits, f"{zeros} of {n}")


@every_dtype
def test_values_of_many_magnitudes_fit_beside_zeros(dtype):
    bits = with_escapes([70, 70, 0], dtype)
    bits[::2] = 0
    bits[1::4] = with_escapes([70, 70, 0], dtype)[: bits[1::4].size]
    bits[1::4][::2] = make(0, 1, 0, dtype)
    assert not oracle.encode("lossless", bits, dtype)[1]
    assert_same(bits_of(gradckpt.codecs.encode(tensor(bits, dtype), "lossless").decode()), bits, "decoded")
