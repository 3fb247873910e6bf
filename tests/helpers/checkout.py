"""Where things are in the checkout: every path that a test needs starts here."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
HELPERS = TESTS / "helpers"
NATIVE = TESTS / "native"
PROGRAMS = TESTS / "programs"
EXAMPLES = ROOT / "examples"
CSRC = ROOT / "csrc"
CODEC = CSRC / "codec"


def source(name):
    """The C or CUDA source of that name, which is unique."""
    (path,) = CSRC.rglob(name)
    return path
