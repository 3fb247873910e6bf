"""csrc/codec as a library of its own, called through ctypes:
what Python's gradckpt._C does not export."""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

from c_structures import Tensor
from checkout import CODEC, CSRC

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
