"""Which tests `make test` leaves to `make test_all`."""

import subprocess
import sys

import pytest
from checkout import ROOT, TESTS
from targets import LEFT, is_left


@pytest.mark.parametrize("key", LEFT)
def test_whatis_left_is_there(key):
    """A test that was renamed would come back to `make test` without a word."""
    path, _, name = key.partition("::")
    assert (TESTS / path).exists()
    for part in filter(None, name.partition("[")[0].split("::")):
        assert f"def {part}" in (TESTS / path).read_text() or f"class {part}" in (TESTS / path).read_text()


def test_every_test_belongs_to_one_target():
    """Files that only one target collects, and files of which each has a part."""

    def collected(*options):
        files = ["tests/package/test_docs.py", "tests/package/test_layers.py", "tests/package/test_run.py"]
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options, *files]
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [line for line in out.splitlines() if "::" in line]

    every, test, test_all = collected(), collected("--target=test"), collected("--target=test_all")
    assert sorted(test + test_all) == sorted(every)
    assert test
    assert all(is_left(name.removeprefix("tests/")) for name in test_all)
