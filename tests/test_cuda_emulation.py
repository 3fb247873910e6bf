"""The device kernels, run on the CPU (tests/emulation), against the scalar reference.

Both are built here from the sources and compared byte by byte: payloads, decoded
values, and the bytes around them."""

import ctypes
import pathlib
import shlex
import shutil
import signal
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODEC = ROOT / "csrc" / "codec"
EMULATION = ROOT / "tests" / "emulation"

CODECS = {"fp8_e4m3": 0, "fp8_e5m2": 1, "int8": 2, "int8_plain": 3, "raw": None}  # gck_format
DTYPES = {"float32": (0, np.uint32), "float16": (1, np.uint16), "bfloat16": (2, np.uint16)}
GROUP = 128
FILL = 0xA5
E_DTYPE, E_DEVICE, E_DRIVER = -1, -2, -3

GXX_FLAGS = shlex.split(
    f"""-x c++ -std=c++17 -O1 -fPIC -fno-exceptions -fno-rtti -ffp-contract=off
    -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-function
    -fsanitize=undefined -fsanitize-undefined-trap-on-error
    -DGCK_EMULATE_CUDA '-DGCK_CUDA_ARCHS="emulated"' -include '{EMULATION / "cuda_emulation.h"}'"""
)
REFERENCE = """
#include "cpu.h"

/* `count` of the last group's values exist. */
void reference_encode(int format, int dtype, const char *x, int64_t n, uint8_t *codes)
{
    const int64_t whole = n / GCK_GROUP, groups = (n + GCK_GROUP - 1) / GCK_GROUP;
    uint16_t *scales = (uint16_t *)(codes + groups * GCK_GROUP);

    gck_isa_scalar.encode[format][dtype](x, whole, codes, scales, 0);
    if (groups > whole) {
        scales[whole] = gck_encode_group(format, x + whole * GCK_GROUP * (dtype == GCK_F32 ? 4 : 2), dtype,
                                         (int)(n % GCK_GROUP), codes + whole * GCK_GROUP);
    }
}

void reference_decode(int format, int dtype, const uint8_t *codes, int64_t n, char *x)
{
    const int64_t whole = n / GCK_GROUP, groups = (n + GCK_GROUP - 1) / GCK_GROUP;
    const uint16_t *scales = (const uint16_t *)(codes + groups * GCK_GROUP);

    gck_isa_scalar.decode[format][dtype](codes, scales, whole, x, 0);
    if (groups > whole) {
        gck_decode_group(format, codes + whole * GCK_GROUP, scales[whole],
                         x + whole * GCK_GROUP * (dtype == GCK_F32 ? 4 : 2), dtype, (int)(n % GCK_GROUP));
    }
}
"""


class Tensor(ctypes.Structure):
    """gck_tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("ndim", ctypes.c_int),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("dtype", ctypes.c_int),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_void_p),
    ]


# ---- building ----


def compile_all(commands):
    """Run the compilers side by side; fail with what they said."""
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    said = [p.communicate()[0] for p in running]
    for command, p, text in zip(commands, running, said, strict=True):
        assert (p.returncode, "warning" in text) == (0, False), f"{' '.join(map(str, command))}\n{text}"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The .cu files as a host library.  UBSan traps: a library under ctypes has nobody to report to."""
    gxx = shutil.which("g++")
    if gxx is None:
        pytest.skip("g++ not found: the CUDA emulation is C++")
    out = tmp_path_factory.mktemp("emulation")
    names = ["fp8", "int8", "raw", "cuda"]
    compile_all([[gxx, *GXX_FLAGS, "-c", CODEC / f"{n}.cu", "-o", out / f"{n}.o"] for n in names])
    compile_all([[gxx, "-shared", "-o", out / "kernels.so", *(out / f"{n}.o" for n in names), "-lm"]])
    return ctypes.CDLL(str(out / "kernels.so"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc not found")
    out = tmp_path_factory.mktemp("reference")
    (out / "reference.c").write_text(REFERENCE)
    compile_all([[gcc, "-std=c11", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", f"-I{CODEC}",
                  CODEC / "scalar.c", out / "reference.c", "-o", out / "reference.so", "-lm"]])  # fmt: skip
    return ctypes.CDLL(str(out / "reference.so"))


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


def patterns(dtype):
    """Every 16-bit pattern, neighbours together and then mixed; float32: every binade three ways."""
    if dtype != "float32":
        every = np.arange(65536, dtype=np.uint32)
        return np.concatenate([every, every * 40503 % 65536]).astype(np.uint16)
    rng = np.random.default_rng(1)
    top = np.repeat(np.arange(256, dtype=np.uint32), 3 * GROUP)
    drop = np.tile(np.repeat([1, 12, 256], GROUP), 256)  # how far below the top binade
    exponent = np.maximum(top.astype(np.int64) - rng.integers(0, drop), 0).astype(np.uint32)
    sign, mantissa = rng.integers(0, 2, top.size, np.uint32), rng.integers(0, 1 << 23, top.size, np.uint32)
    return sign << 31 | exponent << 23 | mantissa


# ---- comparing ----


def view(buffer, offset, n, dtype, sizes=None, strides=None):
    def array(values):
        return None if values is None else (ctypes.c_int64 * len(values))(*values)

    return Tensor(
        buffer.ctypes.data + offset, n, len(sizes or ()), array(sizes), array(strides), DTYPES[dtype][0], 1, None
    )


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def aligned(nbytes):
    """nbytes at a 16-byte boundary, filled with FILL."""
    block = np.full(nbytes + 16, FILL, np.uint8)
    start = -block.ctypes.data % 16
    return block[start : start + nbytes]


def expected(reference, codec, bits, dtype):
    """The reference's payload and the bits it decodes to."""
    fmt, number, n = CODECS[codec], DTYPES[dtype][0], bits.size
    if fmt is None:
        return bits.view(np.uint8), bits
    payload = np.empty(-(-n // GROUP) * (GROUP + 2), np.uint8)
    decoded = np.empty_like(bits)
    reference.reference_encode(fmt, number, pointer(bits), ctypes.c_int64(n), pointer(payload))
    reference.reference_decode(fmt, number, pointer(payload), ctypes.c_int64(n), pointer(decoded))
    return payload, decoded


def encode_on(kernels, codec, x, payload):
    payloads = (ctypes.c_void_p * 1)(payload.ctypes.data)
    return getattr(kernels, f"gck_{codec}_encode_cuda")(ctypes.byref(x), payloads, None, 1)


def decode_on(kernels, codec, payload, out):
    payloads = (ctypes.c_void_p * 1)(payload.ctypes.data)
    return getattr(kernels, f"gck_{codec}_decode_cuda")(payloads, ctypes.byref(out), 1)


def check(kernels, reference, codec, dtype, bits, misaligned=0, sizes=None, strides=None):
    """Encode and decode `bits`, laid out as asked, with the emulated kernels."""
    n, item = bits.size, bits.itemsize
    bits = np.ascontiguousarray(bits)
    want_payload, want_bits = expected(reference, codec, bits, dtype)
    where = np.arange(n)
    if strides is not None:
        where = np.ravel(sum(np.indices(sizes)[d] * s for d, s in enumerate(strides)))
    extent = int(where.max()) + 1 if n else 0
    launches = ctypes.c_int.in_dll(kernels, "emulated_launches")
    before = launches.value

    source = aligned((misaligned + extent) * item)
    source[misaligned * item :].view(bits.dtype)[where] = bits
    payload = aligned(want_payload.size + 32)
    x = view(source, misaligned * item, n, dtype, sizes, strides)
    assert encode_on(kernels, codec, x, payload) == 0
    np.testing.assert_array_equal(payload[: want_payload.size], want_payload)
    assert (payload[want_payload.size :] == FILL).all(), "wrote past the payload"

    target = aligned((misaligned + extent) * item + 32)
    want = target.copy()
    want[misaligned * item : (misaligned + extent) * item].view(bits.dtype)[where] = want_bits
    payload[: want_payload.size] = want_payload
    out = view(target, misaligned * item, n, dtype, sizes, strides)
    assert decode_on(kernels, codec, payload, out) == 0
    np.testing.assert_array_equal(target, want)
    assert launches.value - before == (2 if n else 0)


every_codec = pytest.mark.parametrize("codec", CODECS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_codec
@every_dtype
def test_every_pattern(kernels, reference, codec, dtype):
    check(kernels, reference, codec, dtype, patterns(dtype))


@every_codec
@every_dtype
def test_magnitudes_and_specials(kernels, reference, codec, dtype):
    for seed, magnitude in enumerate([1.0, 3e-6, 3e4, 1e-20, 1e-30, 1e-42, 1e20, 3e28]):
        for special in (0.0, 0.002, 0.03):
            check(kernels, reference, codec, dtype, gaussian(dtype, 2000, magnitude, special, seed))


@every_codec
@every_dtype
def test_at_the_limit(kernels, reference, codec, dtype):
    """amax is the largest value that does not escape: decoding must not round it up into an escape."""
    limit = {"float32": np.float32(1e30), "float16": 65472.0, "bfloat16": float.fromhex("0x1.92p99")}[dtype]
    values = np.random.default_rng(2).standard_normal(4 * GROUP, np.float32) * np.float32(limit)
    check(kernels, reference, codec, dtype, to_bits(np.clip(values, -limit, limit), dtype))


def test_order_of_the_rotation(kernels, reference):
    """Rotated values a rounding error away from ties: another order of the additions gives other codes."""
    words = np.array([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], np.uint32)
    signs = 1.0 - 2.0 * ((words[:, None] >> np.arange(32, dtype=np.uint32)) & 1).reshape(GROUP)
    hadamard = np.ones((1, 1))
    while len(hadamard) < GROUP:
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    y = np.random.default_rng(3).integers(-120, 120, (40, GROUP)) + 0.5
    y[:, 0] = 127 - 1e-4  # the step becomes 1
    x = signs * (y @ hadamard) / GROUP
    check(kernels, reference, "int8", "float32", to_bits(x.ravel(), "float32"))


@every_codec
@every_dtype
@pytest.mark.parametrize("n", [0, 1, 16, 127, 128, 129, 1000, 8193])
def test_tails_and_alignment(kernels, reference, codec, dtype, n):
    for misaligned in (0, 1, 4):
        check(kernels, reference, codec, dtype, gaussian(dtype, n, 1.0, 0.001), misaligned)


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
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided(kernels, reference, codec, dtype, layout):
    sizes, strides = LAYOUTS[layout]
    for special in (0.0, 0.01):
        bits = gaussian(dtype, int(np.prod(sizes)), 1.0, special)
        check(kernels, reference, codec, dtype, bits, 1, sizes, strides)


@every_codec
def test_refusals(kernels, codec):
    buffer = aligned(8192)
    launches = ctypes.c_int.in_dll(kernels, "emulated_launches")
    before = launches.value
    nine = view(buffer, 0, 512, "float32", [2] * 9, [1 << d for d in range(9)])
    unknown = view(buffer, 0, 512, "float32")
    unknown.dtype = 3
    absent = view(buffer, 0, 512, "float32")
    absent.device = 7
    for x, status in ((nine, E_DEVICE), (unknown, E_DTYPE), (absent, 101)):
        assert encode_on(kernels, codec, x, buffer) == status
        assert decode_on(kernels, codec, buffer, x) == status
    assert launches.value == before


def test_device_is_put_back(kernels, reference):
    current = ctypes.c_int.in_dll(kernels, "emulated_device")
    current.value = 0
    check(kernels, reference, "int8", "bfloat16", gaussian("bfloat16", 300, 1.0))
    assert current.value == 0
    assert ctypes.c_int.in_dll(kernels, "emulated_launch_device").value == 1


@pytest.mark.parametrize(("driver", "status"), [(0, E_DRIVER), (12090, E_DRIVER), (13000, 0), (13020, 0), (14000, 0)])
def test_driver_check(kernels, driver, status):
    ctypes.c_int.in_dll(kernels, "emulated_driver").value = driver
    seen, runtime = ctypes.c_int(-1), ctypes.c_int(-1)
    assert kernels.gck_cuda_check(ctypes.byref(seen), ctypes.byref(runtime)) == status
    assert (seen.value, runtime.value) == (driver, 13000)


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
    """Lanes that do not meet end the program with a message; on hardware they would hang or read rubbish."""
    gxx = shutil.which("g++")
    if gxx is None:
        pytest.skip("g++ not found: the CUDA emulation is C++")
    body, message = MISTAKES[mistake]
    (tmp_path / "mistake.cu").write_text(
        f"static __global__ void k(void) {{ {body} }} int main(void) {{ GCK_LAUNCH(k, 1, 32, (cudaStream_t)0); }}"
    )
    subprocess.run([gxx, "-x", "c++", "-std=c++17", "-include", EMULATION / "cuda_emulation.h",
                    tmp_path / "mistake.cu", "-o", tmp_path / "mistake"], check=True)  # fmt: skip
    done = subprocess.run([tmp_path / "mistake"], capture_output=True, text=True, timeout=60)
    assert message in done.stderr
    assert done.returncode == (-signal.SIGABRT if message else 0)
