"""A step that was made before runs no Python of the package,
and asks a plain tensor only for what it needs."""

import os
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torchs_own import BUILT_FOR_A_DEVICE

import gradckpt

pytestmark = pytest.mark.skipif(BUILT_FOR_A_DEVICE, reason="torch is built for a device, which each region looks for")
WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
LINEAR = torch.nn.Linear(16, 16)
INT8 = gradckpt.CompressionConfig("int8", min_numel=0)
PACKAGE = os.path.dirname(gradckpt.__file__)

FACTS = ["requires_grad", "is_leaf", "_version", "layout", "is_neg"]
KEPT = ["is_leaf", "_version"]
ENCODED = [*FACTS, "_version"]  # at the end: was it written to?

#: The region, what the forward asks, and what the recompute.
REGIONS = {
    "by reference": (lambda x: gradckpt.checkpoint(_region, x), KEPT, KEPT),
    "encoded": (lambda x: gradckpt.checkpoint(_region, x, compress=INT8), ENCODED, ["empty", "requires_grad_"]),
    "too small": (lambda x: gradckpt.checkpoint(_region, x, compress="int8"), [*FACTS, "nbytes", "_version"], KEPT),
}


def _region(x):
    return (x @ WEIGHT).sin()


def hidden():
    return torch.randn(8, 16).requires_grad_() * 1


class Questions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(resolve_name(func).removesuffix(".__get__").split(".")[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", REGIONS)
def test_what_a_region_asks(name):
    gradckpt.stats.reset()
    run, forward, recompute = REGIONS[name]
    run(hidden()).sum().backward()  # the first region of a process asks more
    x = hidden()
    with Questions() as asked:
        node = run(x).grad_fn
    assert asked.names == [*forward, "matmul", "sin", "grad_fn"]
    with Questions() as asked:
        assert node._saved_self is not None  # runs the region again
    # At the end, of what was saved: was it written to?
    assert asked.names == [*recompute, "matmul", "sin", *["_version"] * 3]


def python_of(step):
    """The package's functions that it calls."""
    called = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return called


#: Once a step, whatever the number of regions.
NOTED = ["note_step", "_now"]

STEPS = {
    "by reference": (lambda x: gradckpt.checkpoint(_region, x), NOTED),
    "encoded": (lambda x: gradckpt.checkpoint(_region, x, compress=INT8), NOTED),
    "a name": (lambda x: gradckpt.checkpoint(_region, x, compress="int8"), NOTED),
    "one node": (
        lambda x: gradckpt.SelectiveRecompute.apply(LINEAR, None, x, compress=INT8),
        ["method", "method", *NOTED],
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_python_that_a_step_runs(name):
    run, calls = STEPS[name]
    for _ in range(2):
        gradckpt.checkpoint(
            _region, hidden(), compress=INT8
        ).sum().backward()  # after two such steps nothing is checked
        run(hidden()).sum().backward()
    assert python_of(lambda: run(hidden()).sum().backward()) == calls
