"""What CUDA remembers of an error: the next call reports it, once,
and the next good launch succeeds. And what the user reads of it.

The emulation keeps the last error of a thread until it is asked for, as the runtime does, and one
that a kernel caused for ever."""

import contextlib
import ctypes

import numpy as np
import pytest
from codec_kernels import E_DEVICE, E_DTYPE, Layout, aligned, nbytes

INVALID_VALUE, NO_MEMORY, INVALID_CONFIGURATION, NO_DEVICE = 1, 2, 9, 101
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
        return self.device.decode(self.codec, self.payload, self.x)


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


@pytest.mark.parametrize("codec", CODECS)
def test_error_that_others_left(device, codec):
    """It may come from an unchecked launch: it is raised, as torch's next launch would."""
    device.integer("emulated_last_error").value = INVALID_VALUE
    before = device.integer("emulated_launches").value
    assert Work(device, codec).encode() == INVALID_VALUE
    assert device.integer("emulated_launches").value == before, "what is reported was not launched"
    assert_good(device)


# ---- in words

NO_IMAGE = "no kernel image is available for execution on the device"
EARLIER = "an earlier kernel may have failed: set CUDA_LAUNCH_BLOCKING=1"
#: What the user reads behind "gradckpt: codec '...' could not encode: CUDA error cudaError".
SENTENCES = {
    1: "InvalidValue: invalid argument",
    2: "MemoryAllocation; pass a smaller batch, as the device is out of memory.",
    35: "InsufficientDriver: CUDA driver version is insufficient for CUDA runtime version; update the driver",
    98: "InvalidDeviceFunction: invalid device function; rebuild with GRADCKPT_CUDA_ARCHS=7.5;9.0 "
    "(built for 8.0;9.0+PTX)",
    100: "NoDevice: no CUDA-capable device is detected; check nvidia-smi and CUDA_VISIBLE_DEVICES",
    209: f"NoKernelImageForDevice: {NO_IMAGE}; rebuild with GRADCKPT_CUDA_ARCHS=7.5;9.0 (built for 8.0;9.0+PTX)",
    222: "UnsupportedPtxVersion: the provided PTX was compiled with an unsupported toolchain.; update the driver",
    803: "SystemDriverMismatch: system has unsupported display driver / cuda driver combination; update the driver",
    900: "StreamCaptureUnsupported: operation not permitted when stream is capturing; "
    "run the region once before the capture",
    901: "StreamCaptureInvalidated: operation failed due to a previous error during capture; "
    "run the region once before the capture",
}
STICKY = {
    214: "ECCUncorrectable: uncorrectable ECC error encountered",
    220: "NvlinkUncorrectable: uncorrectable NVLink error detected during the execution",
    700: "IllegalAddress: an illegal memory access was encountered",
    702: "LaunchTimeout: the launch timed out and was terminated",
    710: "Assert: device-side assert triggered",
    714: "HardwareStackError: hardware stack error",
    715: "IllegalInstruction: an illegal instruction was encountered",
    716: "MisalignedAddress: misaligned address",
    717: "InvalidAddressSpace: operation not supported on global/shared address space",
    718: "InvalidPc: invalid program counter",
    719: "LaunchFailure: unspecified launch failure",
}


@contextlib.contextmanager
def failing_launch(device, error, after=0):
    """One launch fails with this error, after some that succeed; others are not tried."""
    launches = device.integer("emulated_launches")
    before = launches.value
    with value_of(device, "emulated_launch_error", error), value_of(device, "emulated_good_launches", after):
        yield
    assert launches.value == before + after


def check_sentence(device, error, end):
    text = device.text_of(error)
    assert text == f"CUDA error cudaError{end}"
    assert len(f"gradckpt: codec 'lossless' could not encode: {text}".split()) <= 25


@pytest.mark.parametrize("error", SENTENCES)
def test_error_has_a_sentence_and_leaves_the_tensors(device, error):
    work = Work(device, "lossless")
    work.source[:] = 7
    before = work.source.copy()
    with failing_launch(device, error):
        assert work.encode() == error
    check_sentence(device, error, SENTENCES[error])
    assert np.array_equal(work.source, before)
    assert_good(device)


@pytest.mark.parametrize("error", STICKY)
@pytest.mark.parametrize("codec", CODECS)
def test_error_that_an_earlier_kernel_may_have_caused(device, codec, error):
    """As an assert of the user's own kernel, which says so at our call: every call says so until
    the process ends, and nothing is launched."""
    work, launches = Work(device, codec), device.integer("emulated_launches")
    before = launches.value
    with value_of(device, "emulated_sticky_error", error):
        assert (work.encode(), work.decode(), work.encode()) == (error,) * 3
        check_sentence(device, error, f"{STICKY[error]}; {EARLIER}")
    assert launches.value == before
    device.integer("emulated_last_error").value = 0  # the process ends, as it were
    assert np.all(work.source == 0)


def test_error_without_a_name(device):
    assert device.text_of(12345) == "CUDA error unrecognized error code: unrecognized error code"


@pytest.mark.parametrize(
    ("cards", "advice"),
    [
        ((90, 90), "rebuild with GRADCKPT_CUDA_ARCHS=9.0 (built for 8.0;9.0+PTX)"),
        ((61, 120), "rebuild with GRADCKPT_CUDA_ARCHS=12.0 (built for 8.0;9.0+PTX)"),
        ((61, 70), "pass compress=None (capability 6.1;7.0, below 7.5)"),
        ((), "rebuild with GRADCKPT_CUDA_ARCHS (built for 8.0;9.0+PTX)"),
    ],
)
def test_no_kernel_for_this_card(fresh_device, cards, advice):
    device = fresh_device()
    device.integer("emulated_devices").value = len(cards)
    capability = (ctypes.c_int * 2).in_dll(device.library, "emulated_capability")
    capability[: len(cards)] = cards
    check_sentence(device, 209, f"NoKernelImageForDevice: {NO_IMAGE}; {advice}")
    assert device.integer("emulated_last_error").value == 0


def test_out_of_memory_is_known_to_frameworks(device):
    memory = pytest.importorskip("accelerate.utils.memory")
    said = f"gradckpt: codec 'int8' could not encode: {device.text_of(NO_MEMORY)}"
    assert memory.should_reduce_batch_size(RuntimeError(said))


# ---- in the middle of an encode


def test_out_of_memory_between_two_tensors(device):
    """What failed and what follows is not written; the tensors are intact, and the same call works
    when there is memory."""
    works = [Work(device, "bf16") for _ in range(3)]
    for number, work in enumerate(works):
        work.source[:] = number + 1
    xs, payloads = [work.x for work in works], [work.payload for work in works]
    with failing_launch(device, NO_MEMORY, after=1):
        assert device.encode_many("bf16", xs, payloads) == NO_MEMORY
    assert all((work.source == number + 1).all() for number, work in enumerate(works))
    assert (payloads[1] == payloads[2]).all()
    assert (payloads[1] != 2).all(), "nothing was written"
    assert device.encode_many("bf16", xs, payloads) == 0
    assert_good(device)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_out_of_memory_between_two_kernels(device, after):
    """Kernels that read what a failed one should have written are not launched."""
    n = 5000
    layout = Layout(n, "float32")
    source, payload = layout.memory(), aligned(4 * n + 4096)
    source[:] = 0
    layout.values(source)[::50] = 0x3F800000
    before, x = source.copy(), layout.tensor(source, 0)
    x.room = 2 * n
    with failing_launch(device, NO_MEMORY, after=after):
        assert device.encode("sparse", x, payload) == NO_MEMORY
    assert np.array_equal(source, before)
    assert device.encode("sparse", x, payload) == 0
    out = layout.memory()
    back = layout.tensor(out, 0)
    back.room = x.room
    device.decode("sparse", payload, back)
    assert np.array_equal(layout.values(out), layout.values(source))
    assert_good(device)


# ---- captures


@pytest.mark.parametrize("codec", CODECS)
def test_first_launch_in_a_capture(fresh_device, codec):
    """CUDA loads a kernel when it is launched first, which a capture in global mode forbids."""
    device = fresh_device()
    device.integer("emulated_lazy").value = 1
    with value_of(device, "emulated_capture", 1):
        work = Work(device, codec)
        assert (work.encode(), work.decode()) == (0, 0)
        assert device.integer("emulated_capture_mode").value == 0, "the thread's own mode is put back"
    assert_good(device)
