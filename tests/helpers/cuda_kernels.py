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
from c_structures import Bytes, How, Tensor
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
    others = {
        "cuda_error",
        "lossless",
        "mask",
        "cast",
        "cuda_device",
        "equal",
        "sparse",
        "sparse_int8",
    }  # direct_kernels.py has those
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


def row_of(codec, sizes):
    """The length of rows that are scaled apart, or 0."""
    length = sizes[-1] if sizes and len(sizes) > 1 and codec in codec_isas.ROWS else 0
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
    one = Case(reference, codec, dtype, bits, *layout, dither=dither)
    assert check_together(kernels, codec, [one]) == (2 + (one.row > 0) if bits.size else 0)
