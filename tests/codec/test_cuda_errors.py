"""What CUDA remembers of an error: the next call reports it, once,
and the next good launch succeeds.

The emulation keeps the last error of a thread until it is asked for, as the runtime does, and one
that a kernel caused for ever."""

import contextlib
import ctypes

import numpy as np
import pytest
from c_structures import Bytes
from direct_kernels import E_DEVICE, E_DTYPE, Layout, aligned, nbytes

INVALID_VALUE, NO_MEMORY, INVALID_CONFIGURATION, NO_DEVICE, MISALIGNED = 1, 2, 9, 101, 716
CODECS = ("bf16", "mask", "lossless")


@pytest.fixture(scope="module")
def device(fresh_device):
    return fresh_device()


class Work:
    """One tensor of a codec, its payload, and how to encode or decode it."""

    def __init__(self, device, codec, n=5000):
        dtype = "bool" if codec == "mask" else "float32"
        self.device, self.codec, layout = device, codec, Layout(n, dtype)
        self.source, self.payload = layout.memory(), aligned(nbytes(codec, dtype, n))
        self.source[:] = 0
        self.x = layout.tensor(self.source, 0)

    def encode(self, word=None):
        return self.device.encode(self.codec, self.x, self.payload, word)

    def decode(self):
        payloads = (Bytes * 1)(Bytes(self.payload.ctypes.data, None))
        return getattr(self.device.library, f"gck_{self.codec}_decode_cuda")(payloads, ctypes.byref(self.x), 1)


@contextlib.contextmanager
def value_of(device, name, value):
    variable = device.integer(name)
    before, variable.value = variable.value, value
    yield
    variable.value = before


def assert_good(device):
    """Nothing is left of what went wrong, and the next launches are good."""
    assert device.integer("emulated_last_error").value == 0
    for codec in CODECS:
        work = Work(device, codec)
        assert (work.encode(), work.decode()) == (0, 0)
    assert device.integer("emulated_device").value == 0


def fail_words(device, work):
    with value_of(device, "emulated_host_allocs", -1):
        assert device.library.gck_overflow_take(0) is None


def fail_device(device, work):
    work.x.device = 7
    assert work.encode() == NO_DEVICE
    assert work.decode() == NO_DEVICE


def fail_dtype(device, work):
    work.x.dtype = 1 if work.codec != "lossless" else 3
    assert work.encode() == E_DTYPE
    assert work.decode() == E_DTYPE


def fail_dimensions(device, work):
    work.x.ndim = 9
    work.x.sizes = (ctypes.c_int64 * 9)(*[2] * 9)
    work.x.strides = (ctypes.c_int64 * 9)(*[1 << d for d in range(9)])
    assert work.encode() == E_DEVICE


def fail_grid(device, work):
    """More blocks than a grid has: the launch itself fails."""
    work.x.numel = 1 << 45
    assert work.encode() == INVALID_CONFIGURATION
    assert work.decode() == INVALID_CONFIGURATION


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("fail", [fail_words, fail_device, fail_dtype, fail_dimensions, fail_grid])
def test_own_error_is_said_once(device, fail, codec):
    fail(device, Work(device, codec))
    assert_good(device)


def test_every_status_of_every_call_leaves_nothing(device):
    """One failure after the other without a look in between."""
    for codec in CODECS:
        for fail in (fail_words, fail_device, fail_dtype, fail_dimensions, fail_grid):
            fail(device, Work(device, codec))
    assert_good(device)


@pytest.mark.parametrize("codec", CODECS)
def test_error_that_others_left(device, codec):
    """It may come from an unchecked launch: it is raised, as torch's next launch would."""
    device.integer("emulated_last_error").value = INVALID_VALUE
    assert Work(device, codec).encode() == INVALID_VALUE
    assert_good(device)


@pytest.mark.parametrize("codec", CODECS)
def test_crashed_kernel(device, codec):
    """Every call says so until the process ends, and nothing is launched."""
    work = Work(device, codec)
    before = device.integer("emulated_launches").value
    with value_of(device, "emulated_sticky_error", MISALIGNED):
        for _ in range(3):
            assert (work.encode(), work.decode()) == (MISALIGNED, MISALIGNED)
    assert device.integer("emulated_launches").value == before
    device.integer("emulated_last_error").value = 0  # the process ends, as it were
    assert np.all(work.source == 0)
