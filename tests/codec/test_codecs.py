"""The bytes of every codec against the oracle, on every instruction set;
what they promise of values.

Tensors (strides, threads, operators, errors): test_codec_tensors.py."""

import codec_inputs
import codec_oracle as oracle
import numpy as np
import pytest
import torch
from codec_inputs import DTYPES, bits_of, noise_set, sqnr, tensor
from codec_kernels import assert_same, check_bytes
from codec_libraries import LAYOUT, whole
from processes import case

import gradckpt


def takes_every_value(info):
    return not info["may_overflow"] and set(DTYPES) <= set(info["dtypes"])


GROUPED = list(oracle.FORMATS)
#: Those that overflow, and mask: test_lossless.py, test_casts.py, test_mask.py
CODECS = [c for c in gradckpt.codecs.names() if takes_every_value(gradckpt.codecs.info(c))]
BITS = {"int8": 8.125, "int8_plain": 8.125, "fp8_e4m3": 8.125, "fp8_e5m2": 8.125, "int6": 6.125, "int4": 4.25}
#: Unit roundoff, and half of the smallest subnormal.
ROUNDING = {"float32": (2.0**-24, 2.0**-150), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}

every_codec = pytest.mark.parametrize("codec", CODECS)
every_grouped = pytest.mark.parametrize("codec", GROUPED)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def payload_of(bits, codec, dtype):
    return whole(gradckpt.codecs.encode(tensor(bits, dtype), codec)).numpy()


def round_trip(bits, codec, dtype):
    return bits_of(gradckpt.codecs.encode(tensor(bits, dtype), codec).decode())


def groups_of(bits, dtype):
    """float64 values, in groups; the last one padded with zeros."""
    values = np.zeros(-(-bits.size // 128) * 128)
    with np.errstate(invalid="ignore"):  # signalling NaN
        values[: bits.size] = oracle.to_float(bits, dtype)
    return values.reshape(-1, 128)


def assert_bound(bits, decoded, codec, dtype, max_error=None):
    """Every value of every group within max_error x amax, plus the rounding to the dtype."""
    x, restored = groups_of(bits, dtype), groups_of(decoded, dtype)
    escape = ~(np.abs(x) <= oracle.LIMIT[dtype])
    amax = np.where(escape, 0.0, np.abs(x)).max(axis=1, keepdims=True)
    restored = np.where(escape, x, restored)
    unit, tiny = ROUNDING[dtype]
    with np.errstate(invalid="ignore"):
        bound = (max_error or gradckpt.codecs.info(codec)["max_error"]) * amax + unit * np.abs(restored) + 2 * tiny
        bound[escape] = 0.0
        error = np.where(escape, 0.0, np.abs(x - restored))
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), f"|{x[worst]} - {restored[worst]}| > {bound[worst]}, group {worst[0]}"
    assert_same(decoded[escape.ravel()[: bits.size]], canonical(bits, dtype)[escape.ravel()[: bits.size]], "escapes")


def canonical(bits, dtype):
    return oracle.to_bits(oracle.to_float(bits, dtype), dtype)


# ---- the oracle itself ----


def test_oracle_is_sound():
    product = oracle.STAGES[0]
    for stage in oracle.STAGES[1:]:
        product = stage @ product
    np.testing.assert_array_equal(product, oracle.HADAMARD)
    np.testing.assert_array_equal(oracle.HADAMARD @ oracle.HADAMARD, 128 * np.eye(128))
    codes = np.arange(256, dtype=np.uint8)
    for codec, dtype, finite in (
        ("fp8_e4m3", torch.float8_e4m3fn, codes & 127 < 127),
        ("fp8_e5m2", torch.float8_e5m2, codes & 127 < 124),
    ):
        theirs = torch.from_numpy(codes).view(dtype).double().numpy()
        np.testing.assert_array_equal(oracle.FORMATS[codec].value(codes)[finite], theirs[finite])


# ---- bytes ----


@every_codec
@every_dtype
def test_bytes_equal_oracle(codec, dtype, host_kernels):
    """16-bit dtypes: all 65,536 values under a spread of scales; float32: every binade;
    with and without escapes; groups that are not ordinary."""
    hostile = [f(dtype, s) for f in (codec_inputs.hostile, codec_inputs.unusual) for s in range(2)]
    bits = np.concatenate([codec_inputs.inputs(dtype), *hostile])
    check_bytes(codec, tensor(bits, dtype))
    check_bytes(codec, tensor(np.ascontiguousarray(bits.reshape(-1, 128)[::2]).ravel(), dtype), host_kernels)


@every_grouped
def test_every_step_meets_every_significand(codec, host_kernels):
    """bfloat16: all significands of amax and of the values below it,
    which tables of an instruction set may hold."""
    values = np.zeros((128, 16, 2, 128), np.uint16)  # significand of amax, exponent below it, half of the significands
    values[..., 1:65] = np.arange(128, dtype=np.uint16).reshape(2, 64)
    values += ((127 - np.arange(16, dtype=np.uint16)) << 7)[:, None, None]
    values[..., 0] = (128 << 7) + np.arange(128, dtype=np.uint16)[:, None, None]
    values[..., 65:] = values[..., 64:0:-1][..., :63] | 0x8000
    check_bytes(codec, tensor(values.ravel(), "bfloat16"), host_kernels)


@every_codec
@every_dtype
def test_tails(codec, dtype, host_kernels):
    for n in (0, 1, 2, 127, 128, 129, 255, 1000, 2049, 4097):
        for inputs in (codec_inputs.hostile, codec_inputs.unusual):
            bits = inputs(dtype, n, groups=40)[-n or 5120 :][:n]
            with case(n, inputs.__name__):
                check_bytes(codec, tensor(bits, dtype), host_kernels)


@pytest.mark.parametrize("codec", ["int8", "int6", "int4"])
@every_dtype
def test_unusual_tails(codec, dtype):
    """Groups of 1 to 127 values in every form."""
    groups = codec_inputs.unusual(dtype, 9, groups=127).reshape(-1, 128)
    for n, group in enumerate(groups, 1):
        with case(n):
            check_bytes(codec, tensor(group[:n], dtype))


@every_codec
def test_nbytes(codec):
    info = gradckpt.codecs.info(codec)
    assert info["bits_per_value"] == (sum(LAYOUT[codec]) / 16 if codec in GROUPED else 0)
    assert codec not in BITS or info["bits_per_value"] == BITS[codec]
    for dtype in DTYPES:
        for n in (0, 1, 127, 128, 129, 1000, 128 * 1000):
            payload = gradckpt.codecs.encode(torch.zeros(n, dtype=DTYPES[dtype]), codec)
            want = -(-n // 128) * sum(LAYOUT[codec]) if codec in GROUPED else n * payload.dtype.itemsize
            assert payload.nbytes == whole(payload).numel() == want
            assert (payload.codec, payload.shape, payload.dtype) == (codec, (n,), DTYPES[dtype])


# ---- values ----


@every_grouped
@every_dtype
def test_error_bound(codec, dtype):
    sizes = 1.375 * 2.0 ** np.array([e for e in codec_inputs.EXPONENTS[dtype] if e < 99])
    constant = oracle.to_bits(np.repeat(sizes, 128).astype(np.float32), dtype)
    whole = np.concatenate([codec_inputs.inputs(dtype), constant]).reshape(-1, 128)
    magnitude = np.abs(oracle.to_float(whole, dtype))
    inside = (magnitude > oracle.LIMIT[dtype]) & (magnitude < oracle.MAX[dtype])
    ordinary = np.ascontiguousarray(whole[~inside.any(axis=1)]).ravel()  # form B: below
    assert_bound(ordinary, round_trip(ordinary, codec, dtype), codec, dtype)


@every_grouped
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bound_beside_values_beyond_1e30(codec, dtype):
    """Form B: up to three such values (int4: two) come back exactly;
    the rest within half a step."""
    _, half, _, table, _ = oracle.form_b(codec)
    most = 0.5 / half * (1 + 2**-20)
    x = np.random.default_rng(4).standard_normal((200, 128)).astype(np.float32)
    x *= 10.0 ** np.random.default_rng(5).uniform(-30, 25, (200, 1)).astype(np.float32)
    x[:, 7], x[::2, 50], x[::5, [1, 100]] = 1e31, -2e38, np.nan
    x[::3, 90] = 7e36 if table == 3 else 1e31
    bits = oracle.to_bits(x.ravel(), dtype)
    assert_bound(bits, round_trip(bits, codec, dtype), codec, dtype, max_error=most)
    x[:, 8:13] = [1e31, 2e31, 3e31, 4e31, -5e31]  # too many: the last ones become +-MAX
    bits = oracle.to_bits(x.ravel(), dtype)
    restored = groups_of(round_trip(bits, codec, dtype), dtype)
    exact = groups_of(oracle.to_bits(x.ravel(), dtype), dtype)
    np.testing.assert_array_equal(restored[1, 7 : 8 + table], exact[1, 7 : 8 + table])
    np.testing.assert_array_equal(restored[1, 11:13], [oracle.MAX[dtype], -oracle.MAX[dtype]])
    assert np.isfinite(restored[~np.isnan(exact)]).all()


@every_grouped
@every_dtype
def test_limits_come_back(codec, dtype):
    """NaN, +-Inf and the dtype's limits, one at each place of a group, and several together."""
    limits = torch.finfo(DTYPES[dtype])
    x = torch.randn(8 * 128, 128, dtype=torch.float32, generator=torch.Generator().manual_seed(6)).to(DTYPES[dtype])
    specials = [float("nan"), float("inf"), float("-inf"), limits.max, limits.min]
    for i in range(8 * 128):
        for k in range(i // 128 - 2 if i >= 512 else 1):
            x[i, (i + 5 * k) % 128] = specials[(i + k + i // 128) % 5]
    bits = bits_of(x)
    restored = round_trip(bits, codec, dtype)
    assert_bound(bits, restored, codec, dtype)
    np.testing.assert_array_equal(np.isnan(groups_of(restored, dtype)), torch.isnan(x).numpy())
    for value in (*specials, 0.0):
        constant = torch.full((300,), value, dtype=DTYPES[dtype])
        torch.testing.assert_close(
            gradckpt.codecs.encode(constant, codec).decode(), constant, rtol=0, atol=0, equal_nan=True
        )


@every_dtype
@pytest.mark.parametrize(("codec", "half_cell"), [("int8", 0.5), ("int6", 4.5), ("int4", 13.0)])
def test_rms_of_rotated(codec, half_cell, dtype):
    """The root mean square of a group's errors is at most half the
    widest cell over 127 of its Euclidean norm."""
    bits = np.concatenate([codec_inputs.gaussian(dtype, 128 * 400), codec_inputs.inputs(dtype)])
    values = np.abs(oracle.to_float(bits, dtype)).reshape(-1, 128)
    ordinary = (values <= oracle.LIMIT[dtype]).all(axis=1) & (values.max(axis=1) > 2.0**-73)
    bits = np.ascontiguousarray(bits.reshape(-1, 128)[ordinary]).ravel()
    x, restored = groups_of(bits, dtype), groups_of(round_trip(bits, codec, dtype), dtype)
    rms, norm = np.sqrt(np.mean((x - restored) ** 2, axis=1)), np.sqrt(np.sum(x**2, axis=1))
    unit, tiny = ROUNDING[dtype]
    rounding = unit * np.sqrt(np.mean(restored**2, axis=1)) + tiny
    rounding_of_step = {"int8": 2**-7, "int6": 2**-6, "int4": 2**-4}[codec]
    assert (rms <= norm * half_cell / 127 * (1 + 2 * rounding_of_step) + rounding).all()


@every_grouped
@every_dtype
def test_encoding_again(codec, dtype):
    """No round errs by more than the first one did, so that n rounds err by n times as much at
    most. FP8 grids whose products fit the dtype do not move at all."""
    bits = codec_inputs.gaussian(dtype, 128 * 300, magnitude=3.0)
    before = once = round_trip(bits, codec, dtype)
    least = np.linalg.norm(groups_of(once, dtype) - groups_of(bits, dtype))
    for _ in range(5):
        again = round_trip(before, codec, dtype)
        assert_bound(before, again, codec, dtype)
        assert np.linalg.norm(groups_of(again, dtype) - groups_of(before, dtype)) <= 1.05 * least
        before = again
    if codec.startswith("fp8") and dtype != "bfloat16":  # 4 + 8 bits: exact in float32, nearly so in float16
        assert_same(before, once, "decoded again")
        assert_same(payload_of(once, codec, dtype), payload_of(bits, codec, dtype), "encoded again")


# ---- signal to noise ----


@pytest.mark.parametrize(
    ("codec", "plain", "bulk"),
    [
        ("int8", 43.4, 41.4),
        ("int8_plain", 43, 27),
        ("fp8_e4m3", 31.6, 31.6),
        ("fp8_e5m2", 25, 25),
        ("int6", 31.6, 29.5),
        ("int4", 20.2, 18),
    ],
)
def test_sqnr(codec, plain, bulk):
    """On Gaussian values; on the small channels of the outlier set (the mean of six:
    which channels meet matters)."""
    x, _ = noise_set("Gaussian")
    assert sqnr(x, gradckpt.codecs.encode(x, codec).decode()) >= plain
    sets = [noise_set("X", seed) for seed in range(6)]
    value = np.mean([sqnr(x, gradckpt.codecs.encode(x, codec).decode(), rest) for x, rest in sets])
    assert value >= bulk
    if codec == "int8_plain":  # the point of the rotation
        assert value <= 31
