"""Small payloads and restored tensors on the CPU are made without torch.empty (csrc/torch/fresh.c);
nothing else differs from those that torch.empty makes."""

import subprocess
import sys
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradckpt

SHAPES = {
    "scalar": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0, 3),
    "row": lambda: torch.randn(512),
    "channels last": lambda: torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(16, 32).t(),
    "many dimensions": lambda: torch.randn(2, 1, 3, 1, 2, 4),
    "half": lambda: torch.randn(300).half(),
    "bfloat16": lambda: torch.randn(7, 5).bfloat16(),
    "just large": lambda: torch.randn(65536),
    "just small": lambda: torch.randn(65535),
}


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_a_mode_changes_nothing(shape, codec):
    """Under a dispatch mode torch.empty makes them."""
    torch.manual_seed(0)
    x = SHAPES[shape]()
    payload = gradckpt.codecs.encode(x, codec)
    found = payload.decode()
    with Watch() as watch:
        expected = gradckpt.codecs.encode(x, codec).decode()
    assert any(name.startswith("aten::empty") for name in watch.calls)
    assert torch.equal(found, expected)
    assert torch.equal(payload.decode(), expected)
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.stride() == expected.stride()
    assert found._version == 0
    assert type(found) is torch.Tensor
    assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    found.resize_(1000)  # its storage is torch's own
    payload.codes[:] = payload.codes.clone()
    assert torch.equal(payload.decode(), expected)


def test_the_arrays_are_tensors_that_share_the_bytes():
    payload = gradckpt.codecs.encode(torch.randn(512), "int8")
    before, codes, scales = payload.decode(), payload.codes, payload.scales
    assert payload.codes is codes
    assert payload.scales is scales
    assert {codes.dtype, scales.dtype} == {torch.uint8}
    assert codes.numel() + scales.numel() == payload.nbytes
    zero = gradckpt.codecs.encode(torch.zeros(512), "int8")
    codes.copy_(zero.codes)
    scales.copy_(zero.scales)
    assert not payload.decode().any()
    assert before.any()
    del payload
    assert len(bytes(codes.tolist())) == 512


def test_no_mode_sees_the_arrays_made():
    payload = gradckpt.codecs.encode(torch.randn(30, 100), "int8")
    expected = payload.decode()
    with FakeTensorMode(allow_non_fake_inputs=True):
        arrays = payload.codes, payload.scales
    assert [type(each) for each in arrays] == [torch.Tensor, torch.Tensor]
    assert torch.equal(payload.decode(), expected)


@pytest.mark.parametrize("array", ["codes", "scales"])
def test_an_array_that_was_resized_is_refused(array):
    payload = gradckpt.codecs.encode(torch.randn(512), "int8")
    getattr(payload, array).resize_(100000)
    with pytest.raises(RuntimeError, match="returned another tensor"):
        payload.decode()


def test_each_restore_is_a_tensor_of_its_own_and_dies():
    x = torch.randn(512, requires_grad=True).exp()
    with gradckpt.compress_saved({"codec": "int8", "min_numel": 0}):
        y = x.square()
        y.sum().exp()  # then what uses y is known: the square does not wait for what may amplify it
    first, second = y.grad_fn._saved_self, y.grad_fn._saved_self
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    alive = weakref.ref(first)
    del first
    assert alive() is None


@pytest.mark.parametrize("codec", ["int8", "raw"])
def test_memory_comes_back(codec):
    """Torch's allocator is told of each payload, and nothing is left of a step."""

    def step():
        with gradckpt.compress_saved({"codec": codec, "min_numel": 0}):
            x = torch.randn(512, requires_grad=True)
            y = x.exp()
            for _ in range(20):
                y = y.square() * 0.5
        y.sum().backward()

    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    moved = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    nbytes = gradckpt.codecs.encode(torch.zeros(512), codec).nbytes
    assert moved.count(nbytes) >= 10
    assert sum(moved) == 0
    assert gradckpt.stats()["live_bytes"] == 0


INFERENCE = """
import torch, gradckpt
with torch.inference_mode():
    found = gradckpt.codecs.encode(torch.ones(512), "int8").decode()
    assert found.is_inference()
with torch.device("meta"):
    assert gradckpt.codecs.encode(torch.ones(512, device="cpu"), "int8").decode().device.type == "cpu"
"""

WITHOUT = "import torch; del torch._C._aoti.unsafe_alloc_void_ptr_from_tensor"
REFUSED = "import torch; torch._C._aoti.unsafe_alloc_void_ptr_from_tensor = lambda x: 7"


@pytest.mark.parametrize("before", ["", WITHOUT, REFUSED], ids=["as it is", "without the name", "another argument"])
def test_other_torches(before):
    code = f"{before}{INFERENCE}\nprint(gradckpt._engine.torch_objects.adopt_tensor is None)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout == f"{bool(before)}\n"
