"""csrc/torch over a torch and codecs that answer as they are told:
what is said of a device that this machine lacks."""

import ctypes
import re
import sysconfig
from pathlib import Path

import pytest
import torch
from checkout import CSRC, NATIVE
from native_programs import gcc

INCLUDE = Path(sysconfig.get_path("include"))
E_DEVICE, E_DRIVER, E_OVERFLOW, NO_MEMORY, ILLEGAL_ADDRESS = -2, -3, -4, 2, 700
HOST, CUDA, METAL = 1, 2, 8  # of DLPack
OLD_DRIVER = (
    "gradckpt: codec 'int8' cannot run on CUDA: the driver supports CUDA 12.2, gradckpt needs 13.0; update the "
    "driver, or build gradckpt with an older toolkit"
)
NO_DRIVER = (
    "gradckpt: codec 'int8' cannot run on CUDA: there is no driver for CUDA 13 or later; install one, or pass "
    "compress=None"
)
NO_KERNELS = "gradckpt: codec 'int8' has no CUDA kernels in this build"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not (INCLUDE / "Python.h").exists():
        pytest.skip("Python.h not found")
    made = tmp_path_factory.mktemp("tensors") / "tensors.so"
    options = ["-O1", "-g", "-fPIC", "-shared", "-Wno-unused-parameter", f"-I{INCLUDE}"]
    gcc(*options, NATIVE / "tensor_faults.c", CSRC / "torch" / "simulated.c", "-o", made)
    return made


@pytest.fixture
def tensors(library):
    loaded = ctypes.PyDLL(str(library))
    loaded.skip_reason_of.argtypes, loaded.skip_reason_of.restype = [ctypes.py_object], ctypes.c_char_p
    return loaded


def tell(tensors, **answers):
    """The answers; others are those of a machine on which all is well."""
    well = {"cuda_status": 0, "driver": 12020, "runtime": 13000, "work_status": 0, "shown": 0, "device_type": HOST,
            "ndim": 1, "streamless": 0, "has_data": 1}  # fmt: skip
    for name, value in {**well, **answers}.items():
        ctypes.c_int.in_dll(tensors, name).value = value
    return tensors


def answer_of(tensors, name):
    return ctypes.c_int.in_dll(tensors, name).value


def said_of(decode):
    return f"gradckpt: codec 'int8' could not {'decode' if decode else 'encode'}: CUDA error cudaErrorX: why; do"


@pytest.mark.parametrize("decode", [0, 1])
class TestWork:
    @pytest.mark.parametrize(
        ("status", "driver", "words"),
        [(E_DRIVER, 12020, OLD_DRIVER), (E_DRIVER, 0, NO_DRIVER), (E_DEVICE, 0, NO_KERNELS), (3, 13000, None)],
        ids=["old driver", "no driver", "kernels", "error"],
    )
    def test_a_device_that_cannot_be_used(self, tensors, decode, status, driver, words):
        words = words or said_of(decode)
        with pytest.raises(RuntimeError, match=re.escape(words)):
            tell(tensors, cuda_status=status, driver=driver).call_codec(decode, 0)
        assert answer_of(tensors, "worked") == 0

    @pytest.mark.parametrize("device", [-1, 0])
    def test_what_a_codec_says(self, tensors, decode, device):
        assert tell(tensors).call_codec(decode, device) == 0
        assert answer_of(tensors, "worked") == 2
        assert answer_of(tensors, "asked") == (device >= 0), "once"
        assert tell(tensors, work_status=E_OVERFLOW).call_codec(decode, device) == 1
        for error, raised in ((ILLEGAL_ADDRESS, RuntimeError), (NO_MEMORY, torch.OutOfMemoryError)):
            with pytest.raises(RuntimeError, match=f"^{re.escape(said_of(decode))}$") as said:
                tell(tensors, work_status=error).call_codec(decode, device)
            assert said.type is raised

    @pytest.mark.parametrize(
        ("n", "device", "numel", "held"),
        [(1, 0, 16, 0), (3, 1, 16, 0), (1, -1, 16, 1), (4, -1, 16, 1), (1, -1, 1 << 20, 0), (2, -1, 40000, 0)],
    )
    def test_who_holds_the_gil(self, tensors, decode, n, device, numel, held):
        """Work of a device runs without it, since a launch may wait for room in the device's queue;
        so does what is long on the host."""
        assert tell(tensors).holds_gil(decode, n, device, ctypes.c_int64(numel)) == held


class TestView:
    @pytest.mark.parametrize(
        ("answers", "reason"),
        [
            ({}, "compressed"),
            ({"device_type": CUDA}, "compressed"),
            ({"device_type": METAL}, "device without kernels"),
            ({"shown": 1}, "not a plain strided tensor with data"),
            ({"has_data": 0}, "not a plain strided tensor with data"),
            ({"device_type": CUDA, "ndim": 8}, "compressed"),
            ({"device_type": CUDA, "ndim": 9}, "not a plain strided tensor with data"),
            ({"ndim": 9}, "compressed"),
        ],
    )
    def test_why_it_is_kept(self, tensors, answers, reason):
        assert tell(tensors, **answers).skip_reason_of([]).decode() == reason

    @pytest.mark.parametrize(
        ("answers", "error"),
        [({"shown": 2}, MemoryError("of torch")), ({"device_type": CUDA, "streamless": 1}, RuntimeError("no stream"))],
    )
    def test_what_arrives(self, tensors, answers, error):
        with pytest.raises(type(error), match=str(error)):
            tell(tensors, **answers).skip_reason_of([])
