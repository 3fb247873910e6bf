"""What several workers of one run need: built by the first, under a lock. And programs of C that
drive sources of csrc whose allocations fail in turn."""

import fcntl
import shutil
import subprocess

import pytest
from checkout import CSRC, HELPERS

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers"]
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


def gcc(*arguments):
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc not found")
    subprocess.run([compiler, "-std=c11", "-D_GNU_SOURCE", *WARNINGS, f"-I{CSRC}", *arguments], check=True)


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
    gcc(*SANITIZED, HELPERS / driver, *objects, "-o", folder / "driver")
    return output_of(folder / "driver", *arguments)
