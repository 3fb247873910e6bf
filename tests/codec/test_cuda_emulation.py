"""The device kernels of groups, run on the CPU (tests/native), against the portable ones.

Payloads, decoded values and the bytes around them are compared. The kernels are built twice: as the
oldest architecture runs them and with models of the instructions that newer ones have."""

import ctypes
import itertools
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from codec_inputs import DTYPES, Sparse, gaussian, hostile, huge_groups, uneven_rows, unusual
from codec_kernels import (
    E_DEVICE,
    E_DRIVER,
    E_DTYPE,
    GROUP,
    GROUPED,
    SANITIZERS,
    STRIDED,
    Case,
    DeviceKernels,
    Layout,
    aligned,
    check_syntax,
    check_together,
    gxx,
)
from codec_libraries import GROUP_CODECS, LAYOUT, NUMBERS, Dither, How, Tensor
from codec_oracle import LIMIT, row_of, to_bits
from processes import case

CODECS = (*GROUP_CODECS, "raw")
MOST_JOBS = 32  # of launch.cuh
NOISE = Dither(0x123456789ABCDEF0, 7, 3)


def kernels_for(folder, arch, names=(*GROUPED, "raw")):
    DeviceKernels.build(folder, arch, names)
    return DeviceKernels(folder)


@pytest.fixture(scope="module", params=[750, 900])
def kernels(request, tmp_path_factory):
    return kernels_for(tmp_path_factory.mktemp("emulation"), request.param)


@pytest.fixture(scope="module")
def ampere(tmp_path_factory):
    """sm_80 and sm_86: loads of 16 bytes as later ones have them, and FP8 without instructions."""
    return kernels_for(tmp_path_factory.mktemp("ampere"), 800, ["fp8"])


# ---- values ----


def alone_and_constant():
    """One value and zeros, and 128 equal ones: of every binade."""
    with np.errstate(over="ignore", under="ignore"):
        sizes = np.float32(1.37) * np.float32(2.0) ** np.arange(-149, 100).astype(np.float32)
    alone = np.zeros((sizes.size, GROUP), np.float32)
    alone[np.arange(sizes.size), np.arange(sizes.size) * 11 % GROUP] = sizes
    return np.concatenate([alone, np.repeat(-sizes[:, None], GROUP, axis=1)]).ravel()


def at_the_limit(dtype):
    """amax is the largest value that does not escape:
    decoding must not round it up into an escape."""
    values = np.random.default_rng(2).standard_normal(4 * GROUP, np.float32) * LIMIT[dtype]
    return np.clip(values, -LIMIT[dtype], LIMIT[dtype])


def magnitudes(dtype):
    with np.errstate(over="ignore", under="ignore"):
        return np.concatenate([gaussian(dtype, 2000, m) for m in (1.0, 3e-6, 3e4, 1e-20, 1e-30, 1e-42, 1e20, 3e28)])


#: dtype -> bits; the last group is not full.
VALUES = {
    "magnitudes": magnitudes,
    "hostile": lambda dtype: np.concatenate([hostile(dtype, seed) for seed in range(4)])[:-5],
    "huge": lambda dtype: huge_groups(dtype, (1, 2, 3, 4, 6, 40, 128)),
    "unusual": lambda dtype: unusual(dtype, groups=400)[:-37],
    "alone and constant": lambda dtype: to_bits(alone_and_constant(), dtype),
    "at the limit": lambda dtype: to_bits(at_the_limit(dtype), dtype),
}


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
every_format = pytest.mark.parametrize("codec", GROUP_CODECS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def check(kernels, codec, dtype, bits, offset=0, sizes=None, strides=None, dither=None):
    """One launch encodes, one decodes, and one more finds the scales of rows."""
    one = Case(codec, dtype, bits, offset, sizes, strides, dither)
    launches = 2 + (row_of(codec, sizes or ()) > 0) if bits.size else 0
    assert check_together(kernels, [one]) == launches


# ---- parity ----


@every_codec
@every_dtype
def test_every_pattern(kernels, codec, dtype):
    check(kernels, codec, dtype, patterns(dtype))


@every_format
@every_dtype
@pytest.mark.parametrize("values", VALUES)
def test_values(kernels, codec, dtype, values):
    for dither in (None, NOISE):
        with case(dither):
            check(kernels, codec, dtype, VALUES[values](dtype), dither=dither)


@pytest.mark.parametrize("codec", ["fp8_e4m3", "fp8_e5m2"])
@every_dtype
def test_ampere(ampere, codec, dtype):
    check(ampere, codec, dtype, patterns(dtype))
    check(ampere, codec, dtype, VALUES["hostile"](dtype), 1)


@pytest.mark.parametrize("arch", [750, 800, 890, 1200])
def test_every_kernel_is_cxx_for(arch):
    """Instructions are in ptx.cuh only, of which there are models."""
    check_syntax(arch)


@pytest.mark.parametrize("codec", ["int8", "int6", "int4"])
def test_order_of_the_rotation(kernels, codec):
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
    check(kernels, codec, "float32", to_bits(x.ravel(), "float32"))


@every_codec
@every_dtype
def test_tails_and_alignment(kernels, codec, dtype):
    for n, offset in itertools.product([0, 1, 16, 127, 128, 129, 1000, 8193], [0, 1, 4]):
        with case(n, offset):
            check(kernels, codec, dtype, np.resize(hostile(dtype, n), n), offset)


@every_codec
@every_dtype
def test_strided(kernels, codec, dtype):
    for layout, (sizes, strides) in STRIDED.items():
        bits = np.resize(hostile(dtype), np.prod(sizes))
        with case(layout):
            check(kernels, codec, dtype, bits, 1, sizes, strides, NOISE if codec != "raw" else None)


@every_format
@every_dtype
def test_rows(kernels, codec, dtype):
    """Shares of rows that end within a group: their bytes and values, contiguous and padded."""
    for width in (64, 65, 100, 127, 200):
        bits = uneven_rows(dtype, 24, width, width)  # each kind twice
        with case(width):
            check(kernels, codec, dtype, bits, 1, (24, width))
            check(kernels, codec, dtype, bits, 0, (24, width), (width + 3, 1))
    check(kernels, codec, dtype, bits, 1, (24, width), dither=NOISE)


# ---- several tensors ----


@every_codec
@every_dtype
def test_contiguous_tensors_share_a_launch(kernels, codec, dtype):
    sizes = [1, 4096, 4097, 128 * 32 * 3, 100, 8191, 2]
    cases = [Case(codec, dtype, np.resize(hostile(dtype, k), n)) for k, n in enumerate(sizes)]
    cases.append(Case(codec, dtype, unusual(dtype, groups=60), 1))
    assert check_together(kernels, cases) == 2


@every_codec
def test_more_tensors_than_a_launch_takes(kernels, codec):
    cases = [Case(codec, "bfloat16", gaussian("bfloat16", 130 + k)) for k in range(MOST_JOBS + 3)]
    assert check_together(kernels, cases) == 4
    assert check_together(kernels, cases[:MOST_JOBS]) == 2


@every_codec
def test_dtypes_and_strides_apart(kernels, codec):
    """One launch for each dtype, or width where only that matters,
    and one for each strided tensor."""
    cases = [Case(codec, d, gaussian(d, 777, seed=k), k % 3) for k, d in enumerate([*DTYPES] * 3)]
    cases += [Case(codec, d, gaussian(d, 2000), 0, (40, 50), (1, 40)) for d in DTYPES]
    assert check_together(kernels, cases) == 2 * ((2 if codec == "raw" else 3) + 3)


@every_format
def test_each_tensor_has_its_own_noise(kernels, codec):
    bits = gaussian("bfloat16", 1000)
    noises = [Dither(1, 2, 3), Dither(1, 2, 4), None, Dither(9, 2, 3), None]
    cases = [Case(codec, "bfloat16", bits, dither=d) for d in noises]
    assert check_together(kernels, cases) == 2 + 1
    assert len({case.payload.tobytes() for case in cases}) == 4


# ---- index arithmetic ----


@pytest.mark.skipif(bool(SANITIZERS), reason="sanitizers cannot shadow a sparse mapping")
@every_codec
@pytest.mark.parametrize("layout", ["contiguous", "second of two", "strided"])
def test_beyond_two_to_the_31(kernels, host_kernels, codec, layout):
    """The last 33 groups of 2^31 + 4097 values and their noise, as on the host:
    only the blocks that hold them run."""
    n, tail = 2**31 + 4097, 4097
    dither = Dither(5, 6, 7) if codec != "raw" and layout != "strided" else None
    where, shape, extent = np.arange(n - tail, n), (0, None, None), n
    if layout == "strided":
        sizes, strides = (5, n // 5), (1, 6)
        where, extent = where // sizes[1] + where % sizes[1] * 6, n // 5 * 6
        shape = (2, (ctypes.c_int64 * 2)(*sizes), (ctypes.c_int64 * 2)(*strides))
    source = Sparse(2 * extent)
    source.bytes.view(np.uint16)[where] = np.resize(hostile("bfloat16"), tail)

    def view(memory, device):
        return Tensor(memory.address, n, *shape, None, NUMBERS["bfloat16"], device, None)

    host_kernels.choose("scalar")
    first = host_kernels.units(codec, n - tail)
    want, restored = (Sparse(size) for size in (host_kernels.nbytes(codec, view(source, -1)), 2 * extent))
    assert host_kernels.encode(codec, view(source, -1), want.bytes, dither, first) == 0
    host_kernels.decode(codec, want.bytes, view(restored, -1), first)

    before = [Case(codec, "bfloat16", gaussian("bfloat16", 2 * GROUP))] if layout == "second of two" else []
    per_block = GROUP * 32 if codec != "raw" else 256 if layout == "strided" else 256 * 32
    start = len(before) * -(-2 * GROUP // per_block)
    payload, target = Sparse(want.bytes.size), Sparse(2 * extent)
    window = [ctypes.c_uint.in_dll(kernels.library, f"emulated_{end}_block") for end in ("first", "last")]
    window[0].value, window[1].value = start + (n - tail) // per_block, start - (-n // per_block) - 1
    try:
        hows = dither and [How(ctypes.pointer(dither), None)] * (1 + len(before))
        xs = [*(b.layout.tensor(b.source, 1) for b in before), view(source, 1)]
        outs = [*(b.layout.tensor(b.out, 1) for b in before), view(target, 1)]
        payloads = [*(b.payload for b in before), payload.bytes]
        assert kernels.encode_many(codec, xs, payloads, hows) == 0
        assert kernels.decode_many(codec, payloads, outs) == 0
    finally:
        window[0].value, window[1].value = 0, 0xFFFFFFFF

    codes, side = LAYOUT.get(codec, (2 * GROUP, 0))
    groups, first = -(-n // GROUP), (n - tail) // GROUP
    for begin, end in ((first * codes, groups * codes), (groups * codes + first * side, groups * (codes + side))):
        np.testing.assert_array_equal(payload.bytes[begin:end], want.bytes[begin:end])
    np.testing.assert_array_equal(target.bytes.view(np.uint16)[where], restored.bytes.view(np.uint16)[where])


# ---- refusals ----


@every_codec
def test_refusals(kernels, codec):
    layout, buffer = Layout(512, "float32"), aligned(8192)
    nine, unknown, absent = (layout.tensor(buffer, 1) for _ in range(3))
    nine.ndim, nine.sizes = 9, (ctypes.c_int64 * 9)(*[2] * 9)
    nine.strides = (ctypes.c_int64 * 9)(*[1 << d for d in range(9)])
    unknown.dtype, absent.device = 3, 7
    before = kernels.integer("emulated_launches").value
    for x, status in ((nine, E_DEVICE), (unknown, E_DTYPE), (absent, 101)):
        assert kernels.encode_many(codec, [x], [buffer]) == status
        assert kernels.decode_many(codec, [buffer], [x]) == status
    assert kernels.integer("emulated_launches").value == before


def test_device_is_put_back(kernels):
    kernels.integer("emulated_device").value = 0
    check(kernels, "int8", "bfloat16", gaussian("bfloat16", 300))
    assert kernels.integer("emulated_device").value == 0
    assert kernels.integer("emulated_launch_device").value == 1


DRIVERS = {  # {(runtime, driver): status}
    (13000, 0): E_DRIVER,
    (13000, 12090): E_DRIVER,
    **{(13000, driver): 0 for driver in (13000, 13020, 14000)},
    **{(12090, driver): 0 for driver in (12000, 12030, 12060, 13000)},
    (12090, 11080): E_DRIVER,
}


@pytest.fixture
def driver(tmp_path):
    return kernels_for(tmp_path, 750, ["driver"])


def check_driver(kernels):
    """The status, and the versions of driver and runtime."""
    seen, runtime = ctypes.c_int(-1), ctypes.c_int(-1)
    status = kernels.library.gck_cuda_check(ctypes.byref(seen), ctypes.byref(runtime))
    return status, seen.value, runtime.value


def test_driver_check(driver):
    for (built_with, version), status in DRIVERS.items():
        driver.integer("emulated_driver").value = version
        driver.integer("emulated_runtime").value = built_with
        assert check_driver(driver) == (status, version, built_with)


def test_failing_driver_check_is_not_left_for_the_next_launch(driver):
    driver.integer("emulated_sticky_error").value = 3  # cudaErrorInitializationError
    assert check_driver(driver)[0] == 3
    driver.integer("emulated_sticky_error").value = 0
    assert check_driver(driver)[0] == 0
    assert driver.integer("emulated_last_error").value == 0


# ---- sanitizers ----


@pytest.mark.skipif(bool(SANITIZERS), reason="this is the run under sanitizers")
@pytest.mark.soak
@pytest.mark.timeout(2000)
def test_under_sanitizers():
    """The same kernels over exact blocks of memory with AddressSanitizer and UBSan:
    this file once more."""
    found = subprocess.run([gxx()[0], "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip("libasan not found")
    env = os.environ | {
        "GRADCKPT_TEST_SANITIZERS": "address,undefined",
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    chosen = "(hostile or unusual or tails or strided or share_a_launch) and not raw and 750"
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
    body, message = MISTAKES[mistake]
    (tmp_path / "mistake.cu").write_text(
        f"static __global__ void k(void) {{ {body} }} int main(void) {{ GCK_START(k, 1, 32, (cudaStream_t)0); }}"
    )
    subprocess.run([*gxx(), tmp_path / "mistake.cu", "-o", tmp_path / "mistake"], check=True)
    done = subprocess.run([tmp_path / "mistake"], capture_output=True, text=True, timeout=60)
    assert message in done.stderr
    assert done.returncode == (-signal.SIGABRT if message else 0)
