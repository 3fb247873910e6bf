"""`lossless`: every bit comes back, or the codec says that it cannot hold the values."""

import direct_oracle
import direct_oracle as oracle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from codec_inputs import DTYPES, bits_of, tensor
from codec_kernels import E_OVERFLOW, SIZES, assert_same, check_everywhere, nbytes

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
    fields = (np.asarray(a, np.uint64) for a in (sign, exponent, mantissa))
    sign, exponent, mantissa = fields
    return (sign << top | exponent << width | mantissa).astype(oracle.WORDS[dtype])


def noise(exponent, dtype, seed=0):
    """Values of the given exponents, with random signs and fractions."""
    exponent = np.asarray(exponent)
    rng = np.random.default_rng([21, seed])
    return make(
        rng.integers(0, 2, exponent.shape),
        exponent,
        rng.integers(0, 1 << MANTISSA[dtype], exponent.shape),
        dtype,
    )


def ordinary(n, dtype, seed=0):
    rng = np.random.default_rng([22, seed])
    return bits_of(torch.from_numpy(rng.standard_normal(n).astype(np.float32)).to(DTYPES[dtype])).copy()


# ---- values ----


@half_dtypes
def test_every_pattern(same, dtype):
    """In order; mixed within every window of 14 exponents; each beside a value that is far away."""
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    same(every, dtype)
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


@half_dtypes
def test_every_pattern_at_once(same, dtype):
    """Refused, but with the same bytes everywhere."""
    mixed = np.random.default_rng(2).permutation(np.arange(65536, dtype=np.uint32).astype(np.uint16))
    same(mixed, dtype, fits=False)


@every_dtype
def test_every_exponent(same, dtype):
    """Each as the largest of its group, above the 13 it has codes for;
    float16 and small ones reach zero."""
    top = np.repeat(np.arange(EXPONENTS[dtype] - 1), 256)
    below = np.random.default_rng(3).integers(0, 14, top.size)
    same(noise(np.maximum(top - below, 0), dtype), dtype)


@every_dtype
def test_zeros(same, dtype):
    zeros = np.zeros(9000, oracle.WORDS[dtype])
    same(zeros, dtype)
    zeros[::2] = make(1, 0, 0, dtype)
    same(zeros, dtype)
    same(make(0, 0, np.random.default_rng(4).integers(0, 1 << MANTISSA[dtype], 5000), dtype), dtype)  # subnormal
    relu = ordinary(20000, dtype)
    relu[relu >> (oracle.FIELDS[dtype][0] - 1) != 0] = 0
    same(relu, dtype)


@every_dtype
def test_nan_and_infinity(same, dtype):
    """A few among others escape; alone, or beside zeros only, they have a code.
    NaN keeps all of its bits."""
    special = EXPONENTS[dtype] - 1
    few = ordinary(40960, dtype)
    few[7::100] = noise(np.full(few[7::100].shape, special), dtype)
    few[9::700] = make(1, special, 0, dtype)
    same(few, dtype)
    alone = noise(np.full(5000, special), dtype)
    same(alone, dtype)
    alone[::3] = make(0, 0, 0, dtype)
    same(alone, dtype)
    masked = np.where(np.arange(9000) % 5 < 2, make(1, special, 0, dtype), make(0, 0, 0, dtype))
    same(masked.astype(oracle.WORDS[dtype]), dtype)
    masked = ordinary(9000, dtype)
    masked[::3] = make(1, special, 0, dtype)
    same(masked, dtype, fits=False)


@every_dtype
def test_masks_of_the_lowest_value(same, dtype):
    lowest = make(1, EXPONENTS[dtype] - 2, (1 << MANTISSA[dtype]) - 1, dtype)
    mask = np.where(np.random.default_rng(5).random(9000) < 0.5, lowest, 0).astype(oracle.WORDS[dtype])
    same(mask, dtype)
    if dtype != "float16":  # there 65504 is no further off than other values
        rare = ordinary(40960, dtype)
        rare[::128] = lowest
        same(rare, dtype)


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
def test_64_escapes_fit_and_65_do_not(same, dtype, host_kernels):
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


# ---- tensors ----


@every_dtype
def test_stores_of_large_tensors(host_kernels, dtype):
    bits = np.concatenate([ordinary(16 * 4096, dtype), with_escapes([5, 64, 1], dtype)])
    bits[::777] = make(1, EXPONENTS[dtype] - 1, 3, dtype)
    want, fits = oracle.encode("lossless", bits, dtype)
    for isa in host_kernels.isas:
        payload, values, status = host_kernels.choose(isa).stream("lossless", dtype, bits)
        assert status == (0 if fits else E_OVERFLOW)
        assert_same(payload, want, f"{isa} payload")
        assert_same(values, oracle.decode("lossless", want, bits.size, dtype), f"{isa} decoded")


@every_dtype
def test_large_tensor(dtype):
    """Above the sizes where the shipped library streams; tiled,
    so that the oracle sees little of it."""
    tile = with_escapes([3, 0, 64], dtype)
    x = tensor(np.tile(tile, (34 << 20) // tile.nbytes + 1), dtype)
    payload = gradckpt.codecs.encode(x, "lossless")
    integers = torch.int32 if dtype == "float32" else torch.int16
    assert torch.equal(payload.decode().view(integers), x.view(integers))
    words = tile.size // 128 * (SIZES["lossless", dtype][1] - 1)
    data = payload.codes.numpy()[: x.numel() // tile.size * words].reshape(-1, words)
    assert (data == oracle.encode("lossless", tile, dtype)[0][:words]).all()


# ---- bad input ----


@every_dtype
def test_what_it_cannot_hold_is_said(dtype):
    x = tensor(with_escapes([65], dtype), dtype)
    with pytest.raises(ValueError, match="codec 'lossless' cannot hold these values"):
        gradckpt.codecs.encode(x, "lossless")
    with pytest.raises(RuntimeError, match="'lossless': it cannot hold these values"):
        torch.ops.gradckpt.encode(x, "lossless")


# ---- checkpoints ----


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
            smaller = direct_oracle.head_of(n) + count * bits.itemsize
            assert payload.nbytes == (min(own, smaller) if count < n - n // 20 else own)
            want = direct_oracle.encode_sparse("lossless", bits, dtype) if payload.nbytes < own else None
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


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("fake_quantize", [False, True])
@pytest.mark.parametrize(("exact", "activation"), [("lossless", lambda h: h), ("sparse", F.relu)])
def test_gradients_are_bit_equal(exact, activation, dtype, fake_quantize):
    torch.manual_seed(0)
    x = torch.randn(64, 96, dtype=dtype, requires_grad=True)
    weights = [(torch.randn(96, 96) / 10).to(dtype).requires_grad_() for _ in range(6)]

    def net(run):
        h = x * 1
        for w in weights:
            h = run(lambda h, w=w: h + F.gelu(F.layer_norm(h, h.shape[-1:]) @ w), activation(h))
        return (h.float() ** 2).mean()

    gradckpt.stats.reset()
    config = {"codec": exact, "min_numel": 0, "fake_quantize": fake_quantize}
    plain, mine = net(lambda f, h: f(h)), net(lambda f, h: gradckpt.checkpoint(f, h, compress=config))
    assert torch.equal(plain, mine)
    assert gradckpt.stats()["compressed"] == 6 if exact == "lossless" else gradckpt.stats()["compressed"] >= 1
    for a, b in zip(*(torch.autograd.grad(y, [x, *weights]) for y in (plain, mine)), strict=True):
        assert torch.equal(a, b)


def test_values_that_do_not_fit_are_kept_as_they_are():
    x = tensor(with_escapes([65, 0], "bfloat16"), "bfloat16").requires_grad_()
    gradckpt.stats.reset()
    y = gradckpt.checkpoint(lambda h: h * 3, x * 1, compress="lossless")
    assert gradckpt.stats()["uncompressed"] == {"values the codec cannot hold": 1}
    assert gradckpt.stats()["uncompressed_bytes"] == 2 * 8192
    (g,) = torch.autograd.grad(y.float().sum(), x)
    assert torch.equal(g, torch.full_like(x, 3))
