"""Builds the sdist and the wheel, checks both, and tries the wheel in fresh venvs;
a table says what was checked.

Exit status: 0 if everything that was checked passed, 1 if something failed. What cannot be had on
this machine (an interpreter, a torch) is in the table as not checked, with the reason, and does not
change the exit status.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import distribution
import fresh_venv
from commands import Failed, last_line

PASSED, FAILED, NOT_CHECKED = "passed", "FAILED", "not checked"


class Report:
    """Runs checks one after the other, says which is running, and keeps the rows of the table."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []

    def check(self, name: str, function: Callable[[], str]) -> None:
        """Run a check that returns a line about what it found, raises Failed,
        or raises Unavailable."""
        print(f"{name} ...", flush=True)
        try:
            self.add(name, PASSED, function())
        except fresh_venv.Unavailable as reason:
            self.add(name, NOT_CHECKED, str(reason))
        except Failed as failure:
            print(f"gradckpt: {failure}", file=sys.stderr, flush=True)
            self.add(name, FAILED, last_line(str(failure)))

    def add(self, name: str, result: str, detail: str) -> None:
        self.rows.append((name, result, detail))

    def table(self) -> str:
        width = max(len(name) for name, _, _ in self.rows)
        counts = (f"{sum(row[1] == result for row in self.rows)} {result}" for result in (PASSED, FAILED, NOT_CHECKED))
        lines = (f"{name:<{width}}  {result:<{len(NOT_CHECKED)}}  {detail}" for name, result, detail in self.rows)
        return "\n".join(["", *lines, ", ".join(counts)])

    @property
    def failed(self) -> bool:
        return any(result == FAILED for _, result, _ in self.rows)


def try_wheel(sdist: Path, wheel: Path, *, python: str, torch: str, index: str) -> str:
    """Install the wheel in a fresh venv, run the doctor and a training step;
    return a line about them."""
    with tempfile.TemporaryDirectory() as scratch:
        said = fresh_venv.install(wheel, Path(scratch), fresh_venv.interpreter(python), torch, index)
    return fresh_venv.summary(said)


def drivers(note: str) -> str:
    """Check what setup.py said of nvcc: the wheel is for all drivers that torch's are for."""
    nvcc = re.search(r"nvcc (\d+)\.\d+ for", note)
    if nvcc is None:
        raise fresh_venv.Unavailable(f"the wheel is {note}")
    if int(nvcc[1]) != 12:
        raise Failed(f"{note}: only drivers from 580 on load it; set CUDA_HOME to a toolkit of 12 (RELEASING.md)")
    return "525 and later"


def release(report: Report, out: Path, pythons: Sequence[str], torches: Sequence[str], index: str) -> None:
    """Build both files into ``out`` and check everything;
    what needs a file that is not there is not checked."""
    built: list[Path] = []
    notes: list[str] = []

    def sdist() -> str:
        built.append(distribution.build_sdist(out))
        return size(built[0])

    def wheel() -> str:
        if not built:
            raise fresh_venv.Unavailable("there is no sdist")
        made, note = distribution.build_wheel(built[0], out)
        built.append(made)
        notes.append(note)
        return f"{size(made)}; {note}"

    def with_files(function: Callable[..., str]) -> str:
        if len(built) < 2:
            raise fresh_venv.Unavailable("there is no wheel")
        return function(*built)

    report.check("sdist", sdist)
    report.check("wheel", wheel)
    report.check("drivers", partial(with_files, lambda *_: drivers(notes[0])))
    for look in distribution.CHECKS:
        report.check(look.__name__, partial(with_files, look))
    for python in pythons:
        for torch in torches:
            installed = partial(try_wheel, python=python, torch=torch, index=index)
            report.check(f"{python}, torch {torch}", partial(with_files, installed))


def size(file: Path) -> str:
    return f"{file.name}, {file.stat().st_size >> 10} KiB"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=distribution.ROOT / "dist", help="folder of the two files (dist)")
    parser.add_argument("--pythons", nargs="*", default=[], help="interpreters to try the wheel with")
    parser.add_argument("--torches", nargs="*", default=[], help="newest, versions, or folders of an installed torch")
    parser.add_argument("--torch-index", default="", help="package index that torch is taken from (pip's own)")
    options = parser.parse_args(arguments)
    for old in [*options.out.glob("gradckpt-*.tar.gz"), *options.out.glob("gradckpt-*.whl")]:
        old.unlink()
    report = Report()
    release(report, options.out, options.pythons, options.torches, options.torch_index)
    print(report.table())
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
