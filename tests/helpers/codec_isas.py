"""The instruction sets of the host codecs: forced in process, or called in a library built here."""

import contextlib
import ctypes
import shlex
import shutil
import subprocess

import codec_oracle as oracle
import numpy as np
from c_structures import GROUP_CODECS, Dither, Kernels
from checkout import CODEC, CSRC

from gradckpt import _C

FORMATS = {codec: number for number, codec in enumerate(GROUP_CODECS)}  # gck_format
#: Bytes of codes per group, and of the words beside them.
LAYOUT = {codec: (sizes[2], sizes[4]) for codec in GROUP_CODECS for sizes in [_C.codec_info(codec)["sizes"]["float32"]]}
#: The codecs that scale rows apart.
ROWS = {codec for codec in GROUP_CODECS if _C.codec_info(codec)["sizes"]["float32"][5]}
NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2}  # gck_dtype


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


FLAGS = shlex.split("-std=c11 -O2 -fPIC -ffp-contract=off -mavx2 -mfma -mf16c -DGCK_EMULATE_AVX512 -Wall")


def aligned(nbytes):
    block = np.zeros(nbytes + 64, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + nbytes]


class EmulatedAvx512:
    """The AVX-512 kernels against portable C (tests/helpers/emulation),
    for machines without it. Whole groups only."""

    @staticmethod
    def build(folder):
        gcc = shutil.which("gcc")
        path = folder / "avx512.so"
        sources = [*sorted((CODEC / "portable").glob("*.c")), *sorted((CODEC / "x86").glob("*_avx512.c"))]
        sources.append(CODEC / "x86" / "nonzeros_avx2.c")  # in its table, too
        objects = [folder / f"{s.stem}.o" for s in sources]
        running = [
            subprocess.Popen([gcc, *FLAGS, f"-I{CSRC}", "-c", s, "-o", o])
            for s, o in zip(sources, objects, strict=True)
        ]
        assert [p.wait() for p in running] == [0] * len(sources)
        subprocess.run([gcc, "-shared", "-o", path, *objects, "-lm"], check=True)

    def __init__(self, folder):
        self.library = ctypes.CDLL(str(folder / "avx512.so"))
        self.table = Kernels.in_dll(self.library, "gck_kernels_avx512")

    def encode_noisy(self, codec, bits, dtype, key):
        groups = bits.size // 128
        kernel = ctypes.CFUNCTYPE(
            None,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.POINTER(Dither),
            ctypes.c_int64,
        )(self.table.encode_noisy[FORMATS[codec]][NUMBERS[dtype]])
        codes, side = LAYOUT[codec]
        payload = aligned(groups * (codes + side))
        start = payload.ctypes.data
        kernel(bits.ctypes.data, groups, start, start + groups * codes, Dither(*key), 0)
        return payload

    def encode(self, codec, bits, dtype, streaming=0):
        groups = bits.size // 128
        codes, side = LAYOUT[codec]
        kernel = ctypes.CFUNCTYPE(
            None,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int,
        )(self.table.encode[FORMATS[codec]][NUMBERS[dtype]])
        payload = aligned(groups * (codes + side))
        start = payload.ctypes.data
        kernel(bits.ctypes.data, groups, start, start + groups * codes, 0, streaming)
        return payload

    def decode(self, codec, payload, numel, dtype, streaming=0):
        groups = numel // 128
        kernel = ctypes.CFUNCTYPE(
            None,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int,
        )(self.table.decode[FORMATS[codec]][NUMBERS[dtype]])
        source = aligned(payload.size)
        source[:] = payload
        start = source.ctypes.data
        out = aligned(numel * np.dtype(oracle.WORDS[dtype]).itemsize)
        kernel(start, start + groups * LAYOUT[codec][0], groups, out.ctypes.data, 0, streaming)
        return out.view(oracle.WORDS[dtype])
