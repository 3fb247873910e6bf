"""The virtual device as gradckpt sees it: gck_device_kind, whose kernels are queued."""

import ctypes
import functools

import pytest
import torch
import virtual_device
from c_structures import Bytes, DeviceKind, Dither, How, Tensor
from codec_library import NUMBERS, CodecLibrary

OK, BAD_ADDRESS = 0, 700
PENDING, NONE, FOUND = 0, 1, 2
CODECS = ("raw", "fp8_e4m3", "fp8_e5m2", "int8", "int8_plain", "int6", "int4", "bf16", "fp16", "lossless")


@functools.cache
def codecs():
    library = CodecLibrary(virtual_device.build_host_codecs().parent)
    library.library.gck_codec_find.restype = ctypes.c_void_p
    return library


@functools.cache
def kind():
    virtual_device.load_kernels()
    return DeviceKind.from_address(virtual_device.device_kind())


def view(x):
    """gck_tensor."""
    numbers = ctypes.c_int64 * x.dim()
    sizes, strides = numbers(*x.shape), numbers(*x.stride())
    dtype = NUMBERS[str(x.dtype).removeprefix("torch.")]
    given = None if x.is_contiguous() else strides
    stream = ctypes.c_void_p()
    assert kind().stream(x.device.index, ctypes.byref(stream)) == 0
    index = x.device.index
    return Tensor(x.data_ptr(), x.numel(), x.dim(), sizes, given, strides, dtype, index, stream.value)


def place(codec, x, payload):
    """gck_bytes: the scales follow the codes."""
    total = codecs().nbytes(codec, x.numel(), str(x.dtype).removeprefix("torch."))
    assert payload.numel() >= total
    scales = 2 * -(-x.numel() // 128) * (2 if codec == "int4" else 1)
    has = codec.startswith(("int", "fp8"))
    return Bytes(payload.data_ptr(), payload.data_ptr() + total - scales if has else None)


def encode(codec, x, payload, dither=None, overflow=None):
    how = How(ctypes.pointer(dither) if dither else None, overflow)
    descriptor = codecs().library.gck_codec_find(codec.encode())
    one, to = view(x), place(codec, x, payload)
    at = [ctypes.addressof(a) for a in (one, to, how)]
    return kind().encode(descriptor, *at, 1), one, to


def decode(codec, payload, out):
    descriptor = codecs().library.gck_codec_find(codec.encode())
    one, to = view(out), place(codec, out, payload)
    return kind().decode(descriptor, ctypes.addressof(to), ctypes.addressof(one), 1)


def payload_for(codec, x):
    n = codecs().nbytes(codec, x.numel(), str(x.dtype).removeprefix("torch."))
    return torch.empty(n, dtype=torch.uint8, device=x.device)


def of_the_host(codec, x):
    """The payload that the host's codec makes."""
    x = x.cpu().contiguous()
    payload = torch.zeros(codecs().nbytes(codec, x.numel(), str(x.dtype).removeprefix("torch.")), dtype=torch.uint8)
    dtype = str(x.dtype).removeprefix("torch.")
    assert codecs().encode(codec, x.data_ptr(), x.numel(), dtype, payload.data_ptr()) in (OK, -4)
    return payload


def test_what_it_says_of_itself():
    driver, runtime = ctypes.c_int(), ctypes.c_int()
    assert kind().name == b"virtual"
    assert kind().check(ctypes.byref(driver), ctypes.byref(runtime)) == OK
    x = torch.ones(1, device="virtual:1")
    capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsule = torch._C._to_dlpack(x)
    data, device_type, index = (  # DLTensor begins with them
        field.from_address(capsule_pointer(capsule, b"dltensor") + offset).value
        for field, offset in ((ctypes.c_void_p, 0), (ctypes.c_int32, 8), (ctypes.c_int32, 12))
    )
    assert (data, device_type, index) == (x.data_ptr(), kind().dlpack, 1)
    assert kind().error(BAD_ADDRESS)


def test_the_stream_is_the_current_one():
    side = torch.Stream(device="virtual:1")
    first, second, third = (ctypes.c_void_p() for _ in range(3))
    kind().stream(1, ctypes.byref(first))
    with side:
        kind().stream(1, ctypes.byref(second))
        kind().stream(0, ctypes.byref(third))
    assert len({first.value, second.value, third.value}) == 3


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("device", [0, 1])
def test_bytes_are_those_of_the_host(codec, device):
    torch.manual_seed(0)
    x = torch.randn(1000, device=f"virtual:{device}")
    payload, out = payload_for(codec, x), torch.empty_like(x)
    assert encode(codec, x, payload)[0] == OK
    assert decode(codec, payload, out) == OK
    want = of_the_host(codec, x)
    assert torch.equal(payload.cpu(), want)
    assert (out - x).abs().max().item() < 4
    assert virtual_device.kernel_errors() == 0


def test_mask_and_strides():
    x = torch.rand(40, 50, device="virtual") > 0.5
    payload, out = payload_for("mask", x), torch.empty_like(x)
    assert encode("mask", x.t(), payload)[0] == OK
    assert decode("mask", payload, out.t()) == OK
    assert torch.equal(out, x)


def test_arguments_are_copied():
    """What the call got may be gone before the kernel runs."""
    x = torch.randn(40, 64, device="virtual")
    payload, other = payload_for("int8", x), payload_for("int8", x)
    dither = Dither(1, 2, 3)
    status, one, to = encode("int8", x.t(), payload, dither)
    assert status == OK
    assert virtual_device.pending(torch.virtual.current_stream()) > 0
    dither.seed = 9
    ctypes.memset(one.sizes, 0, 16)
    ctypes.memset(one.strides, 0, 16)
    ctypes.memset(ctypes.addressof(to), 0, ctypes.sizeof(to))
    torch.virtual.synchronize()
    encode("int8", x.t(), other, Dither(1, 2, 3))
    assert torch.equal(payload, other)
    encode("int8", x.t(), other, Dither(9, 2, 3))
    assert not torch.equal(payload, other)


def test_overflow_is_told_when_the_work_is_done():
    words = kind().words(0, 4096)
    for i, (value, answer) in enumerate([(1.0, NONE), (1e6, FOUND)]):
        x = torch.full((1000,), value, device="virtual")
        payload = payload_for("fp16", x)
        words[i] = PENDING
        assert encode("fp16", x, payload, overflow=ctypes.addressof(words.contents) + 4 * i)[0] == OK
        assert words[i] == PENDING
        torch.virtual.synchronize()
        assert words[i] == answer


def test_what_is_not_device_memory_is_refused():
    x, payload = torch.ones(1000), torch.empty(4000, dtype=torch.uint8, device="virtual")
    there = torch.ones(1000, device="virtual")
    one, to = view(there), place("raw", there, payload)
    one.data = x.data_ptr()
    descriptor = codecs().library.gck_codec_find(b"raw")
    assert kind().encode(descriptor, ctypes.addressof(one), ctypes.addressof(to), None, 1) == BAD_ADDRESS


def test_a_kernel_on_another_stream():
    """Without an event the decode has not run, and is reported; with one neither."""
    side = torch.Stream(device="virtual")
    for ordered in (False, True):
        x = torch.randn(1000, device="virtual")
        payload, out = payload_for("raw", x), torch.zeros_like(x)
        encode("raw", x, payload)
        side.wait_stream(torch.virtual.current_stream())
        with side:
            decode("raw", payload, out)
        if ordered:
            torch.virtual.current_stream().wait_stream(side)
        assert torch.equal(out, x) is ordered
        reports = virtual_device.reports()
        assert [(r["first"]["name"], r["second"]["writes"]) for r in reports] == [("decode raw", False)] * (not ordered)
        torch.virtual.synchronize()


def test_an_input_that_is_written_too_early():
    """The encode is queued on another stream, and its input changes before it ran."""
    side = torch.Stream(device="virtual")
    x = torch.ones(1000, device="virtual")
    payload = payload_for("raw", x)
    side.wait_stream(torch.virtual.current_stream())
    with side:
        encode("raw", x, payload)
    x.fill_(2)
    torch.virtual.synchronize()
    assert payload.view(torch.float32).eq(2).all()
    assert [(r["first"]["name"], r["second"]["name"]) for r in virtual_device.reports()] == [
        ("encode raw", "aten::fill_.Scalar")
    ]


def test_a_payload_that_is_too_short():
    x = torch.ones(1000, device="virtual")
    payload = payload_for("raw", x)
    short = torch.empty(2000, dtype=torch.uint8, device="virtual")
    one, to = view(x), place("raw", x, payload)
    to.codes = short.data_ptr()
    descriptor = codecs().library.gck_codec_find(b"raw")
    assert kind().encode(descriptor, ctypes.addressof(one), ctypes.addressof(to), None, 1) == OK
    torch.virtual.synchronize()
    assert "bytes beyond the block" in {r["kind"] for r in virtual_device.reports()}


@pytest.mark.parametrize("codec", ["int8", "fp16", "lossless"])
def test_host_codecs_in_place_of_kernels(codec):
    x = torch.randn(1000, device="virtual")
    payload, other, out = payload_for(codec, x), payload_for(codec, x), torch.empty_like(x)
    encode(codec, x, payload)
    virtual_device.use_host_codecs(True)
    try:
        torch.virtual.synchronize()
        encode(codec, x, other)
        decode(codec, other, out)
        torch.virtual.synchronize()
    finally:
        virtual_device.use_host_codecs(False)
    assert torch.equal(payload, other)
    assert (out - x).abs().max().item() < 0.2


def test_a_launch_that_fails_says_so_at_once():
    """Too many dimensions, as with CUDA; a stream of another device; not a stream."""
    x = torch.randn(*[4] * 9, device="virtual")[(slice(None, None, 2),) * 9]
    payload = payload_for("int8", x)
    before = virtual_device.pending(torch.virtual.current_stream())
    assert encode("int8", x, payload)[0] == -2
    assert virtual_device.pending(torch.virtual.current_stream()) == before
    x = torch.randn(1000, device="virtual")
    descriptor = codecs().library.gck_codec_find(b"raw")
    for wrong in (view(torch.randn(1, device="virtual:1")).stream, 12345):
        one, to = view(x), place("raw", x, payload_for("raw", x))
        one.stream = wrong
        assert kind().encode(descriptor, ctypes.addressof(one), ctypes.addressof(to), None, 1) == 400
