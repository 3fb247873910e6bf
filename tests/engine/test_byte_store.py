"""A store of bytes in memory and a file: threads that put, get and drop; calls of the file that
fail, each in turn; under the sanitizers of gcc (helpers/offload_store.c)."""

import json
import shutil
import subprocess

import pytest
from checkout import CSRC, HELPERS

from gradckpt import _C

STEPS = {"seed": 1, "threads": 2, "steps": 3, "KiB": 1024}
SANITIZERS = {"address": "address,undefined", "thread": "thread"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc not found")
    made = {}
    for name, sanitizers in SANITIZERS.items():
        made[name] = tmp_path_factory.mktemp("byte_store") / name
        sources = [
            HELPERS / "offload_store.c",
            *(CSRC / "offload" / f"{each}.c" for each in ("store", "store_status", "file", "space")),
        ]
        options = ["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizers}", f"-I{CSRC}"]
        subprocess.run([gcc, *options, *sources, "-o", made[name], "-lpthread"], check=True)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("store")
    try:
        _C.ByteStore(str(made), 1 << 20)
    except ValueError as error:
        pytest.skip(f"the temporary folder's file system serves no store: {error}")
    return made


def run(program, folder, *fault, **changed):
    """What a run prints; a sanitizer's report or a wrong byte fails."""
    words = [program, folder, *(str(value) for value in (STEPS | changed).values()), *map(str, fault)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert "new" in found or found["memory_used"] == found["file_used"] == found["wrong"] == 0
    return found


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_what_comes_back_is_what_went(programs, folder, sanitizer):
    """Reads, writes and evictions of four threads, in memory of several sizes."""
    for seed in range(1, 9):
        found = run(programs[sanitizer], folder, seed=seed, threads=4, steps=4, KiB=256 * seed)
        assert found["errors"] == 0
        assert found["memory_peak"] <= 256 * seed << 10
    assert found["read"] > 0


@pytest.mark.parametrize("fault", ["5", "28", "4", "short", "flip", "forever"])
def test_each_call_of_the_file_may_go_wrong(programs, folder, fault):
    """EIO, ENOSPC, EINTR, a short read, a flipped bit, a disk that is full from there on: an error
    or a refusal, never other bytes; nothing is left."""
    calls = run(programs["address"], folder)["calls"]
    found = [run(programs["address"], folder, call, fault) for call in range(1, calls, 5)]
    answered = sum(each.get("errors", 0) + each.get("refused", 0) + ("new" in each) for each in found)
    assert (answered == 0) == (fault == "4")  # an interrupted call is made again


def test_what_a_full_disk_has_is_still_read(programs, folder):
    """Also where nothing can leave the memory any more."""
    calls = run(programs["address"], folder)["calls"]
    found = [run(programs["address"], folder, call, "full") for call in range(3, calls, 5)]
    assert sum(each["errors"] for each in found) == 0
    assert sum(each["refused"] for each in found) > 0


def test_directories_that_cannot_be_used(tmp_path):
    for directory in (tmp_path / "missing", "/proc", "/dev/shm"):
        with pytest.raises(ValueError, match=r"gradckpt: offload='disk' cannot use the directory .*; pass another one"):
            _C.ByteStore(str(directory), 1 << 20)
    with pytest.raises(ValueError, match="pass 4096 or more"):
        _C.ByteStore(str(tmp_path), 100)
