"""The virtual device's memory: when blocks can be used again, and who may not read them."""

import signal
import subprocess
import sys

import pytest
import torch
import virtual_device
from checkout import HELPERS


def read_late(record):
    """A copy on another stream still reads a block that is freed and used again."""
    side = torch.Stream(device="virtual")
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
    return host, moved


def test_without_record_stream():
    host, moved = read_late(record=False)
    assert not moved
    assert host.eq(5).all()
    reports = virtual_device.reports()
    assert ("copy to host", "allocate") in [(r["first"]["name"], r["second"]["name"]) for r in reports]


def test_with_record_stream():
    host, moved = read_late(record=True)
    assert moved
    assert host.eq(1).all()
    assert virtual_device.reports() == []


def test_a_recorded_block_comes_back():
    side = torch.Stream(device="virtual")
    x = torch.ones(1000, device="virtual")
    at = x.data_ptr()
    x.record_stream(side)
    stats = torch.virtual.memory_stats()
    side.wait_stream(torch.virtual.current_stream())
    with side:
        torch.zeros(3).pin_memory().to("virtual", non_blocking=True)
    del x
    assert torch.virtual.memory_stats()["active.all.current"] == stats["active.all.current"]
    assert torch.virtual.memory_stats()["allocation.all.current"] < stats["allocation.all.current"] + 1
    side.synchronize()
    assert torch.empty(1000, device="virtual").data_ptr() == at


def test_a_block_belongs_to_its_stream():
    side = torch.Stream(device="virtual")
    x = torch.ones(1000, device="virtual")
    at = x.data_ptr()
    del x
    with side:
        assert torch.empty(1000, device="virtual").data_ptr() != at
    assert torch.empty(1000, device="virtual").data_ptr() == at


def test_blocks_are_cut_and_joined():
    torch.virtual.empty_cache()
    reserved = torch.virtual.memory_reserved()
    many = [torch.empty(1 << 20, dtype=torch.uint8, device="virtual") for _ in range(4)]
    assert torch.virtual.memory_reserved() == reserved + (4 << 20)  # two of 2 MiB
    large = torch.empty(11 << 20, dtype=torch.uint8, device="virtual")
    assert torch.virtual.memory_reserved() == reserved + (4 << 20) + (12 << 20)
    first = min(t.data_ptr() for t in many)
    del many, large
    torch.virtual.synchronize()
    assert torch.empty(11 << 20, dtype=torch.uint8, device="virtual").numel()
    assert torch.virtual.memory_reserved() == reserved + (16 << 20)
    torch.virtual.empty_cache()
    assert torch.virtual.memory_reserved() == reserved
    assert first


def test_memory_runs_out_and_comes_back():
    capacity, torch_uint8 = virtual_device.CAPACITY, torch.uint8
    held = torch.empty(100, dtype=torch_uint8, device="virtual:1")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(capacity + 1, dtype=torch_uint8, device="virtual:1")
    assert held.numel() == 100


def test_freed_memory_is_not_used():
    """The tensor is gone, its address was kept."""
    x = torch.ones(1000, device="virtual")
    storage = x.untyped_storage()
    y = torch.empty(0, device="virtual").set_(storage)
    assert y.sum().item() > 0
    assert virtual_device.reports() == []


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
        ("ctypes.c_float.from_address(x.data_ptr()).value = 1", False),
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
