"""The device kernels as a library for the CPU (tests/helpers/emulation),
and the scalar reference beside them."""

import ctypes
import os
import shlex
import shutil
import subprocess
import weakref

import codec_isas
import numpy as np
import pytest
from c_structures import How, Tensor
from checkout import CODEC, CSRC, EMULATION, source

#: gck_format, bytes of codes and of the words beside them, for each group
FORMATS = {codec: (codec_isas.FORMATS[codec], *codec_isas.LAYOUT[codec]) for codec in codec_isas.GROUP_CODECS}
CODECS = (*FORMATS, "raw")
DTYPES = {"float32": (0, np.uint32), "float16": (1, np.uint16), "bfloat16": (2, np.uint16)}
GROUP = 128
FILL = 0xA5
#: Set when the tests are to run under sanitizers: then blocks of memory have exactly their size.
SANITIZERS = os.environ.get("GRADCKPT_TEST_SANITIZERS", "")

GXX_FLAGS = shlex.split(
    f"""-x c++ -std=c++17 -fPIC -fno-exceptions -fno-rtti -ffp-contract=off
    -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-function
    -DGCK_EMULATE_CUDA '-I{CSRC}' '-DGCK_CUDA_ARCHS="emulated"' -include '{EMULATION / "cuda_emulation.h"}'"""
)
#: UBSan traps: a library under ctypes has no way to report.  With both sanitizers and -O1, gcc
#: 12 checks array indices that are not the program's.
CHECKS = "-O1 -fsanitize=undefined -fsanitize-undefined-trap-on-error"
if SANITIZERS:
    CHECKS = f"-O0 -g -fsanitize={SANITIZERS}"
REFERENCE = """
#include "codec/format/group.h"
#include "codec/portable/kernels.h"

static uint16_t *side_of(int format, uint8_t *codes, int64_t n)
{
    return (uint16_t *)(codes + (n + GCK_GROUP - 1) / GCK_GROUP * gck_code_bytes(format));
}

/* `count` of the last group's values exist. */
void reference_encode(int format, int dtype, const char *x, int64_t n, uint8_t *codes, const gck_dither *dither,
                      int64_t first)
{
    uint16_t *side = side_of(format, codes, n), noise[GCK_GROUP];

    for (int64_t g = 0; g * GCK_GROUP < n; g++) {
        const int64_t left = n - g * GCK_GROUP;
        if (dither != NULL) {
            gck_noise_of_group(dither, first + g, noise);
        }
        gck_encode_group(format, x + g * GCK_GROUP * gck_itemsize(dtype), dtype,
                         left < GCK_GROUP ? (int)left : GCK_GROUP, first + g, dither ? noise : NULL,
                         codes + g * gck_code_bytes(format), side + g * gck_side_words(format));
    }
}

void reference_decode(int format, int dtype, uint8_t *codes, int64_t n, char *x, int64_t first)
{
    const uint16_t *side = side_of(format, codes, n);

    for (int64_t g = 0; g * GCK_GROUP < n; g++) {
        const int64_t left = n - g * GCK_GROUP;
        gck_decode_group(format, codes + g * gck_code_bytes(format), side + g * gck_side_words(format), first + g,
                         x + g * GCK_GROUP * gck_itemsize(dtype), dtype, left < GCK_GROUP ? (int)left : GCK_GROUP);
    }
}
"""


# ---- building ----


def compile_all(commands):
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
    others = {"lossless", "mask", "cast", "overflow", "sparse", "sparse_int8"}  # direct_kernels.py has those
    names = only or sorted({p.stem for p in CODEC.rglob("*.cu")} - others)
    compile_all([[gxx, *flags, "-c", source(f"{n}.cu"), "-o", out / f"{n}.o"] for n in names])
    compile_all([[gxx, "-shared", *CHECKS.split(), "-o", out / "kernels.so", *(out / f"{n}.o" for n in names), "-lm"]])
    return ctypes.CDLL(str(out / "kernels.so"))


def check_syntax(arch):
    """Every .cu file, as g++ reads it for this architecture."""
    gxx = shutil.which("g++")
    if gxx is None:
        pytest.skip("g++ not found: the CUDA emulation is C++")
    flags = [*GXX_FLAGS, f"-DEMULATED_ARCH={arch}", "-fsyntax-only"]
    compile_all([[gxx, *flags, path] for path in sorted(CODEC.rglob("*.cu"))])


def build_reference(out):
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc not found")
    (out / "reference.c").write_text(REFERENCE)
    compile_all([[gcc, "-std=c11", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", f"-I{CSRC}",
                  out / "reference.c", "-o", out / "reference.so", "-lm"]])  # fmt: skip
    return ctypes.CDLL(str(out / "reference.so"))


# ---- memory and views ----


def aligned(nbytes):
    """nbytes at a 16-byte boundary, filled with FILL."""
    if SANITIZERS:
        libc, address = ctypes.CDLL(None), ctypes.c_void_p()
        libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(16), ctypes.c_size_t(nbytes))
        block = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address.value), np.uint8)
        weakref.finalize(block, libc.free, address)
        block[:] = FILL
        return block
    block = np.full(nbytes + 16, FILL, np.uint8)
    start = -block.ctypes.data % 16
    return block[start : start + nbytes]


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def view(buffer, offset, n, dtype, sizes=None, strides=None):
    def array(values):
        return None if values is None else (ctypes.c_int64 * len(values))(*values)

    return Tensor(
        buffer.ctypes.data + offset, n, len(sizes or ()), array(sizes), array(strides), None, DTYPES[dtype][0], 1, None
    )


def nbytes_of(codec, n, dtype):
    if codec == "raw":
        return n * np.dtype(DTYPES[dtype][1]).itemsize
    _, codes, side = FORMATS[codec]
    return -(-n // GROUP) * (codes + side)


# ---- calling ----


def encode_many(kernels, codec, xs, payloads, dithers=None):
    views, places = (Tensor * len(xs))(*xs), (ctypes.c_void_p * len(xs))(*(p.ctypes.data for p in payloads))
    hows = None
    if dithers is not None:
        hows = (How * len(xs))(*(How(ctypes.pointer(d) if d else None, None) for d in dithers))
    return getattr(kernels, f"gck_{codec}_encode_cuda")(views, places, hows, len(xs))


def decode_many(kernels, codec, payloads, outs):
    views, places = (Tensor * len(outs))(*outs), (ctypes.c_void_p * len(outs))(*(p.ctypes.data for p in payloads))
    return getattr(kernels, f"gck_{codec}_decode_cuda")(places, views, len(outs))


def expected(reference, codec, bits, dtype, dither=None, first_group=0):
    """The reference's payload and the bits it decodes to."""
    if codec == "raw":
        return bits.view(np.uint8), bits
    fmt, number, n = FORMATS[codec][0], DTYPES[dtype][0], ctypes.c_int64(bits.size)
    payload, decoded = np.empty(nbytes_of(codec, bits.size, dtype), np.uint8), np.empty_like(bits)
    by = ctypes.byref(dither) if dither else None
    reference.reference_encode(fmt, number, pointer(bits), n, pointer(payload), by, ctypes.c_int64(first_group))
    reference.reference_decode(fmt, number, pointer(payload), n, pointer(decoded), ctypes.c_int64(first_group))
    return payload, decoded


def launches(kernels):
    return ctypes.c_int.in_dll(kernels, "emulated_launches").value


class Case:
    """Bits of values, laid out in memory as asked, and what the reference makes of them."""

    def __init__(self, reference, codec, dtype, bits, misaligned=0, sizes=None, strides=None, dither=None):
        self.bits, self.start = np.ascontiguousarray(bits), misaligned * bits.itemsize
        self.payload_wanted, self.bits_wanted = expected(reference, codec, self.bits, dtype, dither)
        self.layout = (bits.size, dtype, sizes, strides)
        self.where = np.arange(bits.size)
        if strides is not None:
            self.where = np.ravel(sum(np.indices(sizes)[d] * s for d, s in enumerate(strides)))
        extent = int(self.where.max()) + 1 if bits.size else 0
        self.extent, self.dither = extent * bits.itemsize, dither
        margin = 0 if SANITIZERS else 32
        self.source = self.memory(self.bits, margin)
        self.wanted = self.memory(self.bits_wanted, margin)
        self.payload, self.target = aligned(self.payload_wanted.size + margin), aligned(self.source.size)

    def memory(self, bits, margin):
        block = aligned(self.start + self.extent + margin)
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


def check(kernels, reference, codec, dtype, bits, *layout, dither=None):
    assert check_together(kernels, codec, [Case(reference, codec, dtype, bits, *layout, dither=dither)]) == (
        2 if bits.size else 0
    )
