"""``python -m gradckpt``: what is installed, what is in use, and does it work; to be pasted into an issue."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from gradckpt import environment, selftest

_LABEL = 14  # characters
_DESCRIPTION = "Versions, build, devices and integrations of gradckpt, and a self-test of this machine."
_EPILOG = "Exit status: 0 all is well, 1 a self-test failed or gradckpt cannot be used, 2 wrong usage."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gradckpt", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    parser.add_argument("--no-self-test", action="store_true", help="only say what is here")
    options = parser.parse_args(arguments)

    with contextlib.redirect_stdout(sys.stderr):  # whatever libraries have to say
        found = environment.facts()
        checks = [] if options.no_self_test else selftest.run()
    ok = all(check.ok for check in checks)
    if options.json:
        tests = None if options.no_self_test else [check._asdict() for check in checks]
        print(json.dumps({"ok": ok, **found, "self_test": tests}, indent=2))
    else:
        show([*describe(found), *([""] if checks else []), *(line(check) for check in checks)])
    return 0 if ok else 1


# ---- sentences ----


def describe(found: dict[str, Any]) -> list[str]:
    """One line for each fact of :func:`gradckpt.environment.facts`."""
    versions = found["versions"]
    cuda = versions["torch_cuda"] and f"CUDA {versions['torch_cuda']}"
    rocm = versions["torch_hip"] and f"ROCm {versions['torch_hip']}"
    rows = [
        ("gradckpt", versions["gradckpt"]),
        ("torch", f"{versions['torch']}, {cuda or rocm or 'without CUDA'}{_range('torch', versions['torch_tested'])}"),
        ("Python", f"{versions['python']}, {versions['platform']}"),
        ("build", _build(found["build"])),
        ("CPU codecs", _isa(found["isa"])),
        ("CUDA codecs", _cuda(found["cuda"])),
        *((f"GPU {i}", _gpu(card)) for i, card in enumerate(found["cuda"]["gpus"])),
        *(("variable", _variable(name, value)) for name, value in found["variables"].items()),
        *(("torch lacks", f"{name}: {without}") for name, without in found["missing"].items()),
        *((name, _package(name, one)) for name, one in found["integrations"].items() if one["importable"]),
        ("not installed", ", ".join(name for name, one in found["integrations"].items() if not one["importable"])),
    ]
    return [f"{label + ' ':<{_LABEL}}{text}" for label, text in rows if text]


def _range(name: str, tested: bool | None) -> str:
    if name not in environment.TESTED:
        return ""
    first, last = environment.TESTED[name]
    return f" (tested: {first} to {last})" if tested else f" (NOT TESTED; tested: {first} to {last})"


def _build(build: dict[str, Any]) -> str:
    toolkit = build["cuda_toolkit"] and f"CUDA toolkit {build['cuda_toolkit']} for {' '.join(build['cuda_archs'])}"
    return ", ".join(filter(None, (build["note"], toolkit, f"compiler {build['compiler']}")))


def _isa(isa: dict[str, Any]) -> str:
    if isa["used"] == isa["best"]:
        return f"{isa['used']}, the best of this CPU; GRADCKPT_ISA=scalar (or avx2, avx512) forces another"
    by = "GRADCKPT_ISA" if isa["forced_by"] else "gradckpt._C.force_isa"
    return f"{isa['used']}, forced by {by}; the best of this CPU is {isa['best']}"


def _cuda(cuda: dict[str, Any]) -> str:
    driver = f"driver for CUDA {cuda['driver']}" if cuda["driver"] else "no driver found"
    return f"off: {cuda['problem']}" if cuda["problem"] else f"on; {driver}"


def _gpu(card: dict[str, Any]) -> str:
    how = {"native": "native kernels", "PTX": "kernels compiled from PTX at first use", "absent": "NO kernels"}
    size = f", capability {card['capability']}, {card['memory_gib']} GiB" if card["capability"] else ""
    return f"{card['name']}{size}: {how[card['kernels']]}"


def _variable(name: str, value: str) -> str:
    readers = {"import": "", "build": " (read when gradckpt is built)", None: " (gradckpt knows no such variable)"}
    return f"{name}={value}{readers[environment.VARIABLES.get(name)]}"


def _package(name: str, one: dict[str, Any]) -> str:
    return f"{one['version'] or 'of unknown version'}{_range(name, one['tested'])}"


def line(check: selftest.Check) -> str:
    return f"{'ok' if check.ok else 'FAILED':<7}{check.device:<7}{check.name:<23}{check.figure} ({check.bound})"


# ---- output ----


def show(lines: Sequence[str]) -> None:
    """A fenced block, whole lines whatever the width of the terminal; with colours where rich and a terminal are."""
    block = ["```text", *lines, "```"]
    if not sys.stdout.isatty() or not _show_in_colours(block):
        print("\n".join(block))


def _show_in_colours(block: Sequence[str]) -> bool:
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return False
    console = Console(highlight=False)
    for text in block:
        styled = Text(text)
        styled.highlight_regex(r"^ok\b", "green")
        styled.highlight_regex(r"FAILED|NOT TESTED|NO kernels", "bold red")
        styled.highlight_regex(r"^```(text)?$", "dim")
        console.print(styled, soft_wrap=True)
    return True


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`: nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
