"""torch.ops.gradckpt over a torch that fails: every call gives a result or an error in words,
never neither."""

import ctypes

import pytest
from checkout import NATIVE
from native_programs import gcc

OPERATORS = ("encode", "decode", "encode_many", "decode_many")


@pytest.fixture(scope="module")
def operators(tmp_path_factory):
    library = tmp_path_factory.mktemp("operators") / "operators.so"
    options = ["-O1", "-g", "-fPIC", "-shared", "-Wno-unused-parameter", "-Wno-clobbered"]
    gcc(*options, NATIVE / "operator_faults.c", "-o", library)
    loaded = ctypes.CDLL(str(library))
    loaded.message.restype = ctypes.c_char_p
    return loaded


@pytest.mark.parametrize("cuda", [0, 1])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_answer_of_torch_may_be_an_error(operators, operator, cuda):
    count = operators.sweep(OPERATORS.index(operator), cuda)
    assert count > 10, f"answer {-count}: {operators.message()!r}"


@pytest.mark.parametrize("operator", OPERATORS)
def test_torch_without_cuda_streams(operators, operator):
    """A build for ROCm calls its tensors CUDA, and has no CUDA stream to ask for."""
    assert operators.without_streams(OPERATORS.index(operator)) == 1
    assert operators.message().startswith(b"gradckpt: ")


@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("operator", ["decode", "decode_many"])
def test_misaligned_payload(operators, operator, offset):
    """Kernels read 16 bytes at a time; on a GPU the error would
    stay for the rest of the process."""
    for cuda in (0, 1):
        assert operators.misaligned(OPERATORS.index(operator), cuda, offset) == 1
        assert operators.message() == (
            b"gradckpt: decode takes a payload at a multiple of 16 bytes; pass payload.clone()"
        )
    assert operators.misaligned(OPERATORS.index(operator), 0, 16) == 0


@pytest.mark.parametrize("cuda", [0, 1])
def test_payload_on_another_device(operators, cuda):
    assert operators.on_two_devices(cuda) == 1
    assert operators.message() == (b"gradckpt: decode takes a payload on the device of the tensor it is decoded into")
