"""C programs of the tests with the sources of csrc/offload, under the sanitizers of gcc."""

import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from checkout import CSRC, HELPERS

SANITIZERS = {"address": ("-fsanitize=address,undefined",), "thread": ("-fsanitize=thread",)}
LEAVE_OUT = ("-DGCK_LEAVE_OUT_EDGES",)
OPTIONS = ("-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", f"-I{HELPERS}")
WARNINGS = ("-Wno-missing-field-initializers",)  # as in setup.py
#: Each request of csrc/offload for memory, or for a thread, is one of helpers/failing_memory.h.
FAILING = tuple(
    f"-D{name}={name}_or_fail" for name in ("calloc", "realloc", "posix_memalign", "mmap", "pthread_create")
)
FAILING += tuple(f"-D{name}={name}_counted" for name in ("free", "munmap"))
STORE = ("store", "store_room", "store_threads", "file", "space", "ranges", "event", "store_figures")


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="gradckpt-offload-")


@functools.cache
def program(
    name,
    *options,
    sources=(*STORE, "offloader", "offloader_graph", "offloader_parts", "ring", "transfer"),
    of_sources=(),
):
    """The path of helpers/NAME.c as a program, built once per process; ``of_sources``: options of
    csrc/offload alone.
    """
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc not found")
    made = Path(tempfile.mkdtemp(dir=_folder().name)) / name
    files = [CSRC / "offload" / f"{each}.c" for each in sources]
    command = [gcc, *OPTIONS, *WARNINGS, *options]
    if of_sources:
        subprocess.run([*command, *of_sources, "-c", *files], cwd=made.parent, check=True)
        files = sorted(made.parent.glob("*.o"))
    subprocess.run([*command, HELPERS / f"{name}.c", *files, "-o", made, "-lpthread"], check=True)
    return made


def lines_of(built, *words):
    """What a run prints, a dict for each line; a sanitizer's report or an abort fails."""
    done = subprocess.run([built, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
