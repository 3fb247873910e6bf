"""The codecs' kernels as libraries for the CPU: each instruction set, and the device's."""

import ctypes
import os
import shlex
import shutil
import subprocess
import weakref

import codec_libraries
import direct_oracle as oracle
import numpy as np
import pytest
from checkout import CODEC, CSRC, NATIVE, source
from codec_libraries import NUMBERS, Bytes, How, Tensor, supported

# ---- The kernels of `bf16`, `fp16`, `mask` and `lossless`, built here: each instruction set, and
# the device's.
#
# AVX-512 and CUDA run against portable C (tests/native), so that their bytes are
# compared on every machine. The fixtures `host_kernels` and `device_kernels` of conftest.py build
# them once.

E_DTYPE, E_DEVICE, E_OVERFLOW = -1, -2, -4
OVERFLOW_PENDING, OVERFLOW_NONE, OVERFLOW_FOUND = 0, 1, 2
FILL = 0xA5
#: gck_size: bytes per value, per 128 values, per 4096 values.
SIZES = {
    ("bf16", "float32"): (2, 0, 0),
    ("fp16", "float32"): (2, 0, 0),
    ("mask", "bool"): (0, 16, 0),
    ("lossless", "float32"): (0, 449, 64),
    ("lossless", "float16"): (0, 241, 64),
    ("lossless", "bfloat16"): (0, 193, 64),
}
PAIRS = list(SIZES)
every_pair = pytest.mark.parametrize(("codec", "dtype"), PAIRS)

#: Sizes and strides of views.
STRIDED = {
    "transposed": ((70, 90), (1, 70)),
    "every third": ((5000,), (3,)),
    "padded rows": ((4, 15, 100), (2100, 140, 1)),
    "permuted": ((8, 25, 30), (1, 240, 8)),
    "8 dimensions": ((2, 2, 2, 2, 2, 2, 2, 40), (1, 2, 4, 8, 16, 32, 64, 128)),
}
every_layout = pytest.mark.parametrize(("sizes", "strides"), STRIDED.values(), ids=STRIDED)

C_FLAGS = shlex.split("-std=c11 -O2 -fPIC -ffp-contract=off -Wall -Wextra")
ISA_FLAGS = {"avx2": "-mavx2 -mfma -mf16c", "avx512": "-mavx2 -mfma -mf16c -DGCK_EMULATE_AVX512", "": ""}
CXX_FLAGS = shlex.split(
    f"""-x c++ -std=c++17 -O1 -fPIC -fno-exceptions -fno-rtti -ffp-contract=off -Wall -Wextra -Wno-unknown-pragmas
    -Wno-unused-function -fsanitize=undefined -fsanitize-undefined-trap-on-error -DGCK_EMULATE_CUDA
    '-I{CSRC}' '-DGCK_CUDA_ARCHS="8.0;9.0+PTX"' -include '{NATIVE / "cuda_emulation.h"}'"""
)
SHIM = """
#include <string.h>
#include "codec/host/cpu_features.h"
#include "codec/x86/kernels_avx2.h"
#include "codec/x86/kernels_avx512.h"

static const gck_kernels *chosen;
const gck_kernels *gck_kernels_current(void) { return chosen; }
void shim_isa(const char *name)
{
    const gck_kernels *tables[] = {&gck_kernels_portable, &gck_kernels_avx2, &gck_kernels_avx512};

    for (int i = 0; i < 3; i++) {
        chosen = strcmp(tables[i]->name, name) == 0 ? tables[i] : chosen;
    }
}

int shim_sizeof_tensor(void) { return sizeof(gck_tensor); }

/* From unit `first` on. */
int shim_encode(const gck_codec *codec, const gck_tensor *x, void *payload, int64_t first)
{
    return codec->encode_host(x, (gck_bytes){payload, NULL}, NULL, first, (x->numel + codec->unit - 1) / codec->unit);
}

void shim_decode(const gck_codec *codec, void *payload, const gck_tensor *out, int64_t first)
{
    codec->decode_host((gck_bytes){payload, NULL}, out, first, (out->numel + codec->unit - 1) / codec->unit);
}

/* Whole blocks, with the stores of large tensors. */
int shim_stream_encode(char codec, int dtype, const void *x, int64_t n, void *payload)
{
    const gck_kernels *kernels = chosen;

    switch (codec) {
    case 'b': return kernels->to_bf16(x, n, payload, 1);
    case 'f': return kernels->to_f16(x, n, payload, 1);
    case 'm': kernels->mask_pack(x, n / 128, payload, 1); return 0;
    default:  return kernels->lossless_encode[dtype](x, n / 128, gck_parts_of(payload, n, dtype, 0), 1);
    }
}

void shim_stream_decode(char codec, int dtype, const void *payload, int64_t n, void *x)
{
    const gck_kernels *kernels = chosen;

    switch (codec) {
    case 'b': kernels->from_bf16(payload, n, x, 1); break;
    case 'f': kernels->from_f16(payload, n, x, 1); break;
    case 'm': kernels->mask_unpack(payload, n / 128, x, 1); break;
    default:  kernels->lossless_decode[dtype](gck_parts_of(payload, n, dtype, 0), n / 128, x, 1);
    }
}
"""


def compile_all(commands):
    """Run the compilers side by side; fail with what they said."""
    commands = list(commands)
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    said = [p.communicate()[0] for p in running]
    for command, p, text in zip(commands, running, said, strict=True):
        assert (p.returncode, "warning" in text) == (0, False), f"{' '.join(map(str, command))}\n{text}"


def nbytes(codec, dtype, n):
    value, group, block = SIZES[codec, dtype]
    return value * n + group * -(-n // 128) + block * -(-n // 4096)


def aligned(n):
    """n bytes at a 64-byte boundary, filled with FILL."""
    return codec_libraries.aligned(n, FILL)


class Layout:
    """Where values lie: offset from an aligned place in values, and strides (None: contiguous)."""

    def __init__(self, n, dtype, offset=0, sizes=None, strides=None):
        self.n, self.dtype, self.offset, self.sizes, self.strides = n, dtype, offset, sizes, strides
        self.item = np.dtype(oracle.WORDS[dtype]).itemsize
        self.where = np.arange(n)
        if strides is not None:
            self.where = np.ravel(sum(np.indices(sizes)[d] * s for d, s in enumerate(strides)))
        self.extent = int(self.where.max()) + 1 if n else 0

    def memory(self):
        return aligned((self.offset + self.extent) * self.item + 64)

    def values(self, memory):
        start = self.offset * self.item
        return memory[start : start + self.extent * self.item].view(oracle.WORDS[self.dtype])

    def tensor(self, memory, device):
        def array(values):
            return None if values is None else (ctypes.c_int64 * len(values))(*values)

        return Tensor(
            memory.ctypes.data + self.offset * self.item,
            self.n,
            len(self.sizes or ()),
            array(self.sizes),
            array(self.strides),
            None,
            NUMBERS[self.dtype],
            device,
            None,
        )


class HostKernels:
    """Scalar, AVX2 where the CPU has it, AVX-512 emulated."""

    isas = [isa for isa in ("scalar", "avx2") if supported(isa)] + ["avx512"]
    device = -1

    @staticmethod
    def build(folder):
        gcc = shutil.which("gcc")
        if gcc is None:
            pytest.skip("gcc not found")
        (folder / "shim.c").write_text(SHIM)
        names = ("cast", "mask", "lossless", "nonzeros", "pieces", "raw", "sparse", "strided")
        host = [source(f"{name}.c") for name in names]
        plain = [(path, "") for path in [*host, *(CODEC / "portable").glob("*.c"), folder / "shim.c"]]
        sources = [*plain, *((path, path.stem.rpartition("_")[2]) for path in (CODEC / "x86").glob("*.c"))]
        compile_all(
            [gcc, *C_FLAGS, *ISA_FLAGS[isa].split(), f"-I{CSRC}", "-c", s, "-o", folder / f"{s.stem}.o"]
            for s, isa in sources
        )
        objects = [folder / f"{s.stem}.o" for s, _ in sources]
        subprocess.run([gcc, "-shared", "-o", folder / "host.so", *objects, "-lm"], check=True)

    def __init__(self, folder):
        self.library = ctypes.CDLL(str(folder / "host.so"))
        self.isa = "scalar"

    def choose(self, isa):
        self.isa = ctypes.c_char_p(isa.encode())  # kept: C keeps the pointer
        self.library.shim_isa(self.isa)
        return self

    def codec(self, name):
        return ctypes.byref(ctypes.c_char.in_dll(self.library, f"gck_codec_{name}"))

    def encode(self, codec, x, payload, first=0):
        at = ctypes.c_void_p(payload.ctypes.data)
        return self.library.shim_encode(self.codec(codec), ctypes.byref(x), at, ctypes.c_int64(first))

    def decode(self, codec, payload, out, first=0):
        at = ctypes.c_void_p(payload.ctypes.data)
        self.library.shim_decode(self.codec(codec), at, ctypes.byref(out), ctypes.c_int64(first))

    def stream(self, codec, dtype, bits):
        """Payload and decoded values of whole blocks by the kernels for large tensors,
        and the status."""
        n, layout = ctypes.c_int64(bits.size), Layout(bits.size, dtype)
        letter, number = ctypes.c_char(codec[0].encode()), NUMBERS[dtype]
        source, out, payload = layout.memory(), layout.memory(), aligned(nbytes(codec, dtype, bits.size))
        layout.values(source)[:] = bits
        at = [ctypes.c_void_p(a.ctypes.data) for a in (source, payload, out)]
        status = self.library.shim_stream_encode(letter, number, at[0], n, at[1])
        self.library.shim_stream_decode(letter, number, at[1], n, at[2])
        return payload, layout.values(out), status


class DeviceKernels:
    """The .cu files as a host library. UBSan traps:
    a library under ctypes has no way to report."""

    device = 1

    @staticmethod
    def build(folder, arch=750):
        gxx = shutil.which("g++")
        if gxx is None:
            pytest.skip("g++ not found: the CUDA emulation is C++")
        names = [
            "cast",
            "mask",
            "lossless",
            "cuda_device",
            "cuda_error",
            "equal",
            "driver",
            "raw",
            "sparse",
            "sparse_int8",
        ]
        flags = [*CXX_FLAGS, f"-DEMULATED_ARCH={arch}"]
        commands = [[gxx, *flags, "-c", source(f"{n}.cu"), "-o", folder / f"{n}.cu.o"] for n in names]
        c = [gxx.replace("g++", "gcc"), *C_FLAGS, "-DGCK_WITH_CUDA=1", f"-I{CSRC}", "-c"]
        plain = ["overflow", "devices"]
        compile_all([*commands, *([*c, source(f"{n}.c"), "-o", folder / f"{n}.c.o"] for n in plain)])
        objects = [*(folder / f"{n}.cu.o" for n in names), *(folder / f"{n}.c.o" for n in plain)]
        subprocess.run([gxx, "-shared", "-o", folder / "device.so", *objects, "-lm", "-lpthread"], check=True)

    def __init__(self, folder):
        self.library = ctypes.CDLL(str(folder / "device.so"))
        self.library.gck_overflow_take.restype = ctypes.c_void_p
        self.library.gck_overflow_give.argtypes = [ctypes.c_void_p]
        self.library.gck_overflow_is_captured.argtypes = [ctypes.c_void_p]
        self.library.gck_cuda_error.restype = ctypes.c_char_p

    def integer(self, name):
        return ctypes.c_int.in_dll(self.library, name)

    def text_of(self, error):
        return self.library.gck_cuda_error(error).decode()

    def encode_many(self, codec, xs, payloads):
        at = (Bytes * len(xs))(*(Bytes(payload.ctypes.data, None) for payload in payloads))
        return getattr(self.library, f"gck_{codec}_encode_cuda")((Tensor * len(xs))(*xs), at, None, len(xs))

    def encode(self, codec, x, payload, overflow=None):
        payloads = (Bytes * 1)(Bytes(payload.ctypes.data, None))
        how = ctypes.byref(How(None, overflow)) if overflow else None
        x.stream = 1  # the legacy default stream is never captured
        self.library.gck_overflow_listen(ctypes.byref(x), how, 1)
        return getattr(self.library, f"gck_{codec}_encode_cuda")(ctypes.byref(x), payloads, how, 1)

    def decode(self, codec, payload, out):
        payloads = (Bytes * 1)(Bytes(payload.ctypes.data, None))
        assert getattr(self.library, f"gck_{codec}_decode_cuda")(payloads, ctypes.byref(out), 1) == 0


def assert_same(got, want, what):
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, f"{what}: {wrong.size} of {want.size} differ, first at {wrong[:5]}"


def check(kernels, codec, dtype, bits, what, offset=0, sizes=None, strides=None):
    """Encode and decode `bits`, laid out as asked: the oracle's bytes, the oracle's values,
    nothing beside them."""
    layout = Layout(bits.size, dtype, offset, sizes, strides)
    want, fits = oracle.encode(codec, bits, dtype)
    source, payload = layout.memory(), aligned(want.size + 64)
    layout.values(source)[layout.where] = bits
    before = source.copy()
    status = kernels.encode(codec, layout.tensor(source, kernels.device), payload)
    assert status == (0 if fits or kernels.device >= 0 else E_OVERFLOW), what
    assert_same(payload[: want.size], want, f"{what}: payload")
    assert (payload[want.size :] == FILL).all(), f"{what}: wrote past the payload"
    assert_same(source, before, f"{what}: input")

    out = layout.memory()
    expected = out.copy()
    layout.values(expected)[layout.where] = oracle.decode(codec, want, bits.size, dtype)
    kernels.decode(codec, payload, layout.tensor(out, kernels.device))
    assert_same(out, expected, f"{what}: decoded")
    return fits


def everywhere(host, device):
    """Each instruction set, chosen, and the device: (name, kernels)."""
    for isa in host.isas:
        yield isa, host.choose(isa)
    yield "cuda", device


def check_everywhere(host, device, codec, dtype, bits, **layout):
    """On every instruction set and the device; says whether the values fit."""
    return [check(kernels, codec, dtype, bits, name, **layout) for name, kernels in everywhere(host, device)][-1]


def check_last_values_of_a_huge_tensor(host, codec, dtype, value):
    """2^31 + 4097 values, all of them one: index arithmetic; only pages that are touched exist."""
    n, layout = 2**31 + 4097, Layout(1, dtype)
    memory = layout.memory()
    payload = np.empty(nbytes(codec, dtype, n) + 64, np.uint8)
    payload = payload[-payload.ctypes.data % 64 :][: nbytes(codec, dtype, n)]
    small = np.full(n % 4096 + 4096, value, oracle.WORDS[dtype])
    want, _ = oracle.encode(codec, small, dtype)
    x = layout.tensor(memory, -1)
    x.numel, x.ndim, x.sizes, x.strides = n, 1, (ctypes.c_int64 * 1)(n), (ctypes.c_int64 * 1)(0)
    for isa in host.isas:
        layout.values(memory)[:] = value
        payload[-want.size :] = FILL
        assert host.choose(isa).encode(codec, x, payload, n // 4096 - 1) == 0
        tail = SIZES[codec, dtype][0] * 4096 or -(-small.size // 128)  # casts: the last values; else the last bytes
        assert_same(payload[-tail:], want[-tail:], isa)
        layout.values(memory)[:] = 0
        host.decode(codec, payload, x, n // 4096 - 1)
        assert layout.values(memory)[0] == oracle.decode(codec, want, small.size, dtype)[-1]


# ---- The device kernels as a library for the CPU (tests/native), and the scalar
# reference beside them.

#: gck_format, bytes of codes and of the words beside them, for each group
FORMATS = {
    codec: (codec_libraries.FORMATS[codec], *codec_libraries.LAYOUT[codec]) for codec in codec_libraries.GROUP_CODECS
}
CODECS = (*FORMATS, "raw")
DTYPES = {"float32": (0, np.uint32), "float16": (1, np.uint16), "bfloat16": (2, np.uint16)}
GROUP = 128
#: Set when the tests are to run under sanitizers: then blocks of memory have exactly their size.
SANITIZERS = os.environ.get("GRADCKPT_TEST_SANITIZERS", "")

GXX_FLAGS = shlex.split(
    f"""-x c++ -std=c++17 -fPIC -fno-exceptions -fno-rtti -ffp-contract=off
    -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-function
    -DGCK_EMULATE_CUDA '-I{CSRC}' '-DGCK_CUDA_ARCHS="emulated"' -include '{NATIVE / "cuda_emulation.h"}'"""
)
#: UBSan traps: a library under ctypes has no way to report.  With both sanitizers and -O1, gcc
#: 12 checks array indices that are not the program's.
CHECKS = "-O1 -fsanitize=undefined -fsanitize-undefined-trap-on-error"
if SANITIZERS:
    CHECKS = f"-O0 -g -fsanitize={SANITIZERS}"
REFERENCE = """
#include <string.h>
#include "codec/format/group.h"
#include "codec/format/rows.h"
#include "codec/portable/kernels.h"

static uint16_t *side_of(int format, uint8_t *codes, int64_t n)
{
    return (uint16_t *)(codes + (n + GCK_GROUP - 1) / GCK_GROUP * gck_code_bytes(format));
}

/* The bytes of the rows come last. */
static int8_t *rows_of(int format, uint8_t *codes, int64_t n)
{
    return (int8_t *)(side_of(format, codes, n) + (n + GCK_GROUP - 1) / GCK_GROUP * gck_side_words(format));
}

/* `count` of the last group's values exist.  length: of rows that are scaled apart, or 0. */
void reference_encode(int format, int dtype, const char *x, int64_t n, uint8_t *codes, const gck_dither *dither,
                      int64_t first, int64_t length)
{
    uint16_t *side = side_of(format, codes, n), noise[GCK_GROUP];
    float copy[GCK_GROUP];

    for (int64_t g = 0; g * GCK_GROUP < n; g++) {
        const int64_t left = n - g * GCK_GROUP;
        const int count = left < GCK_GROUP ? (int)left : GCK_GROUP;
        const char *values = x + g * GCK_GROUP * gck_itemsize(dtype);
        if (dither != NULL) {
            gck_noise_of_group(dither, first + g, noise);
        }
        if (length > 0) {
            int end[GCK_SHARES], shift[GCK_SHARES] = {0};
            int64_t row;
            const int shares = gck_shares_of(g, length, n, end, &row);
            memcpy(copy, values, count * gck_itemsize(dtype));
            gck_find_shifts(copy, dtype, shares, end, shift);
            gck_scale_shares(copy, dtype, shares, end, shift, 0);
            values = (const char *)copy;
            for (int s = 0; s < shares; s++) {
                if (s > 0 || row * length == g * GCK_GROUP) {
                    rows_of(format, codes, n)[row + s] = s > 0 ? (int8_t)(shift[s] - shift[s - 1]) : 0;
                }
            }
        }
        gck_encode_group(format, values, dtype, count, first + g, dither ? noise : NULL,
                         codes + g * gck_code_bytes(format), side + g * gck_side_words(format));
    }
}

void reference_decode(int format, int dtype, uint8_t *codes, int64_t n, char *x, int64_t first, int64_t length)
{
    const uint16_t *side = side_of(format, codes, n);

    for (int64_t g = 0; g * GCK_GROUP < n; g++) {
        const int64_t left = n - g * GCK_GROUP;
        gck_decode_group(format, codes + g * gck_code_bytes(format), side + g * gck_side_words(format), first + g,
                         x + g * GCK_GROUP * gck_itemsize(dtype), dtype, left < GCK_GROUP ? (int)left : GCK_GROUP);
        if (length > 0) {
            int end[GCK_SHARES], shift[GCK_SHARES];
            int64_t row;
            const int shares = gck_shares_of(g, length, n, end, &row);
            gck_shifts_from(shares, rows_of(format, codes, n) + row + 1, shift);
            gck_scale_shares(x + g * GCK_GROUP * gck_itemsize(dtype), dtype, shares, end, shift, 1);
        }
    }
}
"""


# ---- building ----


def compile_kernels(commands):
    """Run the compilers side by side; fail with what they said."""
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    said = [p.communicate()[0] for p in running]
    for command, p, text in zip(commands, running, said, strict=True):
        assert (p.returncode, "warning" in text) == (0, False), f"{' '.join(map(str, command))}\n{text}"


def build_kernels(out, arch, only=None, *defines):
    """The .cu files, or those named, as a host library; `arch`: whose branches,
    750 being the oldest."""
    gxx = shutil.which("g++")
    if gxx is None:
        pytest.skip("g++ not found: the CUDA emulation is C++")
    flags = [*GXX_FLAGS, *CHECKS.split(), f"-DEMULATED_ARCH={arch}", *defines]
    others = {
        "cuda_error",
        "lossless",
        "mask",
        "cast",
        "cuda_device",
        "equal",
        "sparse",
        "sparse_int8",
    }  # codec_kernels.py has those
    names = only or sorted({p.stem for p in CODEC.rglob("*.cu")} - others)
    compile_kernels([[gxx, *flags, "-c", source(f"{n}.cu"), "-o", out / f"{n}.o"] for n in names])
    compile_kernels(
        [[gxx, "-shared", *CHECKS.split(), "-o", out / "kernels.so", *(out / f"{n}.o" for n in names), "-lm"]]
    )
    return ctypes.CDLL(str(out / "kernels.so"))


def check_syntax(arch):
    """Every .cu file, as g++ reads it for this architecture."""
    gxx = shutil.which("g++")
    if gxx is None:
        pytest.skip("g++ not found: the CUDA emulation is C++")
    flags = [*GXX_FLAGS, f"-DEMULATED_ARCH={arch}", "-fsyntax-only"]
    compile_kernels([[gxx, *flags, path] for path in sorted(CODEC.rglob("*.cu"))])


def build_reference(out):
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc not found")
    (out / "reference.c").write_text(REFERENCE)
    compile_kernels([[gcc, "-std=c11", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", f"-I{CSRC}",
                  out / "reference.c", "-o", out / "reference.so", "-lm"]])  # fmt: skip
    return ctypes.CDLL(str(out / "reference.so"))


# ---- memory and views ----


def aligned_bytes(nbytes):
    """nbytes at a 16-byte boundary, filled with FILL."""
    if SANITIZERS:
        libc, address = ctypes.CDLL(None), ctypes.c_void_p()
        libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(16), ctypes.c_size_t(nbytes))
        block = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address.value), np.uint8)
        weakref.finalize(block, libc.free, address)
        block[:] = FILL
        return block
    return codec_libraries.aligned(nbytes, FILL, 16)


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def view(buffer, offset, n, dtype, sizes=None, strides=None):
    def array(values):
        return None if values is None else (ctypes.c_int64 * len(values))(*values)

    return Tensor(
        buffer.ctypes.data + offset, n, len(sizes or ()), array(sizes), array(strides), None, DTYPES[dtype][0], 1, None
    )


def row_of(codec, sizes):
    """The length of rows that are scaled apart, or 0."""
    length = sizes[-1] if sizes and len(sizes) > 1 and codec in codec_libraries.ROWS else 0
    return length if length >= 64 and length % GROUP else 0


def nbytes_of(codec, n, dtype, row=0):
    if codec == "raw":
        return n * np.dtype(DTYPES[dtype][1]).itemsize
    _, codes, side = FORMATS[codec]
    return -(-n // GROUP) * (codes + side) + (n // row if row else 0)


def arrays(codec, n, payload):
    """gck_bytes of a payload in one buffer, in which the scales follow the codes."""
    at = payload.ctypes.data
    return Bytes(at, None if codec == "raw" else at + -(-n // GROUP) * FORMATS[codec][1])


# ---- calling ----


def encode_many(kernels, codec, xs, payloads, dithers=None):
    pairs = zip(xs, payloads, strict=True)
    views, places = (Tensor * len(xs))(*xs), (Bytes * len(xs))(*(arrays(codec, x.numel, p) for x, p in pairs))
    hows = None
    if dithers is not None:
        hows = (How * len(xs))(*(How(ctypes.pointer(d) if d else None, None) for d in dithers))
    return getattr(kernels, f"gck_{codec}_encode_cuda")(views, places, hows, len(xs))


def decode_many(kernels, codec, payloads, outs):
    pairs = zip(outs, payloads, strict=True)
    views, places = (Tensor * len(outs))(*outs), (Bytes * len(outs))(*(arrays(codec, x.numel, p) for x, p in pairs))
    return getattr(kernels, f"gck_{codec}_decode_cuda")(places, views, len(outs))


def expected(reference, codec, bits, dtype, dither=None, first_group=0, row=0):
    """The reference's payload and the bits it decodes to."""
    if codec == "raw":
        return bits.view(np.uint8), bits
    fmt, number, n = FORMATS[codec][0], DTYPES[dtype][0], ctypes.c_int64(bits.size)
    payload, decoded = np.empty(nbytes_of(codec, bits.size, dtype, row), np.uint8), np.empty_like(bits)
    by, more = ctypes.byref(dither) if dither else None, (ctypes.c_int64(first_group), ctypes.c_int64(row))
    reference.reference_encode(fmt, number, pointer(bits), n, pointer(payload), by, *more)
    reference.reference_decode(fmt, number, pointer(payload), n, pointer(decoded), *more)
    return payload, decoded


def launches(kernels):
    return ctypes.c_int.in_dll(kernels, "emulated_launches").value


class Case:
    """Bits of values, laid out in memory as asked, and what the reference makes of them."""

    def __init__(self, reference, codec, dtype, bits, misaligned=0, sizes=None, strides=None, dither=None):
        self.bits, self.start = np.ascontiguousarray(bits), misaligned * bits.itemsize
        self.row = row_of(codec, sizes)
        self.payload_wanted, self.bits_wanted = expected(reference, codec, self.bits, dtype, dither, 0, self.row)
        self.layout = (bits.size, dtype, sizes, strides)
        self.where = np.arange(bits.size)
        if strides is not None:
            self.where = np.ravel(sum(np.indices(sizes)[d] * s for d, s in enumerate(strides)))
        extent = int(self.where.max()) + 1 if bits.size else 0
        self.extent, self.dither = extent * bits.itemsize, dither
        margin = 0 if SANITIZERS else 32
        self.source = self.memory(self.bits, margin)
        self.wanted = self.memory(self.bits_wanted, margin)
        self.payload, self.target = aligned_bytes(self.payload_wanted.size + margin), aligned_bytes(self.source.size)

    def memory(self, bits, margin):
        block = aligned_bytes(self.start + self.extent + margin)
        block[self.start : self.start + self.extent].view(bits.dtype)[self.where] = bits
        return block

    def view(self, block):
        n, dtype, sizes, strides = self.layout
        return view(block, self.start, n, dtype, sizes, strides)

    def check_encoded(self):
        size = self.payload_wanted.size
        np.testing.assert_array_equal(self.payload[:size], self.payload_wanted)
        assert (self.payload[size:] == FILL).all(), "wrote past the payload"

    def check_decoded(self):
        np.testing.assert_array_equal(self.target, self.wanted)


def check_together(kernels, codec, cases):
    """Encode them by one call and decode by another; how many launches that took."""
    before = launches(kernels)
    dithers = [c.dither for c in cases] if any(c.dither for c in cases) else None
    assert encode_many(kernels, codec, [c.view(c.source) for c in cases], [c.payload for c in cases], dithers) == 0
    for case in cases:
        case.check_encoded()
    assert decode_many(kernels, codec, [c.payload for c in cases], [c.view(c.target) for c in cases]) == 0
    for case in cases:
        case.check_decoded()
    return launches(kernels) - before


def check_case(kernels, reference, codec, dtype, bits, *layout, dither=None):
    one = Case(reference, codec, dtype, bits, *layout, dither=dither)
    assert check_together(kernels, codec, [one]) == (2 + (one.row > 0) if bits.size else 0)
