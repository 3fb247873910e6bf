"""`sparse` and `sparse_int8`: as many bytes as the values that are not zero need. `sparse` gives
every bit back; of `sparse_int8` zeros are exact, and what is not zero keeps its sign and errs by
less than a step."""

import ctypes
import gc
import itertools
import mmap
import sys

import codec_oracle
import direct_oracle as oracle
import numpy as np
import pytest
import torch
from codec_inputs import DTYPES, bits_of, tensor
from codec_kernels import OVERFLOW_FOUND, OVERFLOW_NONE, STRIDED, Layout, aligned, assert_same
from codec_libraries import ISAS, forced
from oracle_values import MAX, to_bits, to_float
from processes import case

import gradckpt

every_codec = pytest.mark.parametrize("codec", ["sparse", "sparse_int8"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
ZEROS = (0.0, 0.5, 0.9, 0.99, 1.0)


def any_values(n, zeros, dtype):
    """Bits of any kind, NaN, infinities, -0 and subnormals among them; a part is zero."""
    rng, word = np.random.default_rng([41, n]), codec_oracle.WORDS[dtype]
    bits = rng.integers(1, np.iinfo(word).max, n, word, endpoint=True)
    bits[rng.random(n) < 0.1] = 1 << (8 * bits.itemsize - 1)  # -0
    bits[rng.random(n) < 0.1] >>= 8  # subnormals, and a few zeros
    bits[rng.random(n) < zeros] = 0
    return bits


def ordinary(n, zeros, dtype, scale=1.0):
    rng = np.random.default_rng([43, n])
    bits = to_bits(rng.standard_normal(n, np.float32) * np.float32(scale), dtype).copy()
    bits[rng.random(n) < zeros] = 0
    return bits


def count_of(codec, bits):
    """How many values a payload has."""
    return int(np.count_nonzero(bits if codec == "sparse" else oracle.nonzeros(bits)))


def nbytes_of(codec, count, bits):
    """Of a payload that has room for so many values."""
    if codec == "sparse":
        return oracle.head_of(bits.size) + count * bits.itemsize
    return oracle.nbytes_of(count, bits.size)


def check(codec, bits, dtype, what):
    payload = gradckpt.codecs.encode(tensor(bits, dtype), codec)
    want, _ = oracle.encode(codec, bits, dtype)
    want = bits.view(np.uint8) if codec == "sparse" and want.size > bits.nbytes else want
    assert payload.nbytes == want.size
    assert_same(payload.codes.numpy(), want, f"{what} payload")
    restored = bits_of(payload.decode())
    assert_same(restored, oracle.decode(codec, want, bits.size, dtype), f"{what} decoded")
    if codec == "sparse":
        assert_same(restored, bits, f"{what} restored")
    return restored


# ---- values ----


@every_codec
@every_dtype
@pytest.mark.parametrize("values", [any_values, ordinary])
def test_bytes_equal_oracle(codec, dtype, values):
    lengths = (*range(0, 301, 1 if codec == "sparse" else 37), 1000, 4095, 4096, 4097, 9000)
    for isa in ISAS:
        with forced(isa):
            for n, zeros in itertools.product(lengths if isa == ISAS[0] else lengths[::7], ZEROS):
                with case(isa, n, zeros):
                    check(codec, values(n, zeros, dtype), dtype, isa)


@every_codec
@every_dtype
def test_one_value(codec, dtype):
    """Of each place in a block."""
    for i in (0, 1, 7, 8, 63, 64, 127, 128, 4095, 4096, 8999):
        bits = np.zeros(9000, codec_oracle.WORDS[dtype])
        bits[i] = 0x3C00
        check(codec, bits, dtype, i)


@every_codec
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern(codec, dtype):
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    check(codec, np.stack([every, np.zeros_like(every)], axis=1).ravel(), dtype, "beside zeros")


@every_codec
@every_dtype
def test_threads(codec, dtype):
    """Each has its own blocks, whose places are known before any is written."""
    x = tensor(np.concatenate([any_values(300000, zeros, dtype) for zeros in (0.9, 0.1, 1.0, 0.5)]), dtype)
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            payload = gradckpt.codecs.encode(x, codec)
            found.add((payload.codes.numpy().tobytes(), bits_of(payload.decode()).tobytes()))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@every_dtype
def test_zeros_and_signs_survive(dtype):
    """The mask of a ReLU, and the sign of everything that is not zero; -0 is zero."""
    for scale in (1.0, 1e-6, 1e4):
        bits = ordinary(20000, 0.5, dtype, scale)
        bits[::17] = 1  # the smallest of all, beside others
        bits[5::31] = signs = 1 << (8 * bits.itemsize - 1)
        restored, nonzero = check("sparse_int8", bits, dtype, scale), oracle.nonzeros(bits)
        assert_same(oracle.nonzeros(restored), nonzero, "zeros")
        assert_same(restored[nonzero] & signs, bits[nonzero] & signs, "signs")
        assert (restored[~nonzero] == 0).all()


@every_dtype
def test_special_values_stay(dtype):
    """NaN, infinities and the largest; between 1e30 and that one they become it."""
    special = [np.nan, np.inf, -np.inf, MAX[dtype], -MAX[dtype]]
    large, become = ([], []) if dtype == "float16" else ([2e30, -3e35], [MAX[dtype], -MAX[dtype]])
    x = np.concatenate([np.float32(special + large), np.linspace(-2, 2, 500, dtype=np.float32)])
    restored = to_float(check("sparse_int8", to_bits(x, dtype), dtype, "special"), dtype)
    np.testing.assert_array_equal(restored[: len(special + large)], np.float32(special + become))


@every_dtype
def test_error_bound(dtype):
    """Of the largest of its 128 packed values."""
    x = tensor(ordinary(100000, 0.6, dtype), dtype)
    error = (gradckpt.codecs.encode(x, "sparse_int8").decode().double() - x.double()).abs()
    unit = torch.finfo(x.dtype).eps
    assert error.max() <= gradckpt.codecs.info("sparse_int8")["max_error"] * x.abs().max().double() * (1 + unit)


# ---- kernels ----


class BeforeAHole:
    """Memory that ends where no page is."""

    def __init__(self, nbytes):
        libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
        whole = -(-nbytes // page) * page
        self.pages = mmap.mmap(-1, whole + page)
        self.begin = np.frombuffer(self.pages, np.uint8)[:whole]
        self.hole = ctypes.c_void_p(self.begin.ctypes.data + whole)
        assert libc.mprotect(self.hole, page, 0) == 0
        self.bytes = self.begin[whole - nbytes :]
        self.at = ctypes.c_void_p(self.bytes.ctypes.data)


@pytest.mark.parametrize("isa", sorted({"portable", "avx2"} & {"portable", *ISAS}))
@pytest.mark.parametrize("size", [16, 32])
def test_kernels_stay_within_the_room(host_kernels, isa, size):
    """To the byte: a place is next to that of another thread, or at the end of memory."""
    pack = getattr(host_kernels.library, f"gck_{isa}_pack_nonzeros{size}")
    unpack = getattr(host_kernels.library, f"gck_{isa}_unpack_nonzeros{size}")
    pack.restype, runs = ctypes.c_int64, ctypes.c_int64(8)
    for zeros in (0.0, 0.3, 0.5, 0.9, 0.98, 1.0):
        bits = any_values(512, zeros, "float32" if size == 32 else "bfloat16")
        count, bitmap, want = int(np.count_nonzero(bits)), BeforeAHole(64), bits[bits != 0]
        x = BeforeAHole(bits.nbytes)
        x.bytes[:] = bits.view(np.uint8)
        for room in (count, count + 1, count + 3, count + 4, 512):
            packed, out = BeforeAHole(room * bits.itemsize), BeforeAHole(bits.nbytes)
            assert pack(x.at, runs, bitmap.at, packed.at, ctypes.c_int64(room)) == count
            assert_same(packed.bytes[: want.nbytes], want.view(np.uint8), f"{zeros} {room}")
            assert_same(bitmap.bytes, oracle.bitmap_of(bits != 0), "bitmap")
            unpack(bitmap.at, packed.at, ctypes.c_int64(room), runs, out.at)
            assert_same(out.bytes, bits.view(np.uint8), f"{zeros} {room} back")
        if count > 0:
            short = BeforeAHole((count - 1) * bits.itemsize)
            assert pack(x.at, runs, bitmap.at, short.at, ctypes.c_int64(count - 1)) == -1


# ---- the device ----


class OnDevice:
    """One tensor and a payload of so many bytes, with a margin that no kernel may touch."""

    def __init__(self, kernels, codec, bits, dtype, room, sizes=None, strides=None):
        self.kernels, self.codec, self.room = kernels, codec, room
        self.layout = Layout(bits.size, dtype, 0 if sizes is None else 1, sizes, strides)
        self.source, self.payload = self.layout.memory(bits), aligned(room + 64)

    def tensor(self, memory):
        x = self.layout.tensor(memory, 1)
        x.room = self.room
        return x

    def encode(self):
        """What the device says: (overflow, part of all values)."""
        word = self.kernels.library.gck_overflow_take(1)
        ctypes.c_uint32.from_address(word).value = 0
        assert self.kernels.encode(self.codec, self.tensor(self.source), self.payload, word) == 0
        said = ctypes.c_uint32.from_address(word).value
        self.kernels.library.gck_overflow_give(word)
        assert (self.payload[self.room :] == oracle.FILL).all()
        return said & 3, said >> 2

    def decode(self):
        out, wanted = (
            self.layout.memory(),
            oracle.decode(self.codec, self.payload[: self.room], self.layout.n, self.layout.dtype),
        )
        assert self.kernels.decode(self.codec, self.payload, self.tensor(out)) == 0
        assert_same(out, self.layout.memory(wanted), "decoded")
        return self.layout.values(out)[self.layout.where]


@pytest.fixture
def same(device_kernels):
    def run(codec, bits, dtype, room, fits=True, sizes=None, strides=None):
        device = OnDevice(device_kernels, codec, bits, dtype, room, sizes, strides)
        want, wanted_fits = oracle.encode(codec, bits, dtype, room)
        answer, part = device.encode()
        count, whole = count_of(codec, bits), codec == "sparse" and room >= bits.nbytes
        written = slice(nbytes_of(codec, count, bits)) if fits and not whole else slice(None)
        assert_same(device.payload[: device.room][written], want[written], "payload")
        assert (answer, wanted_fits) == (OVERFLOW_NONE if fits else OVERFLOW_FOUND, fits)
        assert part == (0 if whole else -(-count * 65536 // bits.size))
        restored = device.decode()
        assert codec != "sparse" or not fits or (restored == bits).all()

    return run


@every_codec
@every_dtype
@pytest.mark.parametrize("values", [any_values, ordinary])
def test_device(same, codec, dtype, values):
    """As much room as is needed, more, and enough for the tensor."""
    for n, zeros in itertools.product((200, 4096, 4097, 20000), (0.0, 0.6, 0.95, 1.0)):
        bits = values(n, zeros, dtype)
        least = nbytes_of(codec, count_of(codec, bits), bits)
        more = least + (80 if codec == "sparse" else 77)
        rooms = (least, more) if codec == "sparse_int8" else (least, more, bits.nbytes)
        rooms = (bits.nbytes,) if codec == "sparse" and more >= bits.nbytes else rooms
        for room in rooms:
            with case(n, zeros, room):
                same(codec, bits, dtype, room)


@every_codec
@every_dtype
def test_device_without_enough_room(same, codec, dtype):
    """A block whose values do not all fit has none: NaN, and nothing beyond the payload."""
    bits = ordinary(30000, 0.6, dtype)
    count = count_of(codec, bits)
    for that_fit in (count - 1, count // 2, 100, 0):
        same(codec, bits, dtype, nbytes_of(codec, that_fit, bits), fits=False)


def test_device_that_is_given_less_than_the_bitmap(device_kernels):
    bits = ordinary(5000, 0.5, "bfloat16")
    device = OnDevice(device_kernels, "sparse", bits, "bfloat16", oracle.head_of(5000) - 1)
    assert device_kernels.encode("sparse", device.tensor(device.source), device.payload) == -6  # GCK_E_RANGE
    assert (device.payload == oracle.FILL).all()


@every_codec
@every_dtype
def test_device_strides(same, codec, dtype):
    for layout, (sizes, strides) in STRIDED.items():
        bits = ordinary(int(np.prod(sizes)), 0.8, dtype)
        with case(layout):
            room = nbytes_of(codec, count_of(codec, bits), bits)
            same(codec, bits, dtype, room, sizes=sizes, strides=strides)


@pytest.mark.soak
def test_many_blocks_on_the_device(same):
    """More than one round of the kernel that finds the places."""
    bits = np.zeros(4096 * 4099, np.uint16)
    bits[:: 4096 * 3 + 1] = 7
    bits[-1] = 9
    same("sparse", bits, "bfloat16", nbytes_of("sparse", count_of("sparse", bits), bits))


# ---- bad input ----


@every_dtype
def test_damaged_payloads(device_kernels, dtype):
    """Any bytes decode to something, the same everywhere; nothing beyond them is touched."""
    rng = np.random.default_rng(3)
    for n in (200, 4096, 9000):
        bits = any_values(n, 0.7, dtype)
        for damage in ("all", "bitmap", "places", "last place"):
            made = gradckpt.codecs.encode(tensor(bits, dtype), "sparse")
            payload = made.codes.numpy()
            own = {"all": slice(None), "bitmap": slice(16 * -(-n // 128)), "places": slice(16 * -(-n // 128), None)}
            if damage == "last place":
                head = oracle.head_of(n)
                payload[head - 8 : head].view(np.uint64)[0] = 2**64 - 5
            else:
                payload[own[damage]] = rng.integers(0, 256, payload[own[damage]].size)
            want = oracle.decode_sparse("sparse", payload, n, dtype)
            device = OnDevice(device_kernels, "sparse", bits, dtype, payload.size)
            device.payload[: payload.size] = payload
            assert_same(device.decode(), want, damage)
            assert_same(bits_of(made.decode()), want, f"{damage} on the host")


# ---- regions ----


def test_an_argument_that_is_refused_twice_keeps_its_references():
    x = torch.randn(300, requires_grad=True) * 1
    config = {"codec": "sparse", "min_numel": 0}
    before = sys.getrefcount(x)
    for _ in range(5):
        y = gradckpt.checkpoint(lambda *, a, b: (a * b[0] * b[1]).sin(), a=x, b=[x, x], compress=config)
        (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(g, torch.autograd.grad((x * x * x).sin().sum(), x)[0])
    del y
    gc.collect()
    assert sys.getrefcount(x) == before


@pytest.mark.parametrize("saved", [False, True])
def test_dense_tensors_are_kept_as_they_are(saved):
    """A payload as large as the tensor would only be a copy."""
    x = torch.randn(5000, requires_grad=True)
    gradckpt.stats.reset()
    if saved:
        with gradckpt.compress_saved({"codec": "sparse", "min_numel": 0}):
            y = (x * 1).sin()
    else:
        y = gradckpt.checkpoint(torch.sin, x * 1, compress={"codec": "sparse", "min_numel": 0})
    assert gradckpt.stats()["uncompressed"].get("too few zeros for the codec") == 1
    (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(g, x.detach().cos())
