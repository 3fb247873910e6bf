"""The kernels of `bf16`, `fp16`, `mask` and `lossless`, built here: each instruction set,
and the device's.

AVX-512 and CUDA run against portable C (tests/helpers/emulation), so that their bytes are compared
on every machine. The fixtures `host_kernels` and `device_kernels` of conftest.py build them once.
"""

import ctypes
import shlex
import shutil
import subprocess

import direct_oracle as oracle
import numpy as np
import pytest
from c_structures import Bytes, How, Tensor
from checkout import CODEC, CSRC, EMULATION, source
from codec_isas import supported

NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2, "bool": 3}  # gck_dtype
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
    '-I{CSRC}' '-DGCK_CUDA_ARCHS="8.0;9.0+PTX"' -include '{EMULATION / "cuda_emulation.h"}'"""
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
    block = np.full(n + 64, FILL, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + n]


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
