"""Which tests `make test` leaves to `make test_all`."""

import subprocess
import sys

import pytest
from checkout import ROOT, TESTS
from targets import LEFT, ROWS, SOAK, is_left


@pytest.mark.parametrize("key", [*LEFT, *SOAK, *ROWS])
def test_whatis_left_is_there(key):
    """A test that was renamed would come back to `make test` without a word."""
    path, _, name = key.partition("::")
    assert (TESTS / path).exists()
    for part in filter(None, name.partition("[")[0].split("::")):
        assert f"def {part}" in (TESTS / path).read_text() or f"class {part}" in (TESTS / path).read_text()


#: In one process: the files import torch.
COLLECTED_THREE_TIMES = """
import pytest, sys
files = ["tests/package/test_docs.py", "tests/package/test_layers.py", "tests/package/test_run.py"]
options = ["-q", "--collect-only", "-p", "no:cacheprovider"]
failed = 0
for target, end in (([], "----"), (["--target=test"], "----"), (["--target=test_all"], "")):
    failed |= pytest.main([*options, *target, *files])
    print(end, flush=True)
sys.exit(failed)
"""


def test_every_test_belongs_to_one_target():
    """Files that only one target collects, and files of which each has a part."""

    command = [sys.executable, "-c", COLLECTED_THREE_TIMES]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    every, test, test_all = [[line for line in part.splitlines() if "::" in line] for part in out.split("----\n")]
    assert sorted(test + test_all) == sorted(every)
    assert test
    assert all(is_left(name.removeprefix("tests/")) for name in test_all)
