"""The offloader on a device whose streams are queues of this process, late and in any order that
the events allow: random programs, each call of the device and each request for memory failing, each
edge (offload/event.h) left out, and free ranges beside a naive model (native/offload_*.c)."""

import re

import pytest
from checkout import source
from native_programs import FAILING, LEAVE_OUT, SANITIZERS, c_program, lines_of

RANGES = ("space", "ranges", "event")


def edges():
    """Name -> number, in the order of the enumeration."""
    names = re.findall(r"GCK_EDGE_(\w+)(?: = 1)?,", source("event.h").read_text())
    return {name: number for number, name in enumerate(names, 1)}


def link(sanitizer, *words):
    (found,) = lines_of(c_program("offload_link", *SANITIZERS[sanitizer]), *words)
    return found


@pytest.mark.parametrize(
    ("sanitizer", "streams", "seeds"), [("address", "lazy", 100), ("thread", "threads", 30), ("thread", "lazy", 20)]
)
def test_what_comes_back_is_what_went(sanitizer, streams, seeds):
    """Rings and stores of many sizes, with a file and without; several threads; in reverse, in any
    order, twice, at once, or never. No access is unordered, and nothing stays in use."""
    found = link(sanitizer, "run", 1, seeds, streams)
    for key in ("wrong", "races", "errors", "refused", "bad_figures", "leaks"):
        assert found[key] == 0, key
    for key in ("checked", "full", "copied", "copies_in", "prefetched", "in_ring", "misses", "file_reads"):
        assert found[key] > 0, key


@pytest.mark.parametrize("times", ["once", "forever"])
@pytest.mark.parametrize("seed", [1, 2, 5, 9, 57, 60])
def test_each_call_of_the_device_may_fail(seed, times):
    """An error, or the payload is refused: never other bytes, no access without order, no hang, no
    leak. When the fault ends, and no memory was lost, all is as before."""
    found = link("address", "fail", seed, 31, times)
    assert found["wrong"] == found["races"] == found["bad_figures"] == 0
    assert found["errors"] + found["refused"] > 0
    assert found["checked"] > 0


@pytest.mark.parametrize("seed", [57, 60])
def test_more_calls_of_the_device_may_fail(seed):
    """The same for one call in seven, without a sanitizer."""
    (found,) = lines_of(c_program("offload_link", *LEAVE_OUT), "fail", seed, 7, "once")
    assert found["wrong"] == found["races"] == found["bad_figures"] == 0
    assert found["errors"] > 0


@pytest.mark.parametrize("times", ["once", "forever"])
@pytest.mark.parametrize("seed", [9, 57])  # without a file, and with one
def test_each_request_for_memory_may_fail(seed, times):
    """Or for a thread: an error that says why, or the payload is refused; never other bytes, no
    hang, and all is given back. When there is memory again, all is as before.
    """
    built = c_program("offload_link", *SANITIZERS["address"], of_sources=FAILING)
    (found,) = lines_of(built, "memory", seed, 1, times)
    for key in ("wrong", "races", "bad_figures", "leaks", "unsaid"):
        assert found[key] == 0, key
    calloc, realloc, _, mapped, threads = found["failed"]
    assert min(calloc, realloc, mapped) > 0
    assert (threads > 0) == (seed == 57)
    for key in ("errors", "refused", "checked", "copied", "prefetched"):
        assert found[key] > 0, key


@pytest.mark.parametrize("edge", edges())
def test_random_programs_find_an_edge_that_is_left_out(edge):
    """Each is necessary."""
    built = c_program("offload_link", *LEAVE_OUT)
    (found,) = lines_of(built, "run", 1, 300 if edge == "MEMORY" else 40, "lazy", edges()[edge])
    assert found["races"] > 0


def test_free_ranges_are_those_of_a_naive_model():
    """Segments that are added out of order and join; parts in use that a stream takes, or the host
    waits for; their order is one of the edges."""
    built = c_program("offload_space", *SANITIZERS["address"], *LEAVE_OUT, sources=RANGES)
    (found,) = lines_of(built, 1, 60)
    assert found["different"] == found["races"] == 0
    assert min(found["takes"], found["refusals"], found["waits"], found["joins"]) > 0
    (found,) = lines_of(built, 1, 5, edges()["MEMORY"])
    assert found["races"] > 0
