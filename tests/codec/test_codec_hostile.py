"""Every codec survives huge values, tensors beyond 2^31, wrong bytes and wrong payloads."""

import codec_inputs
import codec_oracle as oracle
import numpy as np
import pytest
import torch
from codec_inputs import DTYPES, Sparse, tensor
from codec_kernels import Layout, check_bytes
from codec_libraries import ISAS, LAYOUT, NUMBERS, Dither, Tensor, forced

import gradckpt

LOSSY = [c for c in gradckpt.codecs.names() if c in oracle.FORMATS]


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
def test_huge_values_have_the_oracles_bytes(codec, dtype, host_kernels):
    bits = codec_inputs.huge_groups(dtype, (1, 2, 3, 5, 40, 128))
    check_bytes(codec, tensor(bits, dtype), host_kernels)


# ---- beyond 2^31 values, without the memory ----

FAR = 2**31 + 4097


#: Blocks of `sparse_int8` begin where others end.
@pytest.mark.parametrize("codec", [codec for codec in gradckpt.codecs.names() if codec != "sparse_int8"])
@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
def test_last_values_of_a_tensor_beyond_2_31(host_kernels, codec, dtype):
    """Only the last units are worked on, by the kernels for large tensors: they come back, the same
    on each instruction set, and no other byte of tensor or payload changes."""
    layout = Layout(0, dtype)
    tail = FAR % 4096 + 4096  # the last block, which is not full, and the one before
    values = np.random.default_rng(3).standard_normal(tail).astype(np.float32)
    bits = (values > 0).astype(np.uint8) if dtype == "bool" else oracle.to_bits(values, dtype)
    begin, noise = (FAR - tail) * layout.item, Dither(5, 6, 7) if codec in LOSSY else None
    payloads = []
    for isa in host_kernels.choose("scalar").isas:
        x = Sparse(FAR * layout.item)
        view = Tensor(x.address, FAR, 0, None, None, None, NUMBERS[dtype], -1, None)
        payload = Sparse(host_kernels.choose(isa).nbytes(codec, view))
        first = host_kernels.units(codec, FAR - tail)
        x.bytes[begin:] = bits.view(np.uint8)
        assert host_kernels.encode(codec, view, payload.bytes, noise, first) == 0
        x.bytes[begin:] = 0
        host_kernels.decode(codec, payload.bytes, view, first)
        restored = x.bytes[begin:].view(bits.dtype)
        if dtype == "bool":
            np.testing.assert_array_equal(restored, bits)
        else:
            error = oracle.to_float(restored, dtype) - oracle.to_float(bits, dtype)
            assert np.linalg.norm(error) <= (0.26 if noise else 0.13) * np.linalg.norm(values)
        codes, side = LAYOUT.get(codec, (0, 0))
        groups, first = -(-FAR // 128), (FAR - tail) // 128
        parts = [(first * codes, groups * codes), (groups * codes + first * side, payload.bytes.size)]
        payloads.append([payload.bytes[low:high].tobytes() for low, high in (parts if codes else [(-tail, None)])])
        assert payloads[-1] == payloads[0], isa
        for far in (0, 2**31 - 8192, 2**31 - 65536):  # where an index of 32 bits would have gone
            assert not x.bytes[far * layout.item : (far + 4096) * layout.item].any()
            assert not payload.bytes[: 2**20].any()


# ---- wrong bytes ----


@pytest.mark.parametrize("codec", gradckpt.codecs.names())
def test_any_bytes_decode(codec):
    """A payload of random bytes decodes to undefined values, the same on each instruction set, and
    no other memory is touched (test_soak.py repeats this under ASan)."""
    rng = np.random.default_rng(4)
    for dtype in gradckpt.codecs.info(codec)["dtypes"]:
        for n in (1, 127, 128, 1000, 4096, 9001):
            kind = getattr(torch, dtype)
            nbytes = torch.ops.gradckpt.encode(torch.zeros(n, dtype=kind), codec).numel()
            for fill in (None, 0xFF, 0x7F, 0x80):
                data = rng.integers(0, 256, nbytes, np.uint8) if fill is None else np.full(nbytes, fill, np.uint8)
                restored = []
                for isa in ISAS:
                    with forced(isa):
                        restored.append(torch.ops.gradckpt.decode(torch.from_numpy(data), codec, [n], kind))
                    assert torch.equal(restored[-1].view(torch.uint8), restored[0].view(torch.uint8)), isa


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
