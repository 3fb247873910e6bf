"""The device kernels, run on the CPU (tests/native), against the scalar reference.

Both are built here from the sources and compared byte by byte: payloads, decoded
values, and the bytes around them.  The kernels are built twice: as the oldest
architecture runs them and with models of the instructions that newer ones have."""

import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from codec_inputs import Sparse, huge_groups, uneven_rows, unusual
from codec_kernels import (
    CODECS,
    DTYPES,
    FORMATS,
    GROUP,
    NATIVE,
    SANITIZERS,
    Case,
    aligned_bytes,
    build_kernels,
    build_reference,
    check_case,
    check_syntax,
    check_together,
    decode_many,
    encode_many,
    expected,
    launches,
    nbytes_of,
    view,
)
from codec_libraries import Dither
from processes import case

E_DTYPE, E_DEVICE, E_DRIVER = -1, -2, -3
MOST_JOBS = 32  # of launch.cuh


@pytest.fixture(scope="module", params=[750, 900])
def kernels(request, tmp_path_factory):
    return build_kernels(tmp_path_factory.mktemp("emulation"), request.param)


@pytest.fixture(scope="module")
def ampere(tmp_path_factory):
    """sm_80 and sm_86: loads of 16 bytes as later ones have them, and FP8 without instructions."""
    return build_kernels(tmp_path_factory.mktemp("ampere"), 800, ["fp8"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return build_reference(tmp_path_factory.mktemp("reference"))


# ---- values ----


def to_bits(values, dtype):
    """float32 values as bits of `dtype`; bfloat16 by truncation, which serves as well."""
    values = np.asarray(values, np.float32)
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16)


def specials(dtype):
    """NaN, +-Inf, +-MAX, and values between 1e30 and MAX, of which a group has room for three."""
    largest = {"float32": 0x7F7FFFFF, "float16": 0x7BFF, "bfloat16": 0x7F7F}[dtype]
    _, word = DTYPES[dtype]
    sign = 1 << (8 * np.dtype(word).itemsize - 1)
    maxima = np.array([largest, largest | sign], word)
    with np.errstate(over="ignore"):
        others = to_bits([np.nan, np.inf, -np.inf, 1e31, -1e31, 2e31, 7e35, 65504, -65504], dtype)
    return np.concatenate([maxima, others])


def gaussian(dtype, n, magnitude, special=0.0, seed=0):
    """Bits of n values: every fifth group zero, a share `special` of them special."""
    rng = np.random.default_rng([seed, n])
    with np.errstate(under="ignore"):
        bits = to_bits(rng.standard_normal(n, np.float32) * np.float32(magnitude), dtype).copy()
    zero = np.arange(n) // GROUP % 5 == 3
    bits[zero] = to_bits(np.where(rng.random(n) < 0.5, 0.0, -0.0), dtype)[zero]
    chosen = rng.random(n) < special
    bits[chosen] = rng.choice(specials(dtype), int(chosen.sum()))
    return bits


def outliers(dtype, groups=240, seed=0):
    """Groups with one value 2 to 10^6 times the others, at every place; some with a second,
    some with nothing else."""
    rng = np.random.default_rng([4, seed])
    values = rng.standard_normal((groups, GROUP)).astype(np.float32)
    values[::7] = np.float32(1e-3)  # constant but for the outlier
    values[5::11] = 0.0
    sizes = np.geomspace(2, 1e6 if dtype != "float16" else 6e4, groups) * rng.choice([-1, 1], groups)
    at = (np.arange(groups) * 37 + seed) % GROUP
    values[np.arange(groups), at] = sizes
    values[np.arange(2, groups, 9), (at[2::9] + 64) % GROUP] = sizes[2::9] / 3
    values[np.arange(4, groups, 13), (at[4::13] + 1) % GROUP] = sizes[4::13]  # twice the same
    return to_bits((values * np.float32(1.0 if dtype == "float16" else 0.37)).ravel(), dtype)


def patterns(dtype):
    """Every 16-bit pattern, neighbours together and then mixed; float32:
    every binade three ways."""
    if dtype != "float32":
        every = np.arange(65536, dtype=np.uint32)
        return np.concatenate([every, every * 40503 % 65536]).astype(np.uint16)
    rng = np.random.default_rng(1)
    top = np.repeat(np.arange(256, dtype=np.uint32), 3 * GROUP)
    drop = np.tile(np.repeat([1, 12, 256], GROUP), 256)  # how far below the top binade
    exponent = np.maximum(top.astype(np.int64) - rng.integers(0, drop), 0).astype(np.uint32)
    sign, mantissa = rng.integers(0, 2, top.size, np.uint32), rng.integers(0, 1 << 23, top.size, np.uint32)
    return sign << 31 | exponent << 23 | mantissa


every_codec = pytest.mark.parametrize("codec", CODECS)
every_format = pytest.mark.parametrize("codec", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


# ---- parity ----


@every_codec
@every_dtype
def test_every_pattern(kernels, reference, codec, dtype):
    check_case(kernels, reference, codec, dtype, patterns(dtype))


@every_codec
@every_dtype
def test_magnitudes_and_specials(kernels, reference, codec, dtype):
    for seed, magnitude in enumerate([1.0, 3e-6, 3e4, 1e-20, 1e-30, 1e-42, 1e20, 3e28]):
        for special in (0.0, 0.002, 0.03):
            check_case(kernels, reference, codec, dtype, gaussian(dtype, 2000, magnitude, special, seed))


@pytest.mark.parametrize("codec", ["fp8_e4m3", "fp8_e5m2"])
@every_dtype
def test_ampere(ampere, reference, codec, dtype):
    check_case(ampere, reference, codec, dtype, patterns(dtype))
    for special in (0.0, 0.03):
        check_case(ampere, reference, codec, dtype, gaussian(dtype, 2000, 1.0, special), 1)


@pytest.mark.parametrize("arch", [750, 800, 890, 1200])
def test_every_kernel_is_cxx_for(arch):
    """Instructions are in ptx.cuh only, of which there are models."""
    check_syntax(arch)


@every_format
@every_dtype
def test_huge_values(kernels, reference, codec, dtype):
    """Several values beyond 1e30 in a group, finite and not."""
    check_case(kernels, reference, codec, dtype, huge_groups(dtype, (1, 2, 3, 4, 6, 40, 128)))


@every_format
@every_dtype
def test_outliers(kernels, reference, codec, dtype):
    check_case(kernels, reference, codec, dtype, outliers(dtype))


@every_format
@every_dtype
def test_groups_that_are_not_ordinary(kernels, reference, codec, dtype):
    """Of every form; the last group is not full."""
    bits = unusual(dtype, groups=300)
    for dither in (None, Dither(5, 6, 1)):
        with case(dither):
            check_case(kernels, reference, codec, dtype, bits[:-37], dither=dither)
            check_case(kernels, reference, codec, dtype, bits[:2000], 1, *LAYOUTS["permuted"], dither=dither)


@every_format
@every_dtype
def test_alone_and_constant(kernels, reference, codec, dtype):
    """One value and zeros, and 128 equal ones: of every binade."""
    with np.errstate(over="ignore", under="ignore"):
        sizes = np.float32(1.37) * np.float32(2.0) ** np.arange(-149, 100).astype(np.float32)
    alone = np.zeros((sizes.size, GROUP), np.float32)
    alone[np.arange(sizes.size), np.arange(sizes.size) * 11 % GROUP] = sizes
    equal = np.repeat(-sizes[:, None], GROUP, axis=1)
    check_case(kernels, reference, codec, dtype, to_bits(np.concatenate([alone, equal]).ravel(), dtype))


@every_codec
@every_dtype
def test_at_the_limit(kernels, reference, codec, dtype):
    """amax is the largest value that does not escape:
    decoding must not round it up into an escape."""
    limit = {"float32": np.float32(1e30), "float16": 65472.0, "bfloat16": float.fromhex("0x1.92p99")}[dtype]
    values = np.random.default_rng(2).standard_normal(4 * GROUP, np.float32) * np.float32(limit)
    check_case(kernels, reference, codec, dtype, to_bits(np.clip(values, -limit, limit), dtype))


@pytest.mark.parametrize("codec", ["int8", "int6", "int4"])
def test_order_of_the_rotation(kernels, reference, codec):
    """Rotated values a rounding error away from ties:
    another order of the additions gives other codes."""
    words = np.array([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], np.uint32)
    signs = 1.0 - 2.0 * ((words[:, None] >> np.arange(32, dtype=np.uint32)) & 1).reshape(GROUP)
    hadamard = np.ones((1, 1))
    while len(hadamard) < GROUP:
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    y = np.random.default_rng(3).integers(-120, 120, (40, GROUP)) + 0.5
    y[:, 0] = 127 - 1e-4  # the step becomes 1
    x = signs * (y @ hadamard) / GROUP
    check_case(kernels, reference, codec, "float32", to_bits(x.ravel(), "float32"))


@every_codec
@every_dtype
def test_tails_and_alignment(kernels, reference, codec, dtype):
    for n, misaligned in itertools.product([0, 1, 16, 127, 128, 129, 1000, 8193], [0, 1, 4]):
        with case(n, misaligned):
            check_case(kernels, reference, codec, dtype, gaussian(dtype, n, 1.0, 0.001), misaligned)


LAYOUTS = {
    "transposed": ((40, 50), (1, 40)),
    "every third": ((2000,), (3,)),
    "padded rows": ((4, 5, 100), (700, 140, 1)),
    "permuted": ((8, 25, 10), (1, 88, 8)),
    "nearly dense": ((1, 2000, 1), (9, 1, 7)),
    "8 dimensions": ((2, 2, 2, 2, 2, 2, 2, 15), (1, 2, 4, 8, 16, 32, 64, 128)),
}


@every_codec
@every_dtype
def test_strided(kernels, reference, codec, dtype):
    for layout, (sizes, strides) in LAYOUTS.items():
        n = int(np.prod(sizes))
        for bits in (gaussian(dtype, n, 1.0), gaussian(dtype, n, 1.0, 0.01), outliers(dtype)[:n]):
            with case(layout):
                check_case(kernels, reference, codec, dtype, bits, 1, sizes, strides)


@every_format
@every_dtype
def test_rows(kernels, reference, codec, dtype):
    """Shares of rows that end within a group: their bytes and values, contiguous and padded."""
    for width in (64, 65, 100, 127, 200):
        bits = uneven_rows(dtype, 24, width, width)  # each kind twice
        with case(width):
            check_case(kernels, reference, codec, dtype, bits, 1, (24, width))
            check_case(kernels, reference, codec, dtype, bits, 0, (24, width), (width + 3, 1))
    check_case(kernels, reference, codec, dtype, bits, 1, (24, width), dither=Dither(5, 7, 3))


@every_format
@every_dtype
def test_stochastic_rounding(kernels, reference, codec, dtype):
    dither = Dither(0x123456789ABCDEF0, 7, 3)
    third = patterns(dtype).reshape(-1, GROUP)[::3].ravel()  # without noise all are compared
    for bits in (third, gaussian(dtype, 3001, 1.0, 0.002), gaussian(dtype, 2000, 1e-30), outliers(dtype, 60)):
        check_case(kernels, reference, codec, dtype, bits, dither=dither)
    check_case(
        kernels, reference, codec, dtype, gaussian(dtype, 2000, 1.0, 0.01), 1, *LAYOUTS["permuted"], dither=dither
    )


# ---- several tensors ----


@every_codec
@every_dtype
def test_contiguous_tensors_share_a_launch(kernels, reference, codec, dtype):
    sizes = [1, 4096, 4097, 128 * 32 * 3, 100, 8191, 2]
    cases = [Case(reference, codec, dtype, gaussian(dtype, n, 1.0, 0.001, k)) for k, n in enumerate(sizes)]
    cases.append(Case(reference, codec, dtype, outliers(dtype), 1))
    assert check_together(kernels, codec, cases) == 2


@every_codec
def test_more_tensors_than_a_launch_takes(kernels, reference, codec):
    cases = [Case(reference, codec, "bfloat16", gaussian("bfloat16", 130 + k, 1.0, 0, k)) for k in range(MOST_JOBS + 3)]
    assert check_together(kernels, codec, cases) == 4
    assert check_together(kernels, codec, cases[:MOST_JOBS]) == 2


@every_codec
def test_dtypes_and_strides_apart(kernels, reference, codec):
    """One launch for each dtype, or width where only that matters,
    and one for each strided tensor."""
    cases = [Case(reference, codec, d, gaussian(d, 777, 1.0, 0.001, k), k % 3) for k, d in enumerate([*DTYPES] * 3)]
    cases += [Case(reference, codec, d, gaussian(d, 2000, 1.0), 0, *LAYOUTS["transposed"]) for d in DTYPES]
    assert check_together(kernels, codec, cases) == 2 * ((2 if codec == "raw" else 3) + 3)


@every_format
def test_each_tensor_has_its_own_noise(kernels, reference, codec):
    bits = gaussian("bfloat16", 1000, 1.0)
    noises = [Dither(1, 2, 3), Dither(1, 2, 4), None, Dither(9, 2, 3), None]
    cases = [Case(reference, codec, "bfloat16", bits, dither=d) for d in noises]
    assert check_together(kernels, codec, cases) == 2 + 1
    assert len({case.payload.tobytes() for case in cases}) == 4


# ---- index arithmetic ----


@pytest.mark.skipif(bool(SANITIZERS), reason="sanitizers cannot shadow a sparse mapping")
@every_codec
@pytest.mark.parametrize("layout", ["contiguous", "second of two", "strided"])
def test_beyond_two_to_the_31(kernels, reference, codec, layout):
    """The last 33 groups of 2^31 + 4097 values and their noise:
    only the blocks that hold them run."""
    n, tail = 2**31 + 4097, 4097
    first = (n - tail) // GROUP
    bits = gaussian("bfloat16", tail, 1.0, 0.001)
    dither = Dither(5, 6, 7) if codec in FORMATS and layout != "strided" else None
    want, want_bits = expected(reference, codec, bits, "bfloat16", dither, first)
    strided = layout == "strided"
    sizes, strides = ([5, n // 5], [1, 6]) if strided else (None, None)
    assert n % 5 == 0
    step = 1 if not strided else None

    source = Sparse(n * 2 if not strided else n // 5 * 6 * 2)
    words = source.bytes.view(np.uint16)
    where = np.arange(n - tail, n)
    if strided:
        where = where // (n // 5) + where % (n // 5) * 6
    words[where if step is None else slice(n - tail, n)] = bits
    payload, target = Sparse(nbytes_of(codec, n, "bfloat16") + 16), Sparse(source.bytes.size)
    x, out = (view(s.bytes, 0, n, "bfloat16", sizes, strides) for s in (source, target))
    per_block = GROUP * 32 if codec in FORMATS else 256 if strided else 256 * 32
    blocks = -(-n // per_block)

    small = Case(reference, codec, "bfloat16", gaussian("bfloat16", 2 * GROUP, 1.0), dither=dither)
    before_it = layout == "second of two"
    start = -(-2 * GROUP // per_block) if before_it else 0
    window = (ctypes.c_uint.in_dll(kernels, f"emulated_{end}_block") for end in ("first", "last"))
    low, high = window
    low.value, high.value = start + (n - tail) // per_block, start + blocks - 1
    try:
        others, small_payload = ([small.view(small.source)], [small.payload]) if before_it else ([], [])
        assert encode_many(kernels, codec, [*others, x], [*small_payload, payload.bytes],
                           [dither] * (1 + before_it) if dither else None) == 0  # fmt: skip
        outs = [small.view(small.target)] if before_it else []
        assert decode_many(kernels, codec, [*small_payload, payload.bytes], [*outs, out]) == 0
    finally:
        low.value, high.value = 0, 0xFFFFFFFF

    if codec in FORMATS:
        _, codes, side = FORMATS[codec]
        groups, last = -(-n // GROUP), -(-tail // GROUP)
        np.testing.assert_array_equal(payload.bytes[first * codes : groups * codes], want[: last * codes])
        at = groups * codes + first * side
        np.testing.assert_array_equal(payload.bytes[at : at + last * side], want[last * codes :])
    else:
        np.testing.assert_array_equal(payload.bytes[2 * (n - tail) : 2 * n], want)
    np.testing.assert_array_equal(target.bytes.view(np.uint16)[where], want_bits)


# ---- refusals ----


@every_codec
def test_refusals(kernels, codec):
    buffer = aligned_bytes(8192)
    before = launches(kernels)
    nine = view(buffer, 0, 512, "float32", [2] * 9, [1 << d for d in range(9)])
    unknown = view(buffer, 0, 512, "float32")
    unknown.dtype = 3
    absent = view(buffer, 0, 512, "float32")
    absent.device = 7
    for x, status in ((nine, E_DEVICE), (unknown, E_DTYPE), (absent, 101)):
        assert encode_many(kernels, codec, [x], [buffer]) == status
        assert decode_many(kernels, codec, [buffer], [x]) == status
    assert launches(kernels) == before


def test_device_is_put_back(kernels, reference):
    current = ctypes.c_int.in_dll(kernels, "emulated_device")
    current.value = 0
    check_case(kernels, reference, "int8", "bfloat16", gaussian("bfloat16", 300, 1.0))
    assert current.value == 0
    assert ctypes.c_int.in_dll(kernels, "emulated_launch_device").value == 1


DRIVERS = {  # {(runtime, driver): status}
    (13000, 0): E_DRIVER,
    (13000, 12090): E_DRIVER,
    **{(13000, driver): 0 for driver in (13000, 13020, 14000)},
    **{(12090, driver): 0 for driver in (12000, 12030, 12060, 13000)},
    (12090, 11080): E_DRIVER,
}


def test_driver_check(tmp_path):
    kernels = build_kernels(tmp_path, 750, ["driver"])
    for (built_with, driver), status in DRIVERS.items():
        ctypes.c_int.in_dll(kernels, "emulated_driver").value = driver
        ctypes.c_int.in_dll(kernels, "emulated_runtime").value = built_with
        seen, runtime = ctypes.c_int(-1), ctypes.c_int(-1)
        assert kernels.gck_cuda_check(ctypes.byref(seen), ctypes.byref(runtime)) == status, (built_with, driver)
        assert (seen.value, runtime.value) == (driver, built_with)


def test_failing_driver_check_is_not_left_for_the_next_launch(tmp_path):
    kernels = build_kernels(tmp_path, 750, ["driver"])
    ctypes.c_int.in_dll(kernels, "emulated_sticky_error").value = 3  # cudaErrorInitializationError
    assert kernels.gck_cuda_check(ctypes.byref(ctypes.c_int()), ctypes.byref(ctypes.c_int())) == 3
    ctypes.c_int.in_dll(kernels, "emulated_sticky_error").value = 0
    assert kernels.gck_cuda_check(ctypes.byref(ctypes.c_int()), ctypes.byref(ctypes.c_int())) == 0
    assert ctypes.c_int.in_dll(kernels, "emulated_last_error").value == 0


# ---- sanitizers ----


@pytest.mark.skipif(bool(SANITIZERS), reason="this is the run under sanitizers")
@pytest.mark.soak
@pytest.mark.timeout(2000)
def test_under_sanitizers():
    """The same kernels over exact blocks of memory with AddressSanitizer and UBSan:
    this file once more."""
    gxx = shutil.which("g++")
    if gxx is None:
        pytest.skip("g++ not found: the CUDA emulation is C++")
    found = subprocess.run([gxx, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip("libasan not found")
    env = os.environ | {
        "GRADCKPT_TEST_SANITIZERS": "address,undefined",
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    chosen = "(specials or outliers or tails or strided or share_a_launch or stochastic) and not raw and 750"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen, __file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "passed" in done.stdout


# ---- the emulation itself ----

MISTAKES = {
    "a lane has returned": ("if (threadIdx.x == 5) return; __shfl_xor_sync(0xFFFFFFFFu, 1, 1);", "does not come"),
    "a lane waits elsewhere": (
        "if (threadIdx.x == 5) __syncwarp(); else __shfl_xor_sync(0xFFFFFFFFu, 1, 1);",
        "does not come",
    ),
    "two shuffles": ("__shfl_xor_sync(0xFFFFFFFFu, 1, threadIdx.x < 8 ? 1 : 2);", "does not come"),
    "not in its mask": ("__ballot_sync(0xFFFFFFFEu, 1);", "not in its own mask"),
    "reads outside the mask": ("if (threadIdx.x < 8) __shfl_xor_sync(0xFFu, 1, 16);", "not in the mask"),
    "reads a lane outside the mask": ("if (threadIdx.x < 8) __shfl_sync(0xFFu, 1, 9);", "not in the mask"),
    "a lane misses the barrier": ("if (threadIdx.x != 5) __syncthreads();", "does not come"),
    "a lane votes instead": (
        "if (threadIdx.x != 5) __syncthreads(); else __ballot_sync(0xFFFFFFFFu, 1);",
        "does not come",
    ),
    "none at a barrier": (
        "__shared__ int s; if (threadIdx.x == 31) s = 7; if (!__syncthreads_or(threadIdx.x == 3) || s != 7) abort();",
        "",
    ),
    "none": ("if (threadIdx.x < 8 && __shfl_xor_sync(0xFFu, threadIdx.x, 4) != (threadIdx.x ^ 4u)) abort();", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_emulation_reports(tmp_path, mistake):
    """Lanes that do not meet end the program with a message;
    on hardware they would hang or read undefined values."""
    gxx = shutil.which("g++")
    if gxx is None:
        pytest.skip("g++ not found: the CUDA emulation is C++")
    body, message = MISTAKES[mistake]
    (tmp_path / "mistake.cu").write_text(
        f"static __global__ void k(void) {{ {body} }} int main(void) {{ GCK_START(k, 1, 32, (cudaStream_t)0); }}"
    )
    subprocess.run([gxx, "-x", "c++", "-std=c++17", "-include", NATIVE / "cuda_emulation.h",
                    tmp_path / "mistake.cu", "-o", tmp_path / "mistake"], check=True)  # fmt: skip
    done = subprocess.run([tmp_path / "mistake"], capture_output=True, text=True, timeout=60)
    assert message in done.stderr
    assert done.returncode == (-signal.SIGABRT if message else 0)
