"""Programs and libraries in C that tests build and run."""

import fcntl
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
from checkout import CSRC, NATIVE

# ---- What several workers of one run need: built by the first, under a lock. And programs of C
# that drive sources of csrc whose allocations fail in turn.

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers"]  # as in setup.py
SANITIZED = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def built_once(request, factory, name, build):
    """The folder in which `build(folder)` left what it made."""
    base = factory.getbasetemp()
    base = base.parent if hasattr(request.config, "workerinput") else base
    folder = base / name
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            build(folder)
            (folder / "done").touch()
    return folder


def compiler():
    """Return the path of gcc; skip the test where there is none."""
    return shutil.which("gcc") or pytest.skip("gcc not found")


def gcc(*arguments):
    subprocess.run([compiler(), "-std=c11", "-D_GNU_SOURCE", *WARNINGS, f"-I{CSRC}", *arguments], check=True)


def output_of(program, *arguments):
    run = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def said_of_failing_memory(folder, driver, sources, *arguments):
    """What this driver (failing_malloc.h) prints, where each allocation of the sources may fail;
    under sanitizers."""
    objects = [folder / f"{path.stem}.o" for path in sources]
    for path, built in zip(sources, objects, strict=True):
        gcc(*SANITIZED, "-Dmalloc=malloc_or_fail", "-Dfree=free_counted", "-c", path, "-o", built)
    gcc(*SANITIZED, NATIVE / driver, *objects, "-o", folder / "driver")
    return output_of(folder / "driver", *arguments)


# ---- The library of call_faults.c, through which the calls of the extension are led.


def led_library(folder):
    """Return its path, in this folder; skip the test where it cannot be built."""
    include = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "Python.h")):
        pytest.skip("Python.h not found")
    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("the calls are led through code for x86-64 Linux")
    path = folder / "call_faults.so"
    options = ["-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", f"-I{include}"]
    subprocess.run([compiler(), *options, NATIVE / "call_faults.c", "-o", path], check=True)
    return path


# ---- C programs of the tests with the sources of csrc/offload, under the sanitizers of gcc.

SANITIZERS = {"address": ("-fsanitize=address,undefined",), "thread": ("-fsanitize=thread",)}
LEAVE_OUT = ("-DGCK_LEAVE_OUT_EDGES",)
OPTIONS = ("-std=gnu11", "-g", "-O1", *WARNINGS, "-Wno-unused-parameter", f"-I{CSRC}", f"-I{NATIVE}")
#: Each request of csrc/offload for memory, or for a thread, is one of native/failing_memory.h.
FAILING = tuple(
    f"-D{name}={name}_or_fail" for name in ("calloc", "realloc", "posix_memalign", "mmap", "pthread_create")
)
FAILING += tuple(f"-D{name}={name}_counted" for name in ("free", "munmap"))
STORE = ("store", "store_memory", "store_threads", "file", "space", "ranges", "event", "store_figures")


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="gradckpt-offload-")


@functools.cache
def c_program(
    name,
    *options,
    sources=(*STORE, "offloader", "offloader_graph", "offloader_parts", "ring", "transfer"),
    of_sources=(),
):
    """The path of native/NAME.c as a program, built once per process; ``of_sources``: options of
    csrc/offload alone.
    """
    made = Path(tempfile.mkdtemp(dir=_folder().name)) / name
    files = [CSRC / "offload" / f"{each}.c" for each in sources]
    command = [compiler(), *OPTIONS, *options]
    if of_sources:
        subprocess.run([*command, *of_sources, "-c", *files], cwd=made.parent, check=True)
        files = sorted(made.parent.glob("*.o"))
    subprocess.run([*command, NATIVE / f"{name}.c", *files, "-o", made, "-lpthread"], check=True)
    return made


def lines_of(built, *words):
    """What a run prints, a dict for each line; a sanitizer's report or an abort fails."""
    done = subprocess.run([built, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
