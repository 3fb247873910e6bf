"""Every codec survives huge values, tensors beyond 2^31, wrong bytes and wrong payloads."""

import codec_inputs
import codec_oracle as oracle
import numpy as np
import pytest
import torch
from codec_inputs import DTYPES, Sparse, bits_of, tensor
from codec_libraries import ISAS, CodecLibrary, forced, whole
from native_programs import built_once

import gradckpt

LOSSY = [c for c in gradckpt.codecs.names() if c in oracle.FORMATS]


@pytest.fixture(scope="module")
def library(request, tmp_path_factory):
    return CodecLibrary(built_once(request, tmp_path_factory, "codecs", CodecLibrary.build))


# ---- one huge value ----

#: dB that the other values of the group keep beside a value 10^4 to 10^5 times as large,
#: and which is stored exactly.
BESIDE_HUGE = {"int8": 39, "int6": 27, "int4": 20, "fp8_e4m3": 17, "fp8_e5m2": 25}


@pytest.mark.parametrize("codec", BESIDE_HUGE)
@pytest.mark.parametrize("ratio", [1e4, 1e5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_massive_activation(codec, ratio, dtype):
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(1))
    x[torch.arange(512), torch.arange(512) * 37 % 128] = ratio * (1 - 2.0 * (torch.arange(512) % 2))
    x = x.to(DTYPES[dtype])
    huge = x.abs() > 100
    for isa in ISAS:
        with forced(isa):
            restored = gradckpt.codecs.encode(x, codec).decode()
    noise = (restored - x)[~huge].double().square().sum()
    assert 10 * torch.log10(x[~huge].double().square().sum() / noise) >= BESIDE_HUGE[codec]
    if codec in ("int8", "int6"):
        assert torch.equal(restored[huge], x[huge])
    else:
        torch.testing.assert_close(restored[huge], x[huge], rtol=2**-8 if codec == "int4" else 2**-7, atol=0)


@pytest.mark.parametrize("codec", ["int8", "int6", "int4"])
def test_huge_at_every_place(codec):
    """1e30 beside values around 1: whatever becomes of them, nothing becomes large."""
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(2))
    x[torch.arange(128), torch.arange(128)] = 9e29
    restored = gradckpt.codecs.encode(x, codec).decode()
    rest = ~torch.eye(128, dtype=torch.bool)
    assert restored[rest].abs().max() < 5
    torch.testing.assert_close(restored[~rest], x[~rest], rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", gradckpt.codecs.names())
def test_what_is_finite_stays_finite(codec, dtype):
    """k values beyond 1e30 in a group, for every k: finite, of their sign,
    and still beyond 1e30; Inf and NaN stay."""
    info = gradckpt.codecs.info(codec)
    if dtype not in info["dtypes"]:
        return
    bits = codec_inputs.huge_groups(dtype)
    x = tensor(bits, dtype).float()
    huge = x.isfinite() & (x.abs() > float(oracle.LIMIT[dtype]))
    assert [int(n) for n in huge.view(129, 6, 128).sum(2).amax(1)[:2]] != [0, 0]
    for isa in ISAS:
        with forced(isa):
            for dither in (None, (1, 2, 3)) if info["stochastic"] else (None,):
                try:
                    y = gradckpt.codecs.encode(tensor(bits, dtype), codec, dither=dither).decode().float()
                except ValueError:
                    assert info["may_overflow"]  # then the tensor is kept
                    continue
                assert torch.equal(y.isfinite(), x.isfinite())
                assert torch.equal(y[x.isinf()], x[x.isinf()])
                assert torch.equal(y.isnan(), x.isnan())
                assert torch.equal(y[huge].sign(), x[huge].sign())
                assert (y[huge].abs() > float(oracle.LIMIT[dtype])).all()
                assert (y[~huge & x.isfinite()].abs() <= float(oracle.LIMIT[dtype])).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", oracle.FORMATS)
def test_huge_values_have_the_oracles_bytes(codec, dtype, avx512):
    bits = codec_inputs.huge_groups(dtype, (1, 2, 3, 5, 40, 128))
    want = oracle.encode(codec, bits, dtype)
    values = oracle.decode(codec, want, bits.size, dtype)
    for isa in ISAS:
        with forced(isa):
            payload = gradckpt.codecs.encode(tensor(bits, dtype), codec)
            np.testing.assert_array_equal(whole(payload).numpy(), want)
            np.testing.assert_array_equal(bits_of(payload.decode()), values)
    if "avx512" not in ISAS:
        np.testing.assert_array_equal(avx512.encode(codec, bits, dtype), want)
        np.testing.assert_array_equal(avx512.decode(codec, want, bits.size, dtype), values)


# ---- beyond 2^31 values, without the memory ----

FAR = 2**31 + 4097


#: One of each kind; make soak has the rest. Blocks of `sparse_int8` begin where others end.
OF_UNITS = [
    codec if codec in ("bf16", "int8", "lossless") else pytest.param(codec, marks=pytest.mark.soak)
    for codec in gradckpt.codecs.names()
    if codec != "sparse_int8"
]


@pytest.mark.parametrize("codec", OF_UNITS)
def test_last_values_of_a_tensor_beyond_2_31(library, codec):
    """Only the last units are worked on: they come back,
    and no other byte of tensor or payload changes."""
    info = gradckpt.codecs.info(codec)
    dtype = next(d for d in ("bfloat16", "float32", "bool") if d in info["dtypes"])
    item = {"bfloat16": 2, "float32": 4, "bool": 1}[dtype]
    tail = FAR % 4096 + 4096  # the last block, which is not full, and the one before
    x, payload = Sparse(FAR * item), Sparse(library.nbytes(codec, FAR, dtype))
    values = np.random.default_rng(3).standard_normal(tail).astype(np.float32)
    bits = (values > 0).astype(np.uint8) if dtype == "bool" else oracle.to_bits(values, dtype)
    x.bytes[(FAR - tail) * item :] = bits.view(np.uint8)
    first, last = library.units(codec, FAR - tail), library.units(codec, FAR)
    assert library.encode_units(codec, x.address, FAR, dtype, payload.address, first, last) == 0
    x.bytes[(FAR - tail) * item :] = 0
    library.decode_units(codec, payload.address, FAR, dtype, x.address, first, last)
    restored = x.bytes[(FAR - tail) * item :].view(bits.dtype)
    if dtype == "bool":
        np.testing.assert_array_equal(restored, bits)
    else:
        error = oracle.to_float(restored, dtype) - oracle.to_float(bits, dtype)
        assert np.linalg.norm(error) <= 0.13 * np.linalg.norm(values)
    for far in (0, 2**31 - 8192, 2**31 - 65536):  # where an index of 32 bits would have gone
        assert not x.bytes[far * item : (far + 4096) * item].any()
        assert not payload.bytes[: 2**20].any()


# ---- wrong bytes ----


@pytest.mark.parametrize("codec", gradckpt.codecs.names())
def test_any_bytes_decode(codec):
    """A payload of random bytes decodes to undefined values, and no other memory is touched
    (test_soak.py repeats this under ASan)."""
    rng = np.random.default_rng(4)
    for dtype in gradckpt.codecs.info(codec)["dtypes"]:
        for n in (1, 127, 128, 1000, 4096, 9001):
            kind = getattr(torch, dtype)
            nbytes = torch.ops.gradckpt.encode(torch.zeros(n, dtype=kind), codec).numel()
            for fill in (None, 0xFF, 0x7F, 0x80):
                data = rng.integers(0, 256, nbytes, np.uint8) if fill is None else np.full(nbytes, fill, np.uint8)
                restored = torch.ops.gradckpt.decode(torch.from_numpy(data), codec, [n], kind)
                assert restored.shape == (n,)


@pytest.mark.parametrize("codec", gradckpt.codecs.names())
def test_wrong_payloads_are_named(codec):
    """Truncated, of another codec, for another dtype: an error that says which, never values."""
    kind = getattr(torch, gradckpt.codecs.info(codec)["dtypes"][0])
    x = torch.ones(5000).to(kind)
    data = torch.ops.gradckpt.encode(x, codec)
    for wrong in (data[:-1], data[:0], torch.cat([data, data[:1]])):
        with pytest.raises(RuntimeError, match=f"payload of codec '{codec}' .* has {data.numel()} bytes"):
            torch.ops.gradckpt.decode(wrong, codec, [5000], kind)
    for other in gradckpt.codecs.names():
        info = gradckpt.codecs.info(other)
        if str(kind).removeprefix("torch.") not in info["dtypes"]:
            with pytest.raises(RuntimeError, match=f"codec '{other}': this codec does not take this dtype"):
                torch.ops.gradckpt.decode(data, other, [5000], kind)
        elif torch.ops.gradckpt.encode(x, other).numel() != data.numel():
            with pytest.raises(RuntimeError, match=f"payload of codec '{other}'"):
                torch.ops.gradckpt.decode(data, other, [5000], kind)


# ---- again and again ----


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_encoding_many_times(codec, dtype):
    """No round errs by more than the first one did,
    so that n rounds err by n times as much at most."""
    bits = codec_inputs.gaussian(dtype, 128 * 200)
    x = tensor(bits, dtype)
    now, first = x, None
    for _ in range(6):
        again = gradckpt.codecs.encode(now, codec).decode()
        error = (again - now).double().norm()
        first = error if first is None else first
        assert error <= 1.05 * first
        now = again
    np.testing.assert_array_equal(bits_of(x), bits)
