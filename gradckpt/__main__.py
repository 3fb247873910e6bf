"""The console command ``gradckpt``, which is ``python -m gradckpt``: ``doctor``, ``plan``
and ``run``.

The doctor says what is installed, what is in use, and whether it works; to be pasted into an issue.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from gradckpt import run
from gradckpt._doctor import environment, selftest
from gradckpt._version import __version__

_LABEL = 14  # characters
_DESCRIPTION = "Print versions, build, devices and integrations of gradckpt, and test this machine."
_EPILOG = "Exit status: 0 all is well, 1 a self-test failed or gradckpt cannot be used, 2 wrong usage."

_COMMANDS = """commands:
  doctor   print what is installed and test this machine; the default
  plan     compute whether a training step fits into memory, from a config
  run      run a training script as it is, with compressed checkpoints

gradckpt COMMAND --help describes each. python -m gradckpt is the same program.
torchrun and accelerate start the last as a module: torchrun ... -m gradckpt.run train.py"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["doctor"]
    if command == "doctor":
        return doctor(rest)
    if command == "plan":
        with _until_unread():
            status: int = _planner().main(rest)
        if arguments is None:
            gc.freeze()  # the interpreter would look at a million objects, for a second, before it ends
        return status
    if command == "run":
        run.main(rest)
        return 0
    parser = argparse.ArgumentParser(
        prog="gradckpt",
        usage="%(prog)s [command] [arguments]",
        description="Activation checkpointing that keeps its checkpoints compressed.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gradckpt {__version__}")
    if command == "--version":
        parser.parse_args([command])
    if command not in ("-h", "--help"):
        parser.error(_unknown(command))
    parser.print_help()
    return 0


def _planner() -> Any:
    from gradckpt._planning import command  # slow to import

    return command


def _unknown(command: str) -> str:
    if os.path.exists(command):
        return f"{command!r} is no command; to run it: gradckpt run {command}"
    for name, parser in (("doctor", _doctor_parser()), ("run", run.parser()), ("plan", _planner().parser())):
        if command.partition("=")[0] in parser._option_string_actions:
            return f"{command} is an option of {name}; write gradckpt {name} {command} ..."
    near = difflib.get_close_matches(command, ("doctor", "plan", "run"), 1)
    return f"unknown command {command!r}; " + (f"did you mean {near[0]!r}?" if near else "choose doctor, plan or run")


def _doctor_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradckpt doctor", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout, nothing else")
    parser.add_argument("--no-self-test", action="store_true", help="print what is here, without the self-test")
    return parser


def doctor(arguments: Sequence[str]) -> int:
    """Print what is here and whether it works; return the exit status."""
    options = run.parse(_doctor_parser(), arguments)
    with contextlib.redirect_stdout(sys.stderr):  # whatever libraries have to say
        found = environment.facts()
        checks = [] if options.no_self_test else selftest.run()
    ok = all(check.ok for check in checks)
    with _until_unread():
        if options.json:
            tests = None if options.no_self_test else [check._asdict() for check in checks]
            print(json.dumps({"ok": ok, **found, "self_test": tests}, indent=2))
        else:
            show([*describe(found), *([""] if checks else []), *(line(check) for check in checks)])
    return 0 if ok else 1


@contextlib.contextmanager
def _until_unread() -> Iterator[None]:
    """Print in a ``with`` block, and end with status 1 where ``| head`` stops reading."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


# ---- sentences ----


def describe(found: dict[str, Any]) -> list[str]:
    """Return one line for each fact of :func:`gradckpt._doctor.environment.facts`."""
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
        *(("torch differs", text) for text in found["differs"]),
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
    """Print whole lines at any width of the terminal, coloured if rich and a terminal are there."""
    if not sys.stdout.isatty() or not _show_in_colours(lines):
        print("\n".join(lines))


def _show_in_colours(lines: Sequence[str]) -> bool:
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return False
    console = Console(highlight=False)
    for text in lines:
        styled = Text(text)
        styled.highlight_regex(r"^ok\b", "green")
        styled.highlight_regex(r"FAILED|NOT TESTED|NO kernels", "bold red")
        console.print(styled, soft_wrap=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
