"""The codecs as libraries, called through ctypes: csrc/codec alone, or an instruction set of it;
and the structures that Python passes to them.
"""

import contextlib
import ctypes
import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import codec_oracle as oracle
import numpy as np
import torch
from checkout import CODEC, CSRC

from gradckpt import _C

# ---- The structures of csrc that Python passes to libraries of C, each mirrored once, here;
# test_c_structures.py compares them with the headers.

GROUP_CODECS = [codec for codec in _C.codecs() if _C.codec_info(codec)["stochastic"]]
KERNELS = (ctypes.c_void_p * 3) * len(GROUP_CODECS)  # by format and floating dtype


class Tensor(ctypes.Structure):
    """gck_tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("ndim", ctypes.c_int),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("steps", ctypes.POINTER(ctypes.c_int64)),
        ("dtype", ctypes.c_int),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("room", ctypes.c_int64),
    ]


class Dither(ctypes.Structure):
    """gck_dither."""

    _fields_ = [("seed", ctypes.c_uint64), ("step", ctypes.c_uint32), ("tensor", ctypes.c_uint32)]


class How(ctypes.Structure):
    """gck_how."""

    _fields_ = [("dither", ctypes.POINTER(Dither)), ("overflow", ctypes.c_void_p)]


class Bytes(ctypes.Structure):
    """gck_bytes."""

    _fields_ = [("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p)]


class Lengths(ctypes.Structure):
    """gck_lengths."""

    _fields_ = [("codes", ctypes.c_int64), ("scales", ctypes.c_int64)]


class DeviceKind(ctypes.Structure):
    """gck_device_kind."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dlpack", ctypes.c_int),
        ("check", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))),
        ("stream", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))),
        ("set_stream", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))),
        ("is_captured", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))),
        ("encode", ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4, ctypes.c_int)),
        ("decode", ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_int)),
        ("compare", ctypes.CFUNCTYPE(ctypes.c_int)),
        ("words", ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_uint32), ctypes.c_int, ctypes.c_int)),
        ("error", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)),
        ("link", ctypes.c_void_p),
    ]


class Kernels(ctypes.Structure):
    """gck_kernels."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("encode", KERNELS),
        ("encode_noisy", KERNELS),
        ("decode", KERNELS),
        ("to_bf16", ctypes.c_void_p),
        ("to_f16", ctypes.c_void_p),
        ("from_bf16", ctypes.c_void_p),
        ("from_f16", ctypes.c_void_p),
        ("mask_pack", ctypes.c_void_p),
        ("mask_unpack", ctypes.c_void_p),
        ("lossless_encode", ctypes.c_void_p * 3),
        ("lossless_decode", ctypes.c_void_p * 3),
        ("pack_nonzeros", ctypes.c_void_p * 3),
        ("unpack_nonzeros", ctypes.c_void_p * 3),
    ]


#: Their names in C, and the header of each.
MIRRORS = {
    "gck_tensor": (Tensor, "gradckpt.h"),
    "gck_dither": (Dither, "gradckpt.h"),
    "gck_how": (How, "gradckpt.h"),
    "gck_bytes": (Bytes, "gradckpt.h"),
    "gck_lengths": (Lengths, "gradckpt.h"),
    "gck_device_kind": (DeviceKind, "gradckpt.h"),
    "gck_kernels": (Kernels, "codec/portable/kernels.h"),
}


# ---- The instruction sets of the host codecs: forced in process, or called in a library built
# here.

FORMATS = {codec: number for number, codec in enumerate(GROUP_CODECS)}  # gck_format
#: Bytes of codes per group, and of the words beside them.
LAYOUT = {codec: (sizes[2], sizes[4]) for codec in GROUP_CODECS for sizes in [_C.codec_info(codec)["sizes"]["float32"]]}
#: The codecs that scale rows apart.
ROWS = {codec for codec in GROUP_CODECS if _C.codec_info(codec)["sizes"]["float32"][5]}


@contextlib.contextmanager
def forced(isa):
    before = _C.isa()
    _C.force_isa(isa)
    try:
        yield
    finally:
        _C.force_isa(before)


def supported(isa):
    try:
        with forced(isa):
            return True
    except ValueError:
        return False


ISAS = [isa for isa in ("scalar", "avx2", "avx512") if supported(isa)]


AVX512_FLAGS = shlex.split("-std=c11 -O2 -fPIC -ffp-contract=off -mavx2 -mfma -mf16c -DGCK_EMULATE_AVX512 -Wall")


def aligned(nbytes, fill=0, boundary=64):
    """So many bytes of this value, at a boundary."""
    block = np.full(nbytes + boundary, fill, np.uint8)
    start = -block.ctypes.data % boundary
    return block[start : start + nbytes]


class EmulatedAvx512:
    """The AVX-512 kernels against portable C (tests/native),
    for machines without it. Whole groups only."""

    @staticmethod
    def build(folder):
        gcc = shutil.which("gcc")
        path = folder / "avx512.so"
        sources = [*sorted((CODEC / "portable").glob("*.c")), *sorted((CODEC / "x86").glob("*_avx512.c"))]
        sources.append(CODEC / "x86" / "nonzeros_avx2.c")  # in its table, too
        objects = [folder / f"{s.stem}.o" for s in sources]
        running = [
            subprocess.Popen([gcc, *AVX512_FLAGS, f"-I{CSRC}", "-c", s, "-o", o])
            for s, o in zip(sources, objects, strict=True)
        ]
        assert [p.wait() for p in running] == [0] * len(sources)
        subprocess.run([gcc, "-shared", "-o", path, *objects, "-lm"], check=True)

    def __init__(self, folder):
        self.library = ctypes.CDLL(str(folder / "avx512.so"))
        self.table = Kernels.in_dll(self.library, "gck_kernels_avx512")

    def _encode(self, kernels, more, codec, bits, dtype, *operands):
        """What a kernel writes; it takes `more` after its values and its payload, as `operands`."""
        groups = bits.size // 128
        codes, side = LAYOUT[codec]
        types = ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, *more
        payload = aligned(groups * (codes + side))
        start = payload.ctypes.data
        kernel = ctypes.CFUNCTYPE(None, *types)(kernels[FORMATS[codec]][NUMBERS[dtype]])
        kernel(bits.ctypes.data, groups, start, start + groups * codes, *operands)
        return payload

    def encode_noisy(self, codec, bits, dtype, key):
        more = ctypes.POINTER(Dither), ctypes.c_int64
        return self._encode(self.table.encode_noisy, more, codec, bits, dtype, Dither(*key), 0)

    def encode(self, codec, bits, dtype, streaming=0):
        return self._encode(self.table.encode, (ctypes.c_int64, ctypes.c_int), codec, bits, dtype, 0, streaming)

    def decode(self, codec, payload, numel, dtype, streaming=0):
        groups = numel // 128
        types = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        source = aligned(payload.size)
        source[:] = payload
        start = source.ctypes.data
        out = aligned(numel * np.dtype(oracle.WORDS[dtype]).itemsize)
        kernel = ctypes.CFUNCTYPE(None, *types)(self.table.decode[FORMATS[codec]][NUMBERS[dtype]])
        kernel(start, start + groups * LAYOUT[codec][0], groups, out.ctypes.data, 0, streaming)
        return out.view(oracle.WORDS[dtype])


# ---- csrc/codec as a library of its own, called through ctypes: what Python's gradckpt._C does
# not export.

FLAGS = shlex.split("-std=c11 -O2 -fPIC -ffp-contract=off -fno-math-errno -Wall -Wextra -Werror")
ISA_FLAGS = {
    "_avx2": shlex.split("-mavx2 -mfma -mf16c"),
    "_avx512": shlex.split("-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c"),
}
NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2, "bool": 3}  # gck_dtype
#: gck_encode() and gck_decode() of units chosen by the caller.
UNITS = """
#include "gradckpt.h"
/* payload: one buffer, in which the scales follow the codes. */
int units_encode(const char *name, const gck_tensor *x, void *payload, int64_t first, int64_t last)
{
    const gck_codec *codec = gck_codec_find(name);
    return codec->encode_host(x, gck_in_one(payload, gck_lengths_of(codec, x)), NULL, first, last);
}
void units_decode(const char *name, void *payload, const gck_tensor *x, int64_t first, int64_t last)
{
    const gck_codec *codec = gck_codec_find(name);
    codec->decode_host(gck_in_one(payload, gck_lengths_of(codec, x)), x, first, last);
}
int64_t units_size(const char *name) { return gck_codec_find(name)->unit; }
int64_t units_nbytes(const char *name, int64_t n, int dtype)
{
    const gck_tensor x = {.numel = n, .dtype = (gck_dtype)dtype, .device = -1};
    return gck_nbytes(gck_codec_find(name), &x);
}
"""


def compile_codecs(folder, extra=(), cross=None):
    """Objects of csrc/codec and of `extra`, by a cross compiler for another machine."""
    gcc = shutil.which(cross or "gcc")
    assert gcc, "gcc is needed: the extension could not have been built without it"
    is_x86 = cross is None and platform.machine() == "x86_64"

    def one(source):
        isa = [f for suffix, f in ISA_FLAGS.items() if source.stem.endswith(suffix) and is_x86]
        made = folder / f"{source.stem}.o"
        command = [gcc, *FLAGS, *(isa[0] if isa else []), f"-I{CSRC}", "-c", str(source), "-o", str(made)]
        subprocess.run(command, check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, [*sorted(CODEC.rglob("*.c")), *extra]))


class CodecLibrary:
    """Contiguous host tensors by address."""

    Tensor = Tensor

    @staticmethod
    def build(folder):
        (folder / "units.c").write_text(UNITS)
        objects = compile_codecs(folder, [folder / "units.c"])
        subprocess.run(["gcc", "-shared", "-o", folder / "codecs.so", *objects, "-lm"], check=True)

    def __init__(self, folder):
        self.library = ctypes.CDLL(str(folder / "codecs.so"))
        for name in ("units_size", "units_nbytes"):
            getattr(self.library, name).restype = ctypes.c_int64

    def nbytes(self, codec, numel, dtype):
        return self.library.units_nbytes(codec.encode(), ctypes.c_int64(numel), NUMBERS[dtype])

    def units(self, codec, numel):
        """Units of work that a tensor has, the last one perhaps not full."""
        return -(-numel // self.library.units_size(codec.encode()))

    def encode_units(self, codec, x, numel, dtype, payload, first, last):
        tensor = Tensor(x, numel, 0, None, None, None, NUMBERS[dtype], -1, None)
        bounds = ctypes.c_int64(first), ctypes.c_int64(last)
        return self.library.units_encode(codec.encode(), ctypes.byref(tensor), ctypes.c_void_p(payload), *bounds)

    def decode_units(self, codec, payload, numel, dtype, x, first, last):
        tensor = Tensor(x, numel, 0, None, None, None, NUMBERS[dtype], -1, None)
        bounds = ctypes.c_int64(first), ctypes.c_int64(last)
        self.library.units_decode(codec.encode(), ctypes.c_void_p(payload), ctypes.byref(tensor), *bounds)

    def encode(self, codec, x, numel, dtype, payload):
        return self.encode_units(codec, x, numel, dtype, payload, 0, self.units(codec, numel))

    def decode(self, codec, payload, numel, dtype, x):
        self.decode_units(codec, payload, numel, dtype, x, 0, self.units(codec, numel))


# ---- A payload in one tensor.


def whole(payload):
    """Its bytes: the codes, and then the scales."""
    return torch.cat([payload.codes, payload.scales])
