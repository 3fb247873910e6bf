"""What a benchmark ran on, for the head of its output and its JSON line."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import gradckpt
from gradckpt import _C
from gradckpt._doctor import environment


def cpu_model() -> str:
    """The model name the kernel gives; the architecture where it gives none."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def facts(device: str = "cpu") -> dict[str, Any]:
    info = _C.build_info()
    found = {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": info["isa"],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gradckpt": gradckpt.__version__,
        "compiler": info["compiler"],
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
        found |= {"cuda_archs": info["cuda_archs"], "cuda_driver": info["cuda_driver"]}
    return found


# ---- the device ----


def covers(archs: str, capability: tuple[int, int]) -> bool:
    """Does a build for e.g. "8.0;9.0+PTX" run on a card of this compute capability?"""
    return environment.kernels(archs, capability) != "absent"


def why_no_cuda() -> str | None:
    """Why nothing can be run on a CUDA device here: a sentence without its end; None: it can."""
    info = _C.build_info()
    if torch.version.cuda is None:
        return "the installed torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not info["cuda_archs"]:
        return f"gradckpt is {info['build']}"
    if not info["cuda_usable"]:
        return f"the driver (CUDA {info['cuda_driver']}) is older than gradckpt's runtime ({info['cuda_runtime']})"
    capability = torch.cuda.get_device_capability()
    if not covers(info["cuda_archs"], capability):
        return f"gradckpt was built for {info['cuda_archs']}, and the card is {capability[0]}.{capability[1]}"
    return None


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: a dry run of the script itself, tiny; its figures mean nothing (default %(default)s)",
    )


def require(device: str, program: str) -> None:
    """Ends the program with one sentence when the device cannot be had."""
    reason = why_no_cuda() if device == "cuda" else None
    if reason:
        sys.exit(f"{program}: {reason}; --device cpu makes a dry run")


# ---- memory ----


def keep_memory() -> None:
    """glibc gives large blocks back at once, and every page of the next one faults."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


# ---- warnings ----


def allow_old_name() -> None:
    """Say nothing of the one deprecated name of transformers that PEFT 0.21 reads."""
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


# ---- options ----


def add_quick(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="tiny and few rounds: a trial, no measurement")


def choose(
    parser: argparse.ArgumentParser, options: argparse.Namespace, name: str, known: Iterable[str], or_none: bool = False
) -> None:
    """Make a list of a comma-separated option; end the program with one sentence on an unknown
    word, or where there is none."""
    known = list(known)
    chosen = [word.strip() for word in getattr(options, name).split(",") if word.strip()]
    unknown = [word for word in chosen if word not in known]
    if unknown or not (chosen or or_none):
        wrong = f"unknown {unknown[0]!r}" if unknown else "none given"
        parser.error(f"--{name}: {wrong}; choose from {', '.join(known)}")
    setattr(options, name, chosen)


# ---- output ----


def print_head(title: str, found: dict[str, Any]) -> None:
    print(title)
    print("  " + ", ".join(f"{key} {value}" for key, value in found.items()))


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """With rich when it is there; else columns padded with blanks."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        print(f"\n{title}")
        for row in [columns, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=max(100, Console().width)).print(table)


def print_markdown(title: str, columns: list[str], rows: list[list[str]]) -> None:
    print(f"\n**{title}**\n")
    for row in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(row) + " |")


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar of so many steps; what it yields takes one, with a word on it.
    Without rich or a terminal: none."""
    try:
        from rich.progress import Progress
    except ImportError:
        yield lambda text: None
        return
    with Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def print_json(found: dict[str, Any]) -> None:
    """The last line of every benchmark."""
    print(json.dumps(found))
