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

import torch
from checkout import CODEC, CSRC

from gradckpt import _C

# ---- The structures of csrc that Python passes to libraries of C, each mirrored once, here;
# test_c_structures.py compares them with the headers.

GROUP_CODECS = [codec for codec in _C.codecs() if _C.codec_info(codec)["stochastic"]]


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


#: Their names in C, and the header of each.
MIRRORS = {
    "gck_tensor": (Tensor, "gradckpt.h"),
    "gck_dither": (Dither, "gradckpt.h"),
    "gck_how": (How, "gradckpt.h"),
    "gck_bytes": (Bytes, "gradckpt.h"),
    "gck_lengths": (Lengths, "gradckpt.h"),
    "gck_device_kind": (DeviceKind, "gradckpt.h"),
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


# ---- csrc/codec as a library of its own, called through ctypes: what Python's gradckpt._C does
# not export.

FLAGS = shlex.split("-std=c11 -O2 -fPIC -ffp-contract=off -fno-math-errno -Wall -Wextra -Werror")
AVX2_FLAGS = shlex.split("-mavx2 -mfma -mf16c")
#: By what ends the name of a file.
ISA_FLAGS = {"_avx2": AVX2_FLAGS, "_avx512": [*shlex.split("-mavx512f -mavx512bw -mavx512dq -mavx512vl"), *AVX2_FLAGS]}
#: AVX-512 by portable C (tests/native), so that its bytes are compared on every machine.
EMULATED_FLAGS = {
    "_avx2": AVX2_FLAGS,
    "_avx512": [*AVX2_FLAGS, "-DGCK_EMULATE_AVX512"],
    "cpu_features": ["-D__builtin_cpu_supports(feature)=1"],
}
NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2, "bool": 3}  # gck_dtype
#: gck_encode() and gck_decode() of units chosen by the caller.
UNITS = """
#include "gradckpt.h"
/* payload: one buffer, in which the scales follow the codes. */
int units_encode(const char *name, const gck_tensor *x, void *payload, const gck_how *how, int64_t first, int64_t last)
{
    const gck_codec *codec = gck_codec_find(name);
    return codec->encode_host(x, gck_in_one(payload, gck_lengths_of(codec, x)), how, first, last);
}
void units_decode(const char *name, void *payload, const gck_tensor *x, int64_t first, int64_t last)
{
    const gck_codec *codec = gck_codec_find(name);
    codec->decode_host(gck_in_one(payload, gck_lengths_of(codec, x)), x, first, last);
}
int64_t units_size(const char *name) { return gck_codec_find(name)->unit; }
int64_t units_nbytes(const char *name, const gck_tensor *x) { return gck_nbytes(gck_codec_find(name), x); }
"""


def compile_codecs(folder, extra=(), cross=None, emulated=False):
    """Objects of csrc/codec and of `extra`, by a cross compiler for another machine."""
    gcc = shutil.which(cross or "gcc")
    assert gcc, "gcc is needed: the extension could not have been built without it"
    is_x86 = cross is None and platform.machine() == "x86_64"

    def one(source):
        by_name = (EMULATED_FLAGS if emulated else ISA_FLAGS) if is_x86 else {}
        more = [flag for end, flags in by_name.items() if source.stem.endswith(end) for flag in flags]
        made = folder / f"{source.stem}.o"
        subprocess.run([gcc, *FLAGS, *more, f"-I{CSRC}", "-c", source, "-o", made], check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, [*sorted(CODEC.rglob("*.c")), *extra]))


class CodecLibrary:
    """Tensors of the host; units of the work are chosen by the caller."""

    device = -1

    @staticmethod
    def build(folder, emulated=False):
        (folder / "units.c").write_text(UNITS)
        objects = compile_codecs(folder, [folder / "units.c"], emulated=emulated)
        subprocess.run(["gcc", "-shared", "-o", folder / "codecs.so", *objects, "-lm"], check=True)

    def __init__(self, folder):
        self.library = ctypes.CDLL(str(folder / "codecs.so"))
        for name in ("units_size", "units_nbytes"):
            getattr(self.library, name).restype = ctypes.c_int64

    def choose(self, isa):
        assert self.library.gck_isa_force(isa.encode()) == 0
        return self

    def nbytes(self, codec, x):
        return self.library.units_nbytes(codec.encode(), ctypes.byref(x))

    def units(self, codec, numel):
        """Units of work that so many values are, the last one perhaps not full."""
        return -(-numel // self.library.units_size(codec.encode()))

    def _bounds(self, codec, x, first):
        return ctypes.c_int64(first), ctypes.c_int64(self.units(codec, x.numel))

    def encode(self, codec, x, payload, dither=None, first=0):
        """From unit `first` on; the status. payload: an array of bytes."""
        how = ctypes.byref(How(ctypes.pointer(dither), None)) if dither else None
        at = ctypes.c_void_p(payload.ctypes.data)
        return self.library.units_encode(codec.encode(), ctypes.byref(x), at, how, *self._bounds(codec, x, first))

    def decode(self, codec, payload, out, first=0):
        at = ctypes.c_void_p(payload.ctypes.data)
        self.library.units_decode(codec.encode(), at, ctypes.byref(out), *self._bounds(codec, out, first))


class HostKernels(CodecLibrary):
    """Scalar, AVX2 where the CPU has it, AVX-512 emulated."""

    isas = [isa for isa in ("scalar", "avx2") if supported(isa)] + ["avx512"]


# ---- A payload in one tensor.


def whole(payload):
    """Its bytes: the codes, and then the scales."""
    return torch.cat([payload.codes, payload.scales])
