"""The suites of regions, selective recompute and saved tensors once more, on the virtual device:
the plugin on_device.py puts their tensors there, and says which tests it leaves out, and why. Of
each test two rows: `make soak` runs all."""

import os
import re
import subprocess
import sys

import pytest
from checkout import HELPERS, ROOT, TESTS

FILES = sorted(path for folder in ("engine", "selective") for path in (TESTS / folder).glob("test_*.py"))
SHARES = 4


@pytest.mark.parametrize("rows", [2, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("share", range(SHARES))
def test_suites(share, rows):
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-p", "on_device", "-p", "no:cacheprovider"]
    options = ["-p", "no:xdist", "-m", "not soak", "--target", "test", "--rows", str(rows), "--tb", "short"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HELPERS), str(ROOT)])}
    words = [*command, *options, *map(str, FILES[share::SHARES])]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 100
