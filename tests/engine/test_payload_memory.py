"""The memory of payloads: small ones are made without torch.empty (csrc/torch/fresh.c), and nothing
else differs from those that torch.empty makes; outer hooks may hand them back at any byte of a
larger buffer."""

import subprocess
import sys
import weakref

import pytest
import torch
from behaviours import Operators
from small_models import in_regions, saved
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import gradckpt

# ---- made without torch.empty ----


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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_a_mode_changes_nothing(shape, codec):
    """Under a dispatch mode torch.empty makes them."""
    torch.manual_seed(0)
    x = SHAPES[shape]()
    payload = gradckpt.codecs.encode(x, codec)
    found = payload.decode()
    with Operators() as operators:
        expected = gradckpt.codecs.encode(x, codec).decode()
    assert any(name.startswith("aten.empty") for name in operators.names)
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


# ---- pieces of larger buffers ----


#: sparse leaves dense tensors as they are: test_sparse.py.
CODECS = [c for c in gradckpt.codecs.names() if "float32" in gradckpt.codecs.info(c)["dtypes"] and c != "sparse"]


class CopiesOfBytes(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op is torch.ops.aten.clone.default and args[0].dtype == torch.uint8
        return op(*args, **(kwargs or {}))


def moved(x, offset):
    """A copy of the bytes, `offset` bytes into a buffer."""
    if x.dtype != torch.uint8:
        return x
    buffer = torch.empty(x.numel() + offset, dtype=torch.uint8)
    buffer[offset:] = x
    return buffer[offset:]


def gradient(codec, offset):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with saved_tensors_hooks(lambda t: moved(t, offset), lambda t: t):
        y = gradckpt.checkpoint(torch.sin, x * 1, compress={"codec": codec, "min_numel": 0})
    assert gradckpt.stats()["compressed"] == 1
    with CopiesOfBytes() as copies:
        y.sum().backward()
    return x.grad, copies.count


@pytest.mark.parametrize("codec", CODECS)
def test_misaligned_bytes_are_copied(codec):
    gradckpt.stats.reset()
    want, none = gradient(codec, 0)
    assert none == 0
    for offset in (1, 3, 8, 16):
        gradckpt.stats.reset()
        got, copies = gradient(codec, offset)
        assert torch.equal(got, want)
        has_scales = gradckpt.codecs.info(codec)["sizes"]["float32"][4] > 0
        assert copies == (offset % 16 != 0) + (has_scales and offset % 4 != 0)


WRONG = {
    "dtype": lambda b: b.float(),
    "bits": lambda b: b.to(torch.uint16),
    "sign": lambda b: b.view(torch.int8),
    "dimensions": lambda b: b[None],
    "size": lambda b: b[1:],
    "strides": lambda b: b.repeat_interleave(2)[::2],
    "device": lambda b: b.to("meta"),
    "layout": lambda b: b.to_sparse(),
}


@pytest.mark.parametrize("change", WRONG)
@pytest.mark.parametrize("use", [in_regions, saved])
def test_bytes_that_hooks_changed_are_refused(change, use):
    gradckpt.stats.reset()
    x = torch.randn(1000, requires_grad=True) * 1
    with saved_tensors_hooks(lambda t: t, lambda t: WRONG[change](t) if t.dtype == torch.uint8 else t):
        y = use(torch.sin, x, {"codec": "raw", "min_numel": 0})
    with pytest.raises(RuntimeError, match=r"an outer saved-tensor hook returned another tensor .*torch.Tensor"):
        y.sum().backward()
    assert gradckpt.stats()["originals_alive"] == 0  # of those that came back


@pytest.mark.parametrize("codec", CODECS)
def test_operators_name_the_error(codec):
    x = torch.randn(1000)
    payload = torch.ops.gradckpt.encode(x, codec)
    want = torch.ops.gradckpt.decode(payload, codec, [1000], torch.float32)
    for offset in (1, 3, 8, 16):
        piece = moved(payload, offset)
        if offset == 16:
            assert torch.equal(torch.ops.gradckpt.decode(piece, codec, [1000], torch.float32), want)
            torch.ops.gradckpt.decode_many([piece], codec, [x])
            assert torch.equal(x, want)
            continue
        with pytest.raises(RuntimeError, match=r"a payload at a multiple of 16 bytes; pass payload.clone\(\)"):
            torch.ops.gradckpt.decode(piece, codec, [1000], torch.float32)
        with pytest.raises(RuntimeError, match=r"a payload at a multiple of 16 bytes; pass payload.clone\(\)"):
            torch.ops.gradckpt.decode_many([payload, piece], codec, [x, torch.empty(1000)])
