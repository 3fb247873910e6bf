"""The virtual device tells of what CUDA would leave to chance: reads without an order, memory that
is used after it was freed, the host's use of device memory, and what a capture does not permit. The
other tests of this folder rest on that; that it computes right is for them to show."""

import ctypes
import functools
import signal
import subprocess
import sys
import threading

import pytest
import torch
import virtual_device
from checkout import HELPERS
from codec_libraries import NUMBERS, Bytes, CodecLibrary, DeviceKind, Tensor


def side_stream():
    return torch.Stream(device="virtual")


def pinned(*values):
    return torch.tensor(values).pin_memory()


# ---- memory


def test_new_memory_is_not_a_number():
    x = torch.ones(1000, device="virtual")
    at = x.data_ptr()
    del x
    y = torch.empty(1000, device="virtual")
    assert y.data_ptr() == at
    assert y.isnan().all()


READS = """
import ctypes, sys
sys.path.insert(0, {helpers!r})
import torch, virtual_device
virtual_device.load()
x = torch.ones(1000, device="virtual")
{line}
print("survived")
"""


@pytest.mark.parametrize(
    ("line", "survives"),
    [
        ("ctypes.c_float.from_address(x.data_ptr()).value", False),
        ("ctypes.memset(x.data_ptr() + 100, 0, 8)", False),
        ("x.cpu()", True),
    ],
)
def test_the_host_may_not_use_device_memory(line, survives):
    code = READS.format(helpers=str(HELPERS), line=line)
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if survives:
        assert (made.returncode, made.stdout) == (0, "survived\n")
        return
    assert made.returncode == -signal.SIGSEGV
    assert made.stdout == ""
    assert "virtual device: the host used device memory: address 0x" in made.stderr
    assert "of device 0, in an allocated block" in made.stderr
    assert 'File "<string>", line 7' in made.stderr


@pytest.mark.parametrize("record", [True, False])
def test_a_block_that_another_stream_still_reads(record):
    """A copy still reads a block that is freed and used again, unless record_stream told of it."""
    side = side_stream()
    host = torch.zeros(1000).pin_memory()
    x = torch.ones(1000, device="virtual")
    at = x.data_ptr()
    side.wait_stream(torch.virtual.current_stream())
    with side:
        host.copy_(x, non_blocking=True)
    if record:
        x.record_stream(side)
    del x
    y = torch.full((1000,), 5.0, device="virtual")
    moved = y.data_ptr() != at
    torch.virtual.synchronize()
    reports = [(r["first"]["name"], r["second"]["name"]) for r in virtual_device.reports()]
    assert moved is record
    assert host.eq(1 if record else 5).all()
    assert (("copy to host", "allocate") in reports) is not record
    assert not (record and reports)


# ---- the order of streams


def copied_on_the_side(ordered):
    """A copy from the host that another stream makes, and what this stream reads."""
    side = side_stream()
    x = torch.zeros(3, device="virtual")
    torch.virtual.synchronize()
    with side:
        x.copy_(pinned(1.0, 2.0, 3.0), non_blocking=True)
        event = side.record_event()
    if ordered:
        torch.virtual.current_stream().wait_event(event)
    values = (x + 0).tolist()
    torch.virtual.synchronize()
    return values


def test_with_an_event():
    assert copied_on_the_side(ordered=True) == [1, 2, 3]
    assert virtual_device.reports() == []


def test_without_an_event():
    virtual_device.places(True)
    try:
        assert copied_on_the_side(ordered=False) == [0, 0, 0]
    finally:
        virtual_device.places(False)
    (report,) = virtual_device.reports()
    first, second = report["first"], report["second"]
    assert (report["kind"], report["nbytes"], first["name"]) == ("race", 12, "copy to device")
    assert (first["writes"], second["writes"]) == (True, False)
    assert second["stream"] == 0 != first["stream"]
    assert all(one["place"].startswith("test_virtual_device.py:") for one in (first, second))
    assert first["place"] != second["place"]


def test_at_random_without_an_event():
    seen = set()
    for seed in range(20):
        virtual_device.random(seed)
        seen.add(copied_on_the_side(ordered=False)[0])
        torch.virtual.synchronize()
    virtual_device.late()
    assert seen == {0, 1}
    assert len(virtual_device.reports()) >= 1


def test_a_read_before_a_write():
    """The other stream overwrites what this one's copy has yet to read."""
    side = side_stream()
    x, host = torch.ones(3, device="virtual"), torch.empty(3).pin_memory()
    torch.virtual.synchronize()
    with side:
        host.copy_(x, non_blocking=True)
    x.fill_(7)
    torch.virtual.synchronize()
    assert host.tolist() == [7, 7, 7]
    (report,) = virtual_device.reports()
    assert (report["first"]["writes"], report["second"]["writes"]) == (False, True)


def test_parts_without_overlap():
    side = side_stream()
    x = torch.zeros(4, 6, device="virtual")
    torch.virtual.synchronize()
    with side:
        x[:2].fill_(1)
        x[2:, ::2].fill_(1)
    x[2:, 1::2].fill_(2)
    assert virtual_device.reports() == []
    x[1:3].fill_(3)
    assert {r["kind"] for r in virtual_device.reports()} == {"race"}
    torch.virtual.synchronize()


@pytest.mark.parametrize("how", ["event", "stream", "device", "query"])
def test_the_host_waits(how):
    side = side_stream()
    x = torch.zeros(3, device="virtual")
    torch.virtual.synchronize()
    with side:
        x.copy_(pinned(1.0, 2.0, 3.0), non_blocking=True)
        event = side.record_event()
    assert virtual_device.pending(side) == 1
    if how == "event":
        event.synchronize()
    elif how == "stream":
        side.synchronize()
    elif how == "device":
        torch.virtual.synchronize()
    else:
        assert not event.query()
        while not event.query():
            pass
    assert virtual_device.pending(side) == 0
    assert (x + 0).tolist() == [1, 2, 3]
    assert virtual_device.reports() == []


def test_what_one_thread_waited_for_another_does_not_know():
    side = side_stream()
    x = torch.zeros(3, device="virtual")
    torch.virtual.synchronize()
    with side:
        x.add_(1)
    thread = threading.Thread(target=side.synchronize)
    thread.start()
    thread.join()
    x.add_(1)
    assert len(virtual_device.reports()) == 1


def test_copies_from_pageable_memory_take_a_copy_first():
    x, here = torch.zeros(3, device="virtual"), torch.tensor([1.0, 2.0, 3.0])
    x.copy_(here, non_blocking=True)
    here.fill_(9)
    assert x.tolist() == [1, 2, 3]
    here = here.pin_memory()
    x.copy_(here, non_blocking=True)
    here.fill_(4)
    assert x.tolist() == [4, 4, 4]  # read when the copy ran: too late


# ---- gradckpt's kernels, which are queued as torch's are


@functools.cache
def codecs():
    library = CodecLibrary(virtual_device.build_host_codecs().parent)
    library.library.gck_codec_find.restype = ctypes.c_void_p
    return library


class Kernels:
    """gck_device_kind of the device, and a codec's call through it: encode(x, payload), decode."""

    def __init__(self):
        virtual_device.load_kernels()
        self.kind = DeviceKind.from_address(virtual_device.device_kind())
        self.raw = codecs().library.gck_codec_find(b"raw")

    def arguments(self, x, payload):
        stream = ctypes.c_void_p()
        assert self.kind.stream(x.device.index, ctypes.byref(stream)) == 0
        sizes = (ctypes.c_int64 * 1)(x.numel())
        view = Tensor(x.data_ptr(), x.numel(), 1, sizes, None, None, NUMBERS["float32"], x.device.index, stream.value)
        return view, Bytes(payload.data_ptr(), None)

    def encode(self, x, payload):
        view, place = self.arguments(x, payload)
        return self.kind.encode(self.raw, ctypes.addressof(view), ctypes.addressof(place), None, 1)

    def decode(self, payload, out):
        view, place = self.arguments(out, payload)
        return self.kind.decode(self.raw, ctypes.addressof(place), ctypes.addressof(view), 1)


@pytest.fixture(scope="module")
def kernels():
    return Kernels()


def payload_of(numbers):
    return torch.empty(4 * numbers, dtype=torch.uint8, device="virtual")


@pytest.mark.parametrize("ordered", [True, False])
def test_a_kernel_on_another_stream(kernels, ordered):
    """Without an event the decode has not run, and is reported; with one neither."""
    side = side_stream()
    x = torch.randn(1000, device="virtual")
    payload, out = payload_of(1000), torch.zeros_like(x)
    assert kernels.encode(x, payload) == 0
    side.wait_stream(torch.virtual.current_stream())
    with side:
        assert kernels.decode(payload, out) == 0
    if ordered:
        torch.virtual.current_stream().wait_stream(side)
    assert torch.equal(out, x) is ordered
    reports = virtual_device.reports()
    assert [(r["first"]["name"], r["second"]["writes"]) for r in reports] == [("decode raw", False)] * (not ordered)
    torch.virtual.synchronize()


def test_an_input_that_is_written_too_early(kernels):
    """The encode is queued on another stream, and its input changes before it ran."""
    side = side_stream()
    x, payload = torch.ones(1000, device="virtual"), payload_of(1000)
    side.wait_stream(torch.virtual.current_stream())
    with side:
        assert kernels.encode(x, payload) == 0
    x.fill_(2)
    torch.virtual.synchronize()
    assert payload.view(torch.float32).eq(2).all()
    assert [(r["first"]["name"], r["second"]["name"]) for r in virtual_device.reports()] == [
        ("encode raw", "aten::fill_.Scalar")
    ]


def test_a_payload_that_is_too_short(kernels):
    assert kernels.encode(torch.ones(1000, device="virtual"), payload_of(500)) == 0
    torch.virtual.synchronize()
    assert "bytes beyond the block" in {r["kind"] for r in virtual_device.reports()}


def test_what_is_not_device_memory_is_refused(kernels):
    view, place = kernels.arguments(torch.ones(1000, device="virtual"), payload_of(1000))
    here = torch.ones(1000)
    view.data = here.data_ptr()
    assert kernels.kind.encode(kernels.raw, ctypes.addressof(view), ctypes.addressof(place), None, 1) == 700


# ---- captures


def capture(function):
    graph = virtual_device.Graph()
    torch.virtual.synchronize()
    with virtual_device.graph(graph):
        out = function()
    return graph, out


def test_a_replay_computes_again_in_memory_of_its_own():
    x = torch.ones(1000, device="virtual")
    graph, out = capture(lambda: (x * 2).add_(1) * 3)
    others = [torch.zeros(1000, device="virtual") for _ in range(20)]
    torch.virtual.synchronize()
    x.fill_(5)
    graph.replay()
    assert out.eq(33).all()
    assert not any(other.any() for other in others)
    x.fill_(1)
    graph.replay()
    assert out.eq(9).all()


@pytest.mark.parametrize(
    "refused",
    [
        lambda x, event: x.sum().item(),
        lambda x, event: x.cpu(),
        lambda x, event: x.nonzero(),
        lambda x, event: torch.virtual.synchronize(),
        lambda x, event: torch.accelerator.current_stream().synchronize(),
        lambda x, event: event.query(),
        lambda x, event: event.synchronize(),
        lambda x, event: x.copy_(torch.ones(3)),
    ],
    ids=["item", "cpu", "nonzero", "device", "stream", "query", "event", "pageable"],
)
def test_refused_in_a_capture(refused):
    x = torch.ones(3, device="virtual")
    event = torch.accelerator.current_stream().record_event()
    torch.virtual.synchronize()
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        capture(lambda: refused(x, event))
    refused(x, event)


def test_an_order_that_a_capture_lacks():
    first, second = side_stream(), side_stream()
    x = torch.ones(3, device="virtual")

    def both(joined):
        now = torch.accelerator.current_stream()
        for side in (first, second):
            side.wait_stream(now)
            with side:
                x.add_(1)
        for side in (first, second)[:joined]:
            now.wait_stream(side)

    capture(lambda: both(2))
    assert {r["kind"] for r in virtual_device.reports()} == {"race"}
    with pytest.raises(RuntimeError, match="unjoined work"):
        capture(lambda: both(1))
    torch.virtual.synchronize()
    virtual_device.reports()
