"""What a benchmark ran on, for the head of its output and its JSON line."""

from __future__ import annotations

import json
import os
import pathlib
import platform
from typing import Any

import torch

import gradckpt
from gradckpt import _C


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


def print_json(found: dict[str, Any]) -> None:
    """The last line of every benchmark."""
    print(json.dumps(found))
