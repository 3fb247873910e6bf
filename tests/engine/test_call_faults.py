"""Every call that the extension makes into Python or the allocator may fail (call_faults.py): the
error arrives, nothing is left behind, and the program runs as before afterwards."""

import json
import re
import subprocess
import sys

import native_programs
import pytest
from call_faults import CASES
from checkout import HELPERS, ROOT

from gradckpt import _C

#: Shares of the programs, a process each: what crashes names itself there.
SHARES = 6


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return native_programs.led_library(tmp_path_factory.mktemp("call_faults"))


@pytest.mark.parametrize("share", range(SHARES))
def test_any_call_may_fail(library, share):
    programs = list(CASES)[share::SHARES]
    command = [sys.executable, "-X", "faulthandler", str(HELPERS / "call_faults.py"), str(library), *programs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"{name}: done" for name in programs]


def test_torch_may_refuse_to_register(library):
    """The import fails with what was refused, and so does the next one:
    half of the operators may be there."""
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        str(HELPERS / "first_imports.py"),
        "import_faults",
        str(library),
        _C.__file__,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    good, *refused = json.loads(done.stdout)
    assert good == ["good", "good"]
    words = [re.search("torch rejected (.*?);", first)[1] for first, again in refused if again == first]
    assert words == ["to define torch.ops.gradckpt"] * 5 + ["the kernels of torch.ops.gradckpt"] * 10
