"""gradckpt.codecs.encode and torch.ops.gradckpt on tensors: strides, threads, flags,
operators, errors."""

import ctypes
import platform
import re
import subprocess

import codec_inputs
import codec_oracle as oracle
import numpy as np
import pytest
import torch
from checkout import CSRC
from codec_inputs import DTYPES, bits_of, tensor
from codec_kernels import assert_same, check_bytes
from codec_libraries import ISAS, forced, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import case

import gradckpt

CODECS = gradckpt.codecs.names()
REFUSING = [c for c in CODECS if gradckpt.codecs.info(c)["may_overflow"]]
PAIRS = [(c, d) for c in CODECS for d in DTYPES if d in gradckpt.codecs.info(c)["dtypes"]]
HALF = {"fp16": "float16", "bf16": "bfloat16"}  # whose range the payload has
every_codec = pytest.mark.parametrize("codec", CODECS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def base(dtype, n=20000, seed=0):
    return tensor(codec_inputs.gaussian(dtype, n, seed=seed), dtype)


def hostile(codec, dtype, seed=0):
    """Hostile values, unless the codec may refuse them."""
    return codec_inputs.gaussian(dtype, 5120, seed=seed) if codec in REFUSING else codec_inputs.hostile(dtype, seed)


# ---- strides ----

LAYOUTS = {
    "transposed": (lambda b: b[:4200].view(60, 70).t(), (1, 70)),
    "channels_last": (lambda b: b[:4320].view(2, 15, 12, 12).to(memory_format=torch.channels_last), (2160, 1, 180, 15)),
    "permuted": (lambda b: b[:4320].view(6, 8, 90).permute(2, 0, 1), (1, 720, 90)),
    "expanded": (lambda b: b[:130].view(130, 1).expand(130, 40), (40, 1)),
    "expanded scalar": (lambda b: b[3].expand(7, 50), (50, 1)),
    "step": (lambda b: b[5:9005:3], (1,)),
    "step in rows": (lambda b: b[:9000].view(30, 300)[::2, 10:250:7], (35, 1)),
    "narrow": (lambda b: b[:9000].view(30, 300)[:, 50:200], (150, 1)),
    "as_strided": (lambda b: b.as_strided((5, 6, 70), (700, 90, 1), 123), (420, 70, 1)),
    "overlapping": (lambda b: b.as_strided((100, 40), (3, 1), 11), (40, 1)),
    "offset": (lambda b: b[1:3001], (1,)),
    "0-dim": (lambda b: b[17], ()),
    "empty": (lambda b: b[:0].view(0, 5), (5, 1)),
    "ones": (lambda b: b.as_strided((1, 1000, 1), (9, 1, 7)), None),
    "12 dimensions": (lambda b: b[: 2**12].view([2] * 12).permute(*range(11, -1, -1)), tuple(2**d for d in range(12))),
}


@every_codec
@every_dtype
def test_layouts(codec, dtype):
    """Bytes: those of the contiguous tensor. Strides of the result: kept when dense,
    else contiguous."""
    for layout, (make, strides) in LAYOUTS.items():
        x = make(base(dtype))
        with case(layout):
            restored = check_bytes(codec, x).decode()
            assert (restored.shape, restored.dtype) == (x.shape, x.dtype)
            assert strides is None or restored.stride() == strides


@st.composite
def views(draw):
    """A strided view inside 4,000 values: dimensions permuted, with gaps, steps and an offset."""
    ndim = draw(st.integers(0, 5))
    sizes = draw(st.lists(st.integers(1, 9), min_size=ndim, max_size=ndim))
    order = draw(st.permutations(range(ndim)))
    strides, reach = [0] * ndim, 1
    for d in order:
        strides[d] = 0 if draw(st.integers(0, 9)) == 0 else reach + draw(st.integers(0, 2))
        reach = max(reach, strides[d] * sizes[d])
    return sizes, strides, draw(st.integers(0, 50))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(views(), st.sampled_from(PAIRS), st.integers(-20, 20), st.integers(0, 999))
def test_any_view(view, pair, exponent, seed):
    codec, dtype = pair
    sizes, strides, offset = view
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    magnitude = 2.0 ** (exponent // 3 if "float16" in (dtype, HALF.get(codec)) else exponent)
    storage = tensor(codec_inputs.gaussian(dtype, extent, magnitude, seed), dtype)
    x = storage.as_strided(sizes, strides, offset)
    payload = gradckpt.codecs.encode(x, codec)
    assert torch.equal(whole(payload), whole(gradckpt.codecs.encode(x.contiguous(), codec)))
    restored = payload.decode()
    assert restored.shape == x.shape
    flat, groups = x.double().flatten(), -(-x.numel() // 128)
    error = (flat - restored.double().flatten()).abs()
    amax = torch.nn.functional.pad(flat.abs(), (0, groups * 128 - flat.numel())).view(-1, 128).amax(1)
    unit = torch.finfo(x.dtype).eps
    assert (
        error
        <= (gradckpt.codecs.info(codec)["max_error"] * (1 + unit) + unit) * amax.repeat_interleave(128)[: flat.numel()]
        + torch.finfo(getattr(torch, HALF.get(codec, dtype))).smallest_normal * unit
        + (2.0**-25 if codec == "fp16" else 0.0)
    ).all()


# ---- surroundings ----


@every_codec
@every_dtype
def test_input_is_not_written(codec, dtype):
    storage = tensor(hostile(codec, dtype), dtype)
    before = bits_of(storage).tobytes()
    for x in (storage, storage[1:], storage[:5000].view(50, 100).t()):
        version = x._version
        gradckpt.codecs.encode(x, codec)
        torch.ops.gradckpt.encode(x, codec)
        assert x._version == version
    assert bits_of(storage).tobytes() == before


@pytest.fixture
def flushing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


@every_codec
@every_dtype
def test_flush_denormal(codec, dtype, flushing):
    bits = np.concatenate([codec_inputs.gaussian(dtype, 128 * 300, m) for m in (1.0, 3e-8, 1e-39, 1e-44)])
    bits = bits[bits != 0] if codec == "lossless" else bits  # of many zeros it has another form
    torch.set_flush_denormal(False)
    want = oracle.encode(codec, bits, dtype)
    restored = oracle.decode(codec, want, bits.size, dtype)
    x = tensor(bits, dtype)
    torch.set_flush_denormal(True)
    for isa in ISAS:
        with forced(isa):
            payload = gradckpt.codecs.encode(x, codec)
            assert_same(whole(payload).numpy(), want, isa)
            assert_same(bits_of(payload.decode()), restored, isa)
    assert (torch.tensor([1e-39]) * 1.0).item() == 0.0, "the caller's flag was not put back"


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@every_codec
@every_dtype
def test_threads(codec, dtype, threads):
    flat = tensor(np.concatenate([hostile(codec, dtype, s) for s in range(60)])[:-77], dtype)
    for x in (flat, flat[:300000].view(500, 600).t()):
        results = []
        for n in (1, 2, 3):
            threads(n)
            payload = gradckpt.codecs.encode(x, codec)
            results.append((whole(payload).numpy().tobytes(), bits_of(payload.decode()).tobytes()))
        assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(("codec", "dtype"), [(c, d) for c in CODECS for d in gradckpt.codecs.info(c)["dtypes"]])
def test_large_tensors_stream(codec, dtype):
    """Above the sizes where stores go past the cache and batches take turns, against the portable
    kernels, which stream nothing. A prime number of groups repeats: a batch at another's place
    shows, and so does noise of another place."""
    tile = codec_inputs.gaussian("float32" if dtype == "bool" else dtype, 128 * 509, seed=3)
    tile = (tile >> 31).astype(np.uint8).view(bool) if dtype == "bool" else tile
    x = np.tile(tile, (34 << 20) // tile.nbytes + 1)  # over 32 MiB of values, and 2 Mi of them
    x = torch.from_numpy(x) if dtype == "bool" else tensor(x, dtype)
    for key in (None, (5, 6, 7)) if gradckpt.codecs.info(codec)["stochastic"] and dtype == "bfloat16" else (None,):
        with forced("scalar"):
            want = gradckpt.codecs.encode(x, codec, dither=key)
            restored = want.decode()
        for isa in ISAS[1:]:
            with forced(isa), case(isa, key):
                payload = gradckpt.codecs.encode(x, codec, dither=key)
                assert torch.equal(whole(payload), whole(want))
                assert torch.equal(payload.decode().view(torch.uint8), restored.view(torch.uint8))


# ---- operators ----


def several(codec):
    """Tensors of every dtype the codec takes, and of every kind of shape."""
    return [
        x
        for d in gradckpt.codecs.info(codec)["dtypes"]
        for b in [base(d, 40000) if d != "bool" else torch.arange(40000) % 3 == 1]
        for x in (b[:1000], b[:6000].view(60, 100).t(), b[:0], b[4], b)
    ]


@every_codec
def test_operators(codec):
    xs = several(codec)
    payloads = torch.ops.gradckpt.encode_many(xs, codec)
    outs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in xs]
    versions = [out._version for out in outs]
    assert torch.ops.gradckpt.decode_many(payloads, codec, outs) is None
    assert len(payloads) == len(xs) >= 5
    for x, payload, out, version in zip(xs, payloads, outs, versions, strict=True):
        data = torch.ops.gradckpt.encode(x, codec)
        assert torch.equal(payload, data)
        assert torch.equal(data, whole(gradckpt.codecs.encode(x, codec)))
        restored = torch.ops.gradckpt.decode(data, codec, list(x.shape), x.dtype)
        assert restored.is_contiguous()
        assert torch.equal(out, restored)
        assert out._version == version + 1
    assert torch.ops.gradckpt.encode_many(xs[:1], codec)[0].equal(payloads[0])


@every_codec
def test_opcheck(codec):
    def check(operator, *args):
        torch.library.opcheck(operator.default, args, test_utils=("test_schema", "test_faketensor"))

    ops, xs = torch.ops.gradckpt, several(codec)
    for x in (*xs, *(x.view(-1, 1, 4) for x in xs[:1])):
        check(ops.encode, x, codec)
        check(ops.decode, ops.encode(x, codec), codec, list(x.shape), x.dtype)
    check(ops.encode_many, xs, codec)
    check(ops.decode_many, ops.encode_many(xs, codec), codec, [torch.empty_like(x) for x in xs])


def test_operators_on_several_tensors_keep_no_memory():
    """Handles that stay behind would hold the storages: of inputs, of payloads, of outputs,
    also after an error."""
    xs = [torch.randn(300) for _ in range(3)]
    payloads = torch.ops.gradckpt.encode_many(xs, "int8")
    torch.ops.gradckpt.decode_many(payloads, "int8", xs)
    for wrong in ("zip", "mask"):
        with pytest.raises(RuntimeError, match=wrong):
            torch.ops.gradckpt.encode_many(xs, wrong)
        with pytest.raises(RuntimeError, match=wrong):
            torch.ops.gradckpt.decode_many(payloads, wrong, xs)
    with pytest.raises(RuntimeError, match="as many"):
        torch.ops.gradckpt.decode_many(payloads[:2], "int8", xs)
    storages = [t.untyped_storage() for t in (*xs, *payloads)]
    del xs, payloads
    assert [torch._C._storage_Use_Count(storage._cdata) for storage in storages] == [1] * 6


def many_dimensions():
    """More than any code has room for, and with strides."""
    return torch.zeros(2, 3).view(2, *98 * [1], 3).transpose(0, -1)


X = torch.randn(300)
DATA = torch.ops.gradckpt.encode(X, "int8")
ERRORS = [
    ("encode", (X, "zip"), "unknown codec 'zip'"),
    ("decode", (DATA, "zip", [300], torch.float32), "unknown codec 'zip'"),
    ("encode_many", ([X], "zip"), "unknown codec 'zip'"),
    ("decode_many", ([DATA], "zip", [X]), "unknown codec 'zip'"),
    ("encode", (X.double(), "int8"), "float32, float16, bfloat16 and bool"),
    ("encode_many", ([X, X.double()], "int8"), "float32, float16, bfloat16 and bool"),
    ("encode", (many_dimensions(), "int8"), "codecs take tensors of at most 64 dimensions"),
    ("decode", (DATA[:-1], "int8", [300], torch.float32), "has [0-9]+ bytes, not 389"),
    *(("decode", (DATA, "int8", [n], torch.float32), "has [0-9]+ bytes, not 390") for n in (400, 3, 0)),
    ("decode_many", ([DATA, DATA[:-1]], "int8", [X, X.clone()]), "has [0-9]+ bytes, not 389"),
    ("decode_many", ([DATA, DATA], "int8", [X]), r"as many payloads \(2\) as tensors to write \(1\)"),
    ("decode", (DATA.int(), "int8", [300], torch.float32), "contiguous uint8"),
    ("decode", (DATA.repeat(2)[::2], "int8", [300], torch.float32), "contiguous uint8"),
    ("decode_many", ([DATA.int()], "int8", [X]), "contiguous uint8"),
    ("decode", (DATA, "int8", [300], torch.float64), "float32, float16, bfloat16 or bool"),
    ("decode_many", ([DATA], "int8", [X.double()]), "float32, float16, bfloat16 or bool"),
    ("encode_many", ([X, torch.full((5000,), 3.4e38)], "fp16"), "'fp16': it cannot hold these values"),
]


@pytest.mark.parametrize(("operator", "args", "says"), ERRORS, ids=range(len(ERRORS)))
def test_errors_of_operators(operator, args, says):
    with pytest.raises(RuntimeError, match=says):
        getattr(torch.ops.gradckpt, operator)(*args)


def test_profiler_sees_the_operators():
    x = torch.randn(1000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        data = torch.ops.gradckpt.encode(x, "int8")
        torch.ops.gradckpt.decode(data, "int8", [1000], torch.float32)
    assert {"gradckpt::encode", "gradckpt::decode"} <= {event.key for event in profile.key_averages()}


# ---- errors ----


class Subclass(torch.Tensor):
    pass


def fake():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        return torch.zeros(300)


REFUSED = [
    (lambda: torch.zeros(300, dtype=torch.int32), r"torch\.int32"),
    (lambda: torch.zeros(300, dtype=torch.int8), r"torch\.int8"),
    (lambda: torch.zeros(300, dtype=torch.float64), r"torch\.float64"),
    (lambda: torch.zeros(300, dtype=torch.complex64), r"torch\.complex64"),
    (lambda: torch.zeros(300).to_sparse(), "not a plain strided tensor"),
    (lambda: torch.zeros(300, device="meta"), "not a plain strided tensor"),
    (lambda: many_dimensions(), "not a plain strided tensor"),
    (lambda: torch.zeros(300).as_subclass(Subclass), "tensor subclass"),
    (fake, "tensor subclass"),
    (lambda: [1.0], "takes a tensor, not <class 'list'>"),
    (lambda: None, "takes a tensor, not <class 'NoneType'>"),
]


@every_codec
def test_refused(codec):
    others = {*DTYPES, "bool"} - {*gradckpt.codecs.info(codec)["dtypes"]}
    wrong = [(lambda d=d: torch.zeros(3, dtype=getattr(torch, d)), "takes plain strided .* tensors") for d in others]
    for make, says in (*REFUSED, *wrong):
        x = make()
        with case(says), pytest.raises(TypeError, match=says):
            gradckpt.codecs.encode(x, codec)


def test_unknown_codec():
    for function in (lambda: gradckpt.codecs.encode(torch.zeros(3), "zip"), lambda: gradckpt.codecs.info("zip")):
        with pytest.raises(ValueError, match="unknown codec 'zip'") as caught:
            function()
        assert all(name in str(caught.value) for name in CODECS)
    with pytest.raises(TypeError, match="named by a string, not 3; to compress nothing pass compress=None"):
        gradckpt.codecs.encode(torch.zeros(3), 3)
    assert gradckpt.codecs.encode(torch.zeros(3), "fp8").codec == "fp8_e4m3"


@pytest.mark.parametrize(
    ("function", "arguments", "error"),
    [
        ("codec_info", ("zip",), "ValueError: gradckpt: unknown codec 'zip'"),
        ("codec_info", (3,), "ValueError: gradckpt: unknown codec 3"),
        ("codec_info", ("\ud800",), "UnicodeEncodeError: .*surrogates not allowed"),
        ("force_isa", ("sse9",), "ValueError: .*'sse9' is not known"),
        ("force_isa", (3,), "TypeError: bad argument type"),
        ("force_isa", ("\ud800",), "UnicodeEncodeError: .*surrogates not allowed"),
        ("set_rounding_state", (1,), r"TypeError: set_rounding_state\(\) takes exactly 2 arguments"),
        ("set_rounding_state", (1, "a"), "TypeError: .*integer"),
    ],
)
def test_what_the_extension_refuses(function, arguments, error):
    """The package asks it for nothing of the kind."""
    from gradckpt import _C

    before = _C.isa(), _C.rounding_state()
    with pytest.raises((TypeError, ValueError)) as caught:
        getattr(_C, function)(*arguments)
    assert re.match(error, f"{caught.type.__name__}: {caught.value}")
    assert (_C.isa(), _C.rounding_state()) == before


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere there is one instruction set")
def test_cpu_without_avx(tmp_path):
    """Instruction sets are known by name that this CPU cannot run."""
    (tmp_path / "old.c").write_text(
        """
        #define __builtin_cpu_supports(feature) 0
        #include "codec/host/cpu_features.c"
        const gck_kernels gck_kernels_portable = {"scalar"}, gck_kernels_avx2 = {"avx2"};
        const gck_kernels gck_kernels_avx512 = {"avx512"};
        """
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "old.so", f"-I{CSRC}", "old.c"], cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "old.so"))
    library.gck_isa_name.restype = ctypes.c_char_p
    assert [library.gck_isa_supported(name) for name in (b"scalar", b"avx2", b"avx512", b"mmx")] == [1, 0, 0, -1]
    assert [library.gck_isa_force(name) for name in (b"avx2", b"mmx", None)] == [-1, -1, 0]
    assert library.gck_isa_name() == b"scalar"


def test_parameters_and_graphs():
    """A parameter and a tensor inside a graph are plain tensors;
    what comes back is a leaf without grad."""
    parameter = torch.nn.Parameter(torch.randn(200))
    for x in (parameter, parameter * 2):
        restored = gradckpt.codecs.encode(x).decode()
        assert not restored.requires_grad
        assert restored.shape == x.shape
