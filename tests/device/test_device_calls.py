"""What a region on a device asks of Python beside one on the CPU: calls out of the extension, whose
arguments torch parses, are counted where call_faults.c would let them fail."""

import ctypes
import sys

import native_programs
import pytest
import torch

import gradckpt
from gradckpt import _C

CALLS = (
    "PyObject_Call", "PyObject_CallFunction", "PyObject_CallMethod", "PyObject_CallFunctionObjArgs",
    "PyObject_CallMethodObjArgs", "PyObject_CallNoArgs", "PyObject_CallObject",
)  # fmt: skip
#: A generator's state, and where the memory of the input is used: forward; backward.
MORE = (5, 5)


def _names(names):
    return (ctypes.c_char_p * (len(names) + 1))(*(name.encode() for name in names), None)


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    library = ctypes.CDLL(str(native_programs.led_library(tmp_path_factory.mktemp("calls"))))
    library.call_faults_begin.argtypes = [ctypes.c_long, ctypes.py_object]
    library.call_faults_end.restype = ctypes.c_long
    library.call_faults_install(str(_C.__file__).encode(), _names(CALLS), _names([]), _names([]), _names([]))
    return library


def counts(counter, device, codec):
    """Calls of the forward and of the backward, which on a device has a thread of its own."""
    never, config = KeyboardInterrupt("is not raised"), codec and {"codec": codec, "min_numel": 0}
    for _ in range(4):  # of the first regions samples are taken
        x, backward = torch.randn(64, 128).to(device).requires_grad_() * 1, []
        counter.call_faults_begin(sys.maxsize, never)
        y = gradckpt.checkpoint(lambda t: t.sin().exp(), x, compress=config)
        forward = counter.call_faults_end()
        y.register_hook(lambda gradient: counter.call_faults_begin(sys.maxsize, never) and None)
        x.register_hook(lambda gradient, found=backward: found.append(counter.call_faults_end()))
        y.sum().backward()
    return forward, backward[0]


@pytest.mark.parametrize("codec", [None, "int8", "lossless", "fp8_e4m3"])
def test_calls_of_a_region(counter, codec):
    """Payloads and restored tensors come from torch's C interface on both."""
    host, device = (counts(counter, kind, codec) for kind in ("cpu", "virtual"))
    assert host[0] > 5
    assert host[1] > 5
    assert [device[0] <= host[0] + MORE[0], device[1] <= host[1] + MORE[1]] == [True, True], (host, device)
