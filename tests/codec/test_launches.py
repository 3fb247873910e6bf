"""Which codec work runs without the GIL: all of a device's, since a launch may wait for room in the
device's queue, and what is long on the host."""

import ctypes
import pathlib
import shutil
import subprocess
import sysconfig

import pytest
from checkout import CSRC, NATIVE


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    gcc, headers = shutil.which("gcc"), pathlib.Path(sysconfig.get_path("include"))
    if gcc is None or not (headers / "Python.h").exists():
        pytest.skip("gcc or Python.h not found")
    library = tmp_path_factory.mktemp("launches") / "probe.so"
    subprocess.run([gcc, "-std=c11", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE",
                    "-Wno-missing-field-initializers", f"-I{CSRC}", f"-I{headers}",
                    NATIVE / "launch_probe.c",
                    *(CSRC / "torch" / f"{name}.c" for name in ("calls", "error", "simulated")),
                    "-o", library], check=True)  # fmt: skip
    return ctypes.PyDLL(str(library))  # called with the GIL held


@pytest.mark.parametrize("decode", [0, 1])
def test_gil(probe, decode):
    def holds(n, device, numel):
        return probe.holds_gil(decode, n, device, ctypes.c_int64(numel))

    assert holds(1, 0, 16) == 0
    assert holds(3, 1, 16) == 0
    assert holds(1, -1, 16) == 1  # not worth it
    assert holds(4, -1, 16) == 1
    assert holds(1, -1, 1 << 20) == 0
    assert holds(2, -1, 40000) == 0
