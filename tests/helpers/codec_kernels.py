"""The codecs' kernels as libraries for the CPU, over memory that the tests lay out: those of each
instruction set (codec_libraries.HostKernels), and the .cu files under native/cuda_emulation.h.

Both are compared with the oracle of a codec; device kernels of groups with the portable ones, which
are compared with it elsewhere. The fixtures `host_kernels` and `device_kernels` of conftest.py
build them once."""

import ctypes
import os
import shlex
import shutil
import subprocess
import weakref

import codec_oracle
import direct_oracle
import numpy as np
import pytest
from checkout import CODEC, CSRC, NATIVE, source
from codec_inputs import bits_of, tensor
from codec_libraries import GROUP_CODECS, ISAS, LAYOUT, NUMBERS, Bytes, Dither, How, Tensor, forced, whole

import gradckpt

E_DTYPE, E_DEVICE, E_DRIVER, E_OVERFLOW = -1, -2, -3, -4
OVERFLOW_PENDING, OVERFLOW_NONE, OVERFLOW_FOUND = 0, 1, 2
FILL = direct_oracle.FILL
GROUP = 128
#: Codec and dtype: bytes per value, per 128 values, per 4096 values (gck_size).
SIZES = {
    ("bf16", "float32"): (2, 0, 0),
    ("fp16", "float32"): (2, 0, 0),
    ("mask", "bool"): (0, 16, 0),
    ("lossless", "float32"): (0, 449, 64),
    ("lossless", "float16"): (0, 241, 64),
    ("lossless", "bfloat16"): (0, 193, 64),
}
every_pair = pytest.mark.parametrize(("codec", "dtype"), SIZES)

#: Sizes and strides of views.
STRIDED = {
    "transposed": ((70, 90), (1, 70)),
    "every third": ((5000,), (3,)),
    "padded rows": ((4, 15, 100), (2100, 140, 1)),
    "permuted": ((8, 25, 30), (1, 240, 8)),
    "nearly dense": ((1, 2000, 1), (9, 1, 7)),
    "8 dimensions": ((2, 2, 2, 2, 2, 2, 2, 40), (1, 2, 4, 8, 16, 32, 64, 128)),
}

#: Set when the tests are to run under sanitizers: then blocks of memory have exactly their size.
SANITIZERS = os.environ.get("GRADCKPT_TEST_SANITIZERS", "")
MARGIN = 0 if SANITIZERS else 64
#: UBSan traps: a library under ctypes has no way to report. With both sanitizers and -O1, gcc
#: 12 checks array indices that are not the program's.
CHECKS = (
    f"-O0 -g -fsanitize={SANITIZERS}" if SANITIZERS else "-O1 -fsanitize=undefined -fsanitize-undefined-trap-on-error"
)
C_FLAGS = shlex.split("-std=c11 -O2 -fPIC -ffp-contract=off -Wall -Wextra -DGCK_WITH_CUDA=1")
CXX_FLAGS = shlex.split(
    f"""-x c++ -std=c++17 -fPIC -fno-exceptions -fno-rtti -ffp-contract=off -Wall -Wextra -Wno-unknown-pragmas
    -Wno-unused-function -DGCK_EMULATE_CUDA '-DGCK_CUDA_ARCHS="8.0;9.0+PTX"'
    -include '{NATIVE / "cuda_emulation.h"}'"""
)
#: What the other .cu files need, with codecs that take a value at a time.
DIRECT = ("cast", "mask", "lossless", "sparse", "sparse_int8", "raw", "equal", "driver", "cuda_device", "cuda_error")
GROUPED = sorted({path.stem for path in CODEC.rglob("*.cu")} - {*DIRECT})


def compile_all(commands):
    """Run the compilers side by side; fail with what they said."""
    commands = [[*command, f"-I{CSRC}"] for command in commands]
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    said = [p.communicate()[0] for p in running]
    for command, p, text in zip(commands, running, said, strict=True):
        assert (p.returncode, "warning" in text) == (0, False), f"{' '.join(map(str, command))}\n{text}"


def gxx():
    """g++ with what it takes to read a .cu file; skip the test where there is none."""
    return [shutil.which("g++") or pytest.skip("g++ not found: the CUDA emulation is C++"), *CXX_FLAGS]


# ---- memory


def aligned(n):
    """n bytes at a 64-byte boundary, filled with FILL."""
    if not SANITIZERS:
        block = np.full(n + 64, FILL, np.uint8)
        return block[-block.ctypes.data % 64 :][:n]
    libc, address = ctypes.CDLL(None), ctypes.c_void_p()
    libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(64), ctypes.c_size_t(n))
    block = np.frombuffer((ctypes.c_uint8 * n).from_address(address.value), np.uint8)
    weakref.finalize(block, libc.free, address)
    block[:] = FILL
    return block


def nbytes(codec, dtype, n):
    """Of a payload; of a group codec, without the bytes of rows."""
    if codec == "raw":
        return n * np.dtype(direct_oracle.WORDS[dtype]).itemsize
    value, group, block = (0, sum(LAYOUT[codec]), 0) if codec in LAYOUT else SIZES[codec, dtype]
    return value * n + group * -(-n // GROUP) + block * -(-n // 4096)


class Layout:
    """Where values lie: offset from an aligned place in values, and strides (None: contiguous)."""

    def __init__(self, n, dtype, offset=0, sizes=None, strides=None):
        self.n, self.dtype, self.offset, self.sizes, self.strides = n, dtype, offset, sizes, strides
        self.item = np.dtype(direct_oracle.WORDS[dtype]).itemsize
        self.where = np.arange(n)
        if strides is not None:
            self.where = np.ravel(sum(np.indices(sizes)[d] * s for d, s in enumerate(strides)))
        self.extent = int(self.where.max()) + 1 if n else 0

    def memory(self, bits=None):
        """A block of its own, which holds these values."""
        made = aligned((self.offset + self.extent) * self.item + MARGIN)
        if bits is not None:
            self.values(made)[self.where] = bits
        return made

    def values(self, memory):
        start = self.offset * self.item
        return memory[start : start + self.extent * self.item].view(direct_oracle.WORDS[self.dtype])

    def tensor(self, memory, device):
        def array(values):
            return None if values is None else (ctypes.c_int64 * len(values))(*values)

        at, shape = memory.ctypes.data + self.offset * self.item, (array(self.sizes), array(self.strides))
        return Tensor(at, self.n, len(self.sizes or ()), *shape, None, NUMBERS[self.dtype], device, None)


# ---- the device


class DeviceKernels:
    """.cu files as a host library; `arch`: whose branches, 750 being the oldest."""

    device = 1

    @staticmethod
    def build(folder, arch=750, names=DIRECT):
        flags = [*CHECKS.split(), f"-DEMULATED_ARCH={arch}"]
        commands = [[*gxx(), *flags, "-c", source(f"{n}.cu"), "-o", folder / f"{n}.cu.o"] for n in names]
        if "cuda_device" in names:
            commands += [
                ["gcc", *C_FLAGS, "-c", source(f"{n}.c"), "-o", folder / f"{n}.c.o"] for n in ("overflow", "devices")
            ]
        compile_all(commands)
        link = ["g++", "-shared", *CHECKS.split(), "-o", folder / "device.so", *folder.glob("*.o"), "-lm", "-lpthread"]
        subprocess.run(link, check=True)

    def __init__(self, folder):
        self.library = ctypes.CDLL(str(folder / "device.so"))
        if hasattr(self.library, "gck_overflow_take"):
            self.library.gck_overflow_take.restype = ctypes.c_void_p
            self.library.gck_overflow_give.argtypes = [ctypes.c_void_p]
            self.library.gck_overflow_is_captured.argtypes = [ctypes.c_void_p]
            self.library.gck_cuda_error.restype = ctypes.c_char_p

    def integer(self, name):
        return ctypes.c_int.in_dll(self.library, name)

    def text_of(self, error):
        return self.library.gck_cuda_error(error).decode()

    def _places(self, codec, xs, payloads):
        """gck_bytes of payloads in one buffer each, in which the scales follow the codes."""
        codes = LAYOUT[codec][0] if codec in LAYOUT else None
        at = [payload.ctypes.data for payload in payloads]
        scales = [a + -(-x.numel // GROUP) * codes if codes else None for a, x in zip(at, xs, strict=True)]
        return (Bytes * len(xs))(*map(Bytes, at, scales))

    def encode_many(self, codec, xs, payloads, hows=None):
        places = self._places(codec, xs, payloads)
        hows = hows and (How * len(xs))(*hows)
        return getattr(self.library, f"gck_{codec}_encode_cuda")((Tensor * len(xs))(*xs), places, hows, len(xs))

    def decode_many(self, codec, payloads, outs):
        places = self._places(codec, outs, payloads)
        return getattr(self.library, f"gck_{codec}_decode_cuda")(places, (Tensor * len(outs))(*outs), len(outs))

    def encode(self, codec, x, payload, word=None):
        """word: where overflow is said."""
        x.stream = 1  # the legacy default stream is never captured
        hows = [How(None, word)] if word else None
        self.library.gck_overflow_listen(ctypes.byref(x), hows and ctypes.byref(hows[0]), 1)
        return self.encode_many(codec, [x], [payload], hows)

    def decode(self, codec, payload, out):
        return self.decode_many(codec, [payload], [out])


def check_syntax(arch):
    """Every .cu file, as g++ reads it for this architecture."""
    flags = [f"-DEMULATED_ARCH={arch}", "-fsyntax-only"]
    compile_all([*gxx(), *flags, path] for path in sorted(CODEC.rglob("*.cu")))


# ---- comparisons


def assert_same(got, want, what):
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, f"{what}: {wrong.size} of {want.size} differ, first at {wrong[:5]}"


def wanted(codec, dtype, bits, shape=None, dither=None):
    """Payload, values, and whether they fit: by the oracle; of groups by the portable kernels."""
    if codec in GROUP_CODECS:
        with forced("scalar"):
            x, key = tensor(bits, dtype), dither and (dither.seed, dither.step, dither.tensor)
            payload = gradckpt.codecs.encode(x if shape is None else x.view(shape), codec, dither=key)
            return whole(payload).numpy(), bits_of(payload.decode()), True
    if codec == "raw":
        return bits.view(np.uint8), bits, True
    payload, fits = direct_oracle.encode(codec, bits, dtype)
    return payload, direct_oracle.decode(codec, payload, bits.size, dtype), fits


class Case:
    """Values that are laid out in memory, and what is to become of them."""

    def __init__(self, codec, dtype, bits, offset=0, sizes=None, strides=None, dither=None):
        self.codec, self.dither, self.layout = codec, dither, Layout(bits.size, dtype, offset, sizes, strides)
        self.want, values, self.fits = wanted(codec, dtype, bits, sizes, dither)
        self.source, self.before = self.layout.memory(bits), self.layout.memory(bits)
        self.out, self.restored = self.layout.memory(), self.layout.memory(values)
        self.payload = aligned(self.want.size + MARGIN)

    def assert_encoded(self, what):
        assert_same(self.payload[: self.want.size], self.want, f"{what}: payload")
        assert (self.payload[self.want.size :] == FILL).all(), f"{what}: wrote past the payload"
        assert_same(self.source, self.before, f"{what}: input")

    def assert_decoded(self, what):
        assert_same(self.out, self.restored, f"{what}: decoded")


def check(kernels, codec, dtype, bits, what, **layout):
    """Encode and decode `bits`, laid out as asked: the oracle's bytes, the oracle's values,
    nothing beside them."""
    case = Case(codec, dtype, bits, **layout)
    status = kernels.encode(codec, case.layout.tensor(case.source, kernels.device), case.payload)
    assert status == (0 if case.fits or kernels.device >= 0 else E_OVERFLOW), what
    case.assert_encoded(what)
    kernels.decode(codec, case.payload, case.layout.tensor(case.out, kernels.device))
    case.assert_decoded(what)
    return case.fits


def everywhere(host, device):
    """Each instruction set, chosen, and the device: (name, kernels)."""
    for isa in host.isas:
        yield isa, host.choose(isa)
    yield "cuda", device


def check_everywhere(host, device, codec, dtype, bits, **layout):
    """On every instruction set and the device; says whether the values fit."""
    return [check(kernels, codec, dtype, bits, name, **layout) for name, kernels in everywhere(host, device)][-1]


def check_together(kernels, cases):
    """Encode them by one call and decode by another; how many launches that took."""
    before, codec = kernels.integer("emulated_launches").value, cases[0].codec
    hows = [How(c.dither and ctypes.pointer(c.dither), None) for c in cases] if any(c.dither for c in cases) else None
    views = [c.layout.tensor(c.source, kernels.device) for c in cases]
    assert kernels.encode_many(codec, views, [c.payload for c in cases], hows) == 0
    for case in cases:
        case.assert_encoded("cuda")
    views = [c.layout.tensor(c.out, kernels.device) for c in cases]
    assert kernels.decode_many(codec, [c.payload for c in cases], views) == 0
    for case in cases:
        case.assert_decoded("cuda")
    return kernels.integer("emulated_launches").value - before


def check_bytes(codec, x, emulated=None, key=None):
    """The package makes the oracle's bytes of this tensor on each instruction set, and of those the
    oracle's values; so does AVX-512 as it is emulated, where the CPU has none."""
    bits, dtype, shape = bits_of(x), str(x.dtype).removeprefix("torch."), tuple(x.shape)
    noise = codec_oracle.noise_of(-(-bits.size // GROUP), *key) if key else None
    want = codec_oracle.encode(codec, bits, dtype, noise, shape)
    values = codec_oracle.decode(codec, want, bits.size, dtype, shape)
    for isa in ISAS:
        with forced(isa):
            payload = gradckpt.codecs.encode(x, codec, dither=key)
            assert_same(whole(payload).numpy(), want, f"{isa} payload")
            assert_same(bits_of(payload.decode()), values, f"{isa} decoded")
    if emulated is not None and "avx512" not in ISAS:
        emulated.choose("avx512")
        layout, payload = Layout(bits.size, dtype, sizes=shape), aligned(want.size)
        source, out = layout.memory(bits), layout.memory()
        assert emulated.encode(codec, layout.tensor(source, -1), payload, key and Dither(*key)) == 0
        emulated.decode(codec, payload, layout.tensor(out, -1))
        assert_same(payload, want, "avx512 payload")
        assert_same(layout.values(out), values, "avx512 decoded")
    return payload
