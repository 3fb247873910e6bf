"""Adding a codec takes one family of files, one row and one oracle: two toys are added to a copy of
the tree, which then passes every test that goes over all codecs.

`planes` has a file and arithmetic of its own. `int4_plain` is a group codec: its row says all.
"""

import os
import shutil
import subprocess
import sys

import pytest
from checkout import NATIVE, ROOT

TOYS = NATIVE / "toy_codecs"
COPIED = ("csrc", "gradckpt", "tests", "docs", "setup.py", "pyproject.toml", "README.md")
#: Files whose tests go over gradckpt.codecs.names().
TESTS = (
    *(f"tests/codec/test_{name}.py" for name in ("codecs", "codec_hostile", "codec_tensors", "stochastic")),
    *(f"tests/engine/test_{name}.py" for name in ("compress", "payload_memory")),
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A function that runs a command in the copy, with the toys built in."""
    copy = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(path, copy / name)
    shutil.copy(TOYS / "planes.c", copy / "csrc" / "codec" / "host")
    rows = (TOYS / "rows.h").read_text().replace("\n", " \\\n")
    header = copy / "csrc" / "codec" / "format" / "codecs.h"
    last = "    CODEC(ARG, mask, 10)"
    assert last in header.read_text()
    header.write_text(header.read_text().replace(last, rows + last))
    for name in ("oracle_planes.py", "oracle_int4_plain.py"):
        shutil.copy(TOYS / name, copy / "tests" / "helpers")

    def run(*command):
        env = {**os.environ, "PYTHONPATH": str(copy), "GRADCKPT_CUDA": "0", "GRADCKPT_WERROR": "1"}
        done = subprocess.run([sys.executable, *command], cwd=copy, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        return done.stdout

    run("setup.py", "-q", "build_ext", "--inplace")
    return run


@pytest.mark.soak
def test_the_tests_over_all_codecs_pass(tree):
    said = tree("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak", "-k", "planes or int4_plain", *TESTS)
    assert " passed" in said
    assert "skipped" not in said


def test_the_tests_over_all_codecs_see_it(tree):
    """A wrong byte of the toy fails them."""
    oracle = "import oracle_planes as o; o.encode = lambda c, bits, d: (bits.view('u1').copy(), True)"
    program = f"{oracle}; import pytest, sys; sys.exit(pytest.main(['-q', '-k', 'planes', '{TESTS[0]}']) != 1)"
    tree("-c", f"import sys; sys.path.insert(0, 'tests/helpers'); {program}")


def test_it_is_documented(tree):
    table = tree("tests/helpers/pages.py")
    assert "| `planes` | 60 |" in table
    assert "| `int4_plain` | 61 |" in table
    tree("tests/helpers/pages.py", "docs/codecs.md")
    tree("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/package/test_docs.py", "-k", "table_of_codecs")


def test_the_doctor_tests_it(tree):
    said = tree("-m", "gradckpt", "doctor")
    assert "planes" in said
    assert "int4_plain" in said
