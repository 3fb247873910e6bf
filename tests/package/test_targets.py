"""Which tests `make test` leaves to `make test_all`."""

import os
import re
import subprocess
import sys

import pytest
from checkout import HELPERS, ROOT, TESTS
from newer_torch import FAILS_BECAUSE, failures_of
from targets import LEFT, is_left


def check_is_there(key):
    path, _, name = key.partition("::")
    assert (TESTS / path).exists()
    for part in filter(None, name.partition("[")[0].split("::")):
        assert f"def {part}" in (TESTS / path).read_text() or f"class {part}" in (TESTS / path).read_text()


@pytest.mark.parametrize("key", LEFT)
def test_whatis_left_is_there(key):
    """A test that was renamed would come back to `make test` without a word."""
    check_is_there(key)


@pytest.mark.parametrize("release", FAILS_BECAUSE)
def test_what_fails_on_a_newer_torch_is_there(release):
    """And is of the folders that `make test_newer` runs, which is the Makefile's torch."""
    makefile = (ROOT / "Makefile").read_text()
    (rooms,) = re.findall(r"^ROOMS := (.*)$", makefile, re.M)
    assert f"\nNEWER ?= {release}\n" in makefile
    for key in failures_of(f"{release}+cu130"):
        check_is_there(key)
        assert f"tests/{key.partition('/')[0]}" in rooms.split()
        assert not is_left(key)


#: Listed are the first two.
FOUR = """
import pytest
@pytest.mark.parametrize("n", [0, 1])
def test_that_fails(n): assert n
def test_that_is_listed_and_passes(): pass
def test_that_fails_and_is_not_listed(): assert False
"""
WITH_A_LIST = """
import newer_torch
LISTED = ("test_four.py::test_that_fails[0]", "test_four.py::test_that_is_listed_and_passes")
newer_torch.FAILS_BECAUSE = {"3.0": {"a reason": LISTED}}
def pytest_collection_modifyitems(items):
    newer_torch.expect_failures(items, "3.0+cpu")
"""


def test_exactly_what_is_listed_may_fail(tmp_path):
    (tmp_path / "test_four.py").write_text(FOUR)
    (tmp_path / "conftest.py").write_text(WITH_A_LIST)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    env = {**os.environ, "PYTHONPATH": str(HELPERS)}
    out = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    assert "2 failed, 1 passed, 1 xfailed" in out
    assert "XFAIL test_four.py::test_that_fails[0] - a reason" in out
    assert "FAILED test_four.py::test_that_is_listed_and_passes - [XPASS(strict)] a reason" in out


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
