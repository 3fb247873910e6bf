"""The library of call_faults.c, through which the calls of the extension are led."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig

import pytest
from checkout import HELPERS


def build(folder):
    """Return its path, in this folder; skip the test where it cannot be built."""
    gcc, include = shutil.which("gcc"), sysconfig.get_path("include")
    if gcc is None or not os.path.exists(os.path.join(include, "Python.h")):
        pytest.skip("gcc or Python.h not found")
    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("the calls are led through code for x86-64 Linux")
    path = folder / "call_faults.so"
    options = ["-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", f"-I{include}"]
    subprocess.run([gcc, *options, HELPERS / "call_faults.c", "-o", path], check=True)
    return path
