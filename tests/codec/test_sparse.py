"""`sparse`: every bit comes back, in as many bytes as the values that are not zero need."""

import ctypes
import gc
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
from processes import case

import gradckpt

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
WORDS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
ZEROS = (0.0, 0.5, 0.85, 0.95, 0.99, 1.0)


def values(n, zeros, dtype, seed=0):
    """Bits of any kind, NaN, infinities, -0 and subnormals among them; a part is zero."""
    rng = np.random.default_rng([41, n, seed])
    bits = rng.integers(1, np.iinfo(WORDS[dtype]).max, n, WORDS[dtype], endpoint=True)
    bits[rng.random(n) < 0.1] = 1 << (8 * bits.itemsize - 1)  # -0
    bits[rng.random(n) < 0.1] >>= 8  # subnormals, and a few zeros
    bits[rng.random(n) < zeros] = 0
    return bits


def payload_of(bits, dtype):
    return gradckpt.codecs.encode(tensor(bits, dtype), "sparse")


def check(bits, dtype, what):
    payload = payload_of(bits, dtype)
    assert_same(payload.codes.numpy(), oracle.encode_sparse("sparse", bits, dtype)[0], f"{what} payload")
    assert payload.nbytes == payload.codes.numel() <= bits.nbytes
    assert_same(bits_of(payload.decode()), bits, f"{what} decoded")
    assert_same(oracle.decode_sparse("sparse", payload.codes.numpy(), bits.size, dtype), bits, f"{what} oracle")


# ---- values ----


@every_dtype
def test_every_bit_comes_back(dtype):
    lengths = (*range(301), 1000, 4095, 4096, 4097, 8191, 12289, 40000)
    for isa in ISAS:
        with forced(isa):
            for n in lengths if isa == ISAS[0] else lengths[::7]:
                for zeros in ZEROS:
                    with case(isa, n, zeros):
                        check(values(n, zeros, dtype), dtype, isa)


@every_dtype
def test_one_value(dtype):
    """Of each place in a block, and of each sign of zero."""
    lone = 1 << (np.dtype(WORDS[dtype]).itemsize * 8 - 1)
    for i in (0, 1, 7, 8, 63, 64, 127, 128, 4095, 4096, 8999):
        bits = np.zeros(9000, WORDS[dtype])
        bits[i] = lone
        check(bits, dtype, i)
        assert payload_of(bits, dtype).nbytes == oracle.head_of(9000) + bits.itemsize


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern(dtype):
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    check(every, dtype, "as the tensor")
    check(np.stack([every, np.zeros_like(every)], axis=1).ravel(), dtype, "beside zeros")


@every_dtype
@pytest.mark.parametrize("layout", STRIDED)
def test_strides(dtype, layout):
    sizes, strides = STRIDED[layout]
    extent = 2 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    x = tensor(values(extent, 0.8, dtype), dtype).as_strided(sizes, strides, 1)
    payload = gradckpt.codecs.encode(x, "sparse")
    assert torch.equal(payload.codes, gradckpt.codecs.encode(x.contiguous(), "sparse").codes)
    assert_same(bits_of(payload.decode()), bits_of(x), layout)


@every_dtype
def test_threads(dtype):
    """Each has its own blocks, whose places are known before any is written."""
    bits = np.concatenate([values(300000, zeros, dtype) for zeros in (0.9, 0.1, 1.0, 0.5)])
    want = oracle.encode_sparse("sparse", bits, dtype)[0]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            payload = payload_of(bits, dtype)
            assert_same(payload.codes.numpy(), want, f"{threads} threads")
            assert_same(bits_of(payload.decode()), bits, f"{threads} threads")
    finally:
        torch.set_num_threads(before)


# ---- sizes ----


@pytest.mark.parametrize(("zeros", "most"), [(0.5, 9.1), (0.85, 3.5), (0.95, 1.9), (0.99, 1.3)])
def test_bits_per_value(zeros, most):
    x = tensor(values(2**20, 0, "bfloat16") | 1, "bfloat16")
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < zeros] = 0
    assert gradckpt.codecs.encode(x, "sparse").nbytes * 8 / x.numel() <= most


def test_never_more_than_the_tensor():
    """Dense values are the payload, without a bitmap."""
    for n in (1, 20, 100, 5000):
        x = torch.randn(n).bfloat16()
        payload = gradckpt.codecs.encode(x, "sparse")
        assert payload.nbytes == 2 * n
        assert torch.equal(payload.codes.view(torch.bfloat16), x)
        assert torch.equal(payload.decode(), x)


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


@pytest.mark.parametrize("isa", sorted({"portable", "avx2"} & {"portable", *ISAS}))
@pytest.mark.parametrize("size", [16, 32])
def test_kernels_stay_within_the_room(host_kernels, isa, size):
    """To the byte: a place is next to that of another thread, or at the end of memory."""
    pack = getattr(host_kernels.library, f"gck_{isa}_pack_nonzeros{size}")
    unpack = getattr(host_kernels.library, f"gck_{isa}_unpack_nonzeros{size}")
    pack.restype, runs = ctypes.c_int64, ctypes.c_int64(8)
    for zeros in (0.0, 0.3, 0.5, 0.9, 0.98, 1.0):
        bits = values(512, zeros, "float32" if size == 32 else "bfloat16")
        count, bitmap, want = int(np.count_nonzero(bits)), np.empty(64, np.uint8), bits[bits != 0]
        x = BeforeAHole(bits.nbytes)
        x.bytes[:] = bits.view(np.uint8)
        address = ctypes.c_void_p(x.bytes.ctypes.data)
        for room in (count, count + 1, count + 3, count + 4, 512):
            packed = BeforeAHole(room * bits.itemsize)
            packed.bytes[:] = oracle.FILL
            to = ctypes.c_void_p(packed.bytes.ctypes.data)
            at = [ctypes.c_void_p(bitmap.ctypes.data), to, ctypes.c_int64(room)]
            assert pack(address, runs, *at) == count
            assert_same(packed.bytes[: want.nbytes], want.view(np.uint8), f"{zeros} {room}")
            assert_same(bitmap, oracle.bitmap_of(bits != 0), "bitmap")
            out = BeforeAHole(bits.nbytes)
            unpack(*at, runs, ctypes.c_void_p(out.bytes.ctypes.data))
            assert_same(out.bytes, bits.view(np.uint8), f"{zeros} {room} back")
        if count > 0:
            short = BeforeAHole((count - 1) * bits.itemsize)
            to = ctypes.c_void_p(short.bytes.ctypes.data)
            assert pack(address, runs, ctypes.c_void_p(bitmap.ctypes.data), to, ctypes.c_int64(count - 1)) == -1


# ---- the device ----


class OnDevice:
    """One tensor and a payload of so many bytes, with a margin that no kernel may touch."""

    def __init__(self, kernels, bits, dtype, room, layout=None, codec="sparse"):
        self.codec, self.oracle = codec, codec_oracle.oracle_of(codec)
        self.kernels, self.layout, self.room = kernels, layout or Layout(bits.size, dtype), room
        self.source, self.payload = self.layout.memory(), aligned(room + 64)
        self.layout.values(self.source)[self.layout.where] = bits

    def tensor(self, memory):
        x = self.layout.tensor(memory, 1)
        x.room = self.room
        return x

    def encode(self):
        """The payload, and what the device says: (overflow, part of all values)."""
        word = self.kernels.library.gck_overflow_take(1)
        ctypes.c_uint32.from_address(word).value = 0
        assert self.kernels.encode(self.codec, self.tensor(self.source), self.payload, word) == 0
        said = ctypes.c_uint32.from_address(word).value
        self.kernels.library.gck_overflow_give(word)
        assert (self.payload[self.room :] == oracle.FILL).all()
        return self.payload[: self.room], (said & 3, said >> 2)

    def decode(self):
        out = self.layout.memory()
        expected = out.copy()
        wanted = self.oracle.decode(self.codec, self.payload[: self.room], self.layout.n, self.layout.dtype)
        self.layout.values(expected)[self.layout.where] = wanted
        self.kernels.decode(self.codec, self.payload, self.tensor(out))
        assert_same(out, expected, "decoded")
        return self.layout.values(out)[self.layout.where]


@pytest.fixture
def same(device_kernels):
    def run(bits, dtype, room, fits=True, layout=None):
        device = OnDevice(device_kernels, bits, dtype, room, layout)
        want, wanted_fits = oracle.encode_sparse("sparse", bits, dtype, room)
        payload, (answer, part) = device.encode()
        assert_same(payload, want, "payload")
        assert (answer, wanted_fits) == (OVERFLOW_NONE if fits else OVERFLOW_FOUND, fits)
        whole = np.count_nonzero(bits) * 65536
        assert part == (-(-whole // bits.size) if room < bits.nbytes else 0)
        restored = device.decode()
        if fits:
            assert_same(restored, bits, "restored")

    return run


def rooms(bits):
    """As much as is needed, and a twentieth more values."""
    count = np.count_nonzero(bits)
    most = bits.nbytes - 1
    return [min(oracle.head_of(bits.size) + n * bits.itemsize, most) for n in (count, count + count // 20)]


@every_dtype
def test_device(same, dtype):
    for n in (200, 4095, 4096, 4097, 40000):
        for zeros in (0.3, *ZEROS[1:]):
            bits = values(n, zeros, dtype)
            for room in rooms(bits):
                with case(n, zeros, room):
                    same(bits, dtype, room)


@every_dtype
def test_device_without_enough_room(same, dtype):
    """A block whose values do not all fit has none: NaN, and nothing beyond the payload."""
    bits = values(30000, 0.6, dtype)
    count, head = np.count_nonzero(bits), oracle.head_of(30000)
    for values_that_fit in (count - 1, count // 2, 100, 0):
        same(bits, dtype, head + values_that_fit * bits.itemsize, fits=False)


def test_device_that_is_given_less_than_the_bitmap(device_kernels):
    bits = values(5000, 0.5, "bfloat16")
    device = OnDevice(device_kernels, bits, "bfloat16", oracle.head_of(5000) - 1)
    assert device_kernels.encode("sparse", device.tensor(device.source), device.payload) == -6  # GCK_E_RANGE
    assert (device.payload == oracle.FILL).all()


@every_dtype
def test_device_with_room_for_the_tensor(same, dtype):
    bits = values(5000, 0.0, dtype)
    same(bits, dtype, bits.nbytes)


@every_dtype
@pytest.mark.parametrize("layout", STRIDED)
def test_device_strides(same, dtype, layout):
    sizes, strides = STRIDED[layout]
    bits = values(int(np.prod(sizes)), 0.8, dtype)
    same(bits, dtype, rooms(bits)[0], layout=Layout(bits.size, dtype, 1, sizes, strides))


@pytest.mark.soak
def test_many_blocks_on_the_device(same):
    """More than one round of the kernel that finds the places."""
    bits = np.zeros(4096 * 4099, np.uint16)
    bits[:: 4096 * 3 + 1] = 7
    bits[-1] = 9
    same(bits, "bfloat16", rooms(bits)[0])


# ---- bad input ----


@every_dtype
def test_damaged_payloads(device_kernels, dtype):
    """Any bytes decode to something, the same everywhere; nothing beyond them is touched."""
    rng = np.random.default_rng(3)
    for n in (200, 4096, 9000):
        bits = values(n, 0.7, dtype)
        for damage in ("all", "bitmap", "places", "last place"):
            payload = payload_of(bits, dtype).codes.clone().numpy()
            own = {"all": slice(None), "bitmap": slice(16 * -(-n // 128)), "places": slice(16 * -(-n // 128), None)}
            if damage == "last place":
                head = oracle.head_of(n)
                payload[head - 8 : head].view(np.uint64)[0] = 2**64 - 5
            else:
                payload[own[damage]] = rng.integers(0, 256, payload[own[damage]].size)
            want = oracle.decode_sparse("sparse", payload, n, dtype)
            device = OnDevice(device_kernels, bits, dtype, payload.size)
            device.payload[: payload.size] = payload
            assert_same(device.decode(), want, damage)
            made = payload_of(bits, dtype)
            made.codes.numpy()[:] = payload
            assert_same(bits_of(made.decode()), want, f"{damage} on the host")


def test_dtypes():
    with pytest.raises(TypeError, match=r"cannot take this tensor of dtype torch\.int32 with codec 'sparse'"):
        gradckpt.codecs.encode(torch.zeros(200, dtype=torch.int32), "sparse")
    with pytest.raises(RuntimeError, match="'sparse': this codec does not take this dtype"):
        torch.ops.gradckpt.encode(torch.zeros(200, dtype=torch.bool), "sparse")


def test_operators():
    """Their sizes do not depend on the values: it is a copy."""
    x = torch.randn(5000).relu()
    data = torch.ops.gradckpt.encode(x, "sparse")
    assert torch.equal(data.view(torch.float32), x)
    assert torch.equal(torch.ops.gradckpt.decode(data, "sparse", [5000], torch.float32), x)


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
