"""Random programs in C that capture graphs with payloads and launch them in turn with other work:
each read finds what the last launch has left, and all memory comes back."""

import pytest
import worlds
from offload_programs import SANITIZERS, lines_of, program

pytestmark = pytest.mark.xdist_group("offload_graphs")


def check(first, last, *directory, sanitizer="address"):
    (found,) = lines_of(program("offload_graphs", *SANITIZERS[sanitizer]), first, last, *directory)
    bad = {name: found[name] for name in ("wrong", "misused", "errors", "leaks")}
    assert bad == dict.fromkeys(bad, 0)
    assert found["checked"] > 10 * (last - first)
    assert min(found["launched"], found["outside"], found["missed"]) > 0


def test_programs():
    check(1, 400)


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_programs_with_a_file(tmp_path, sanitizer):
    """Threads write what is not of a graph."""
    check(1, 100, worlds.with_disk(tmp_path), sanitizer=sanitizer)


@pytest.mark.soak
def test_many_programs():
    check(1000, 10_000)
