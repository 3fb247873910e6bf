"""Programs in C of the store of bytes and of captured graphs with payloads, under gcc's sanitizers
(native/offload_store.c, native/offload_graphs.c). Threads fill, hold and drop; calls of the file
and requests for memory fail, each in turn; graphs are launched in turn with other work, and each
read finds what the last launch has left."""

import pytest
import worlds
from native_programs import FAILING, SANITIZERS, STORE, c_program, lines_of

from gradckpt import _C

# ---- a store in memory and a file ----


STEPS = {"seed": 1, "threads": 2, "steps": 2, "KiB": 1024}


def place(directory, host_budget):
    return _C.Place(str(directory), host_budget, -1, -1, 2, 1, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("store")
    try:
        place(made, 1 << 20)
    except ValueError as error:
        pytest.skip(f"the temporary folder's file system serves no store: {error}")
    return made


def run(sanitizer, folder, *fault, of_sources=(), **changed):
    """What a run prints; a sanitizer's report or a wrong byte fails."""
    built = c_program("offload_store", *SANITIZERS[sanitizer], sources=STORE, of_sources=of_sources)
    (found,) = lines_of(built, folder, *(STEPS | changed).values(), *fault)
    assert "new" in found or found["memory_used"] == found["file_used"] == found["wrong"] == 0
    return found


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_what_comes_back_is_what_went(folder, sanitizer):
    """Reads, writes and evictions of four threads, in memory of several sizes; some hold more at
    once than it has room for, and read the rest past it."""
    past = 0
    for seed in range(1, 7):
        found = run(sanitizer, folder, seed=seed, threads=4, steps=3, KiB=256 * seed)
        assert found["errors"] == 0
        assert found["memory_peak"] <= 256 * seed << 10
        past += found["past"]
    assert found["read"] > 0
    assert past > 0


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_without_a_file_what_has_room_stays(sanitizer):
    for seed in range(1, 5):
        found = run(sanitizer, "", seed=seed, threads=4, steps=4, KiB=256 * seed)
        assert found["errors"] == found["calls"] == found["written"] == 0
        assert found["memory_peak"] <= 256 * seed << 10
        assert found["from_memory"] == found["gets"] > 0
        assert found["full"] > 0


@pytest.mark.parametrize("fault", ["5", "28", "4", "short", "flip", "forever"])
def test_each_call_of_the_file_may_go_wrong(folder, fault):
    """EIO, ENOSPC, EINTR, a short read, a flipped bit, a disk that is full from there on: an error
    or a refusal, never other bytes; nothing is left."""
    calls = run("address", folder)["calls"]
    found = [run("address", folder, call, fault) for call in range(1, calls, 23)]
    answered = sum(each.get("errors", 0) + each.get("refused", 0) + ("new" in each) for each in found)
    assert (answered == 0) == (fault == "4")  # an interrupted call is made again


def test_what_a_full_disk_has_is_still_read(folder):
    """Also where nothing can leave the memory any more."""
    calls = run("address", folder)["calls"]
    found = [run("address", folder, call, "full") for call in range(3, calls, 23)]
    assert sum(each["errors"] for each in found) == 0
    assert sum(each["refused"] for each in found) > 0


def test_each_request_for_memory_may_fail(folder):
    """Or for a thread: an error or a refusal, and all is given back. When memory is back, all
    is as before.
    """
    few = {"of_sources": FAILING, "seed": 4, "threads": 1, "steps": 1, "KiB": 256}
    asked = run("address", folder, **few)["asked"]
    found = [run("address", folder, n, "memory", **few) for n in range(1, asked + 1)]
    assert all(each["alive"] == 0 for each in found)
    assert all(each["again"] == each["write_error"] == 0 for each in found if "new" not in each)
    assert {each["new"] for each in found if "new" in each} == {"out of memory"}
    failed = [sum(kind) for kind in zip(*(each["failed"] for each in found), strict=True)]
    assert all(failed), failed  # of each kind


def test_directories_that_cannot_be_used(tmp_path):
    for directory in (tmp_path / "missing", "/proc", "/dev/shm"):
        with pytest.raises(ValueError, match=r"gradckpt: offload='disk' cannot use the directory .*; pass another one"):
            place(directory, 1 << 20)
    with pytest.raises(ValueError, match="pass 4096 or more"):
        place(tmp_path, 100)


# ---- captured graphs ----


pytestmark = pytest.mark.xdist_group("offload_graphs")


def check(first, last, *directory, sanitizer="address"):
    (found,) = lines_of(c_program("offload_graphs", *SANITIZERS[sanitizer]), first, last, *directory)
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
