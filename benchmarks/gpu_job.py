"""What a stage of gpu.py gets, and what it leaves: checks, tables, skips and failures.

The result is written to a file after each change, so that a stage that is ended at its limit
leaves what it had.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gpu_device import Device

HERE = pathlib.Path(__file__).resolve().parent
#: Of a traceback in the report.
LAST_LINES = 12


class Stage(NamedTuple):
    """A file with a function ``run(job)``; its seconds on an H100, start included; seconds after
    which it is ended."""

    name: str
    title: str
    estimate: float
    limit: float
    file: pathlib.Path | None = None

    @property
    def path(self) -> pathlib.Path:
        return self.file or HERE / f"gpu_{self.name}.py"


class Skip(Exception):
    """What was to run cannot run here; the text is the reason."""


class Job:
    """A stage that runs."""

    def __init__(self, device: Device, options: argparse.Namespace) -> None:
        self.device, self.small = device, bool(options.small)
        self.folder, self.result_file = pathlib.Path(options.out), pathlib.Path(options.result)
        self.name = options.stage
        self.started = time.monotonic()
        self.ends = self.started + options.seconds
        self.passed = 0
        self.failures: list[str] = []
        self.skipped: list[str] = []
        self.notes: list[str] = []
        self.tables: list[dict[str, Any]] = []
        self.pictures: list[str] = []
        self.figures: dict[str, Any] = {}

    @property
    def left(self) -> float:
        """Seconds until the stage is ended."""
        return self.ends - time.monotonic()

    # ---- what it says

    def progress(self, text: str) -> None:
        print(f"[{self.name} {time.monotonic() - self.started:.0f} s] {text}", flush=True)

    def note(self, text: str) -> None:
        """A sentence for the report that is no failure."""
        self.notes.append(text)
        self.progress(text)
        self.write()

    def check(self, good: bool, sentence: str) -> bool:
        """Count it; the stage goes on."""
        if good:
            self.passed += 1
        else:
            self.fail(sentence)
        return good

    def fail(self, sentence: str) -> None:
        self.failures.append(sentence)
        self.progress(f"FAILED: {sentence}")
        self.write()

    def skip(self, what: str, why: str) -> None:
        self.skipped.append(f"{what}: {why}")
        self.progress(f"skipped: {what}: {why}")
        self.write()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What raises in here is a failure with this name, and the next part runs."""
        self.progress(name)
        start = time.monotonic()
        try:
            yield
        except Skip as skip:
            self.skip(name, str(skip))
        except SystemExit as left:  # of guards.py: a figure that cannot be
            self.fail(f"{name}: {left.code}")
        except Exception as error:
            lines = traceback.format_exc().splitlines()
            print("\n".join(lines[-LAST_LINES:]), flush=True)
            first = (str(error).splitlines() or [""])[0]
            self.fail(f"{name}: {type(error).__name__}: {first[:300]}")
        finally:
            self.figures.setdefault("seconds", {})[name] = round(time.monotonic() - start, 2)

    def table(self, title: str, columns: list[str]) -> Callable[..., None]:
        """Begin a table; the function adds a row."""
        made: dict[str, Any] = {"title": title, "columns": columns, "rows": []}
        self.tables.append(made)

        def add(*cells: Any) -> None:
            if len(cells) != len(columns):
                raise ValueError(f"{title}: {len(cells)} cells for {len(columns)} columns")
            made["rows"].append(list(cells))
            self.write()

        return add

    # ---- what it leaves

    @property
    def status(self) -> str:
        return "failed" if self.failures else "passed" if self.passed else "skipped" if self.skipped else "failed"

    def write(self) -> None:
        found = {
            **{"status": self.status, "passed": self.passed, "failures": self.failures, "skipped": self.skipped},
            **{"notes": self.notes, "tables": self.tables, "pictures": self.pictures, "figures": self.figures},
        }
        made = self.result_file.with_suffix(".new")
        made.write_text(json.dumps(found, default=str))
        os.replace(made, self.result_file)


# ---- what stages share


def cell(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


def gradients(parameters: Any) -> list[torch.Tensor]:
    """Copies of them, in order."""
    found = []
    for p in parameters:
        if p.grad is None:
            raise RuntimeError("a parameter has no gradient")
        found.append(p.grad.detach().clone())
    return found


def difference(ours: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The relative error of all gradients together; NaN where one is not finite. Both may be on
    different devices."""
    wrong = size = 0.0
    for a, b in zip(ours, wanted, strict=True):
        exact = b.to(a.device).double()
        wrong += (a.double() - exact).square().sum().item()
        size += exact.square().sum().item()
    if not size > 0:
        raise RuntimeError("the gradients to compare with are zero")
    return float((wrong / size) ** 0.5)


def lossy(codec: Any, dtype: str = "bfloat16") -> bool:
    import gradckpt

    if codec is None:
        return False
    info = gradckpt.codecs.info(codec)
    # bf16 and fp16 take float32 alone: other dtypes stay as they are.
    return bool(info["max_error"]) and dtype in info["dtypes"]
