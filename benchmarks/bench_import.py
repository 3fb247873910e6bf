"""What ``import gradckpt`` takes beyond ``import torch``.

Each run is a fresh interpreter that imports torch and then gradckpt; one run beforehand warms the
cache of the disk. Seconds of the clock, and of the CPU, which other processes of the machine change
less. Run it with the interpreter of the environment in question: an empty one with the wheel, or
one where transformers and others are installed, too.

The ceiling: 0.3 s over torch's own import; above it the exit status is 1. A trial (--quick) is one
run, perhaps on a busy machine: its ceiling is half of what torch's import takes in it. Checked: the
import is the first of gradckpt in its process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

import guards
import machine

BOUND = 0.3  # seconds over torch, that are asked for

PROGRAM = """
import json, time
def now(): return [time.perf_counter(), time.process_time()]
start = now()
import torch
middle = now()
import sys
assert "gradckpt" not in sys.modules, "gradckpt was imported with torch"
import gradckpt
end = now()
print(json.dumps({"torch": [b - a for a, b in zip(start, middle)], "gradckpt": [b - a for a, b in zip(middle, end)],
                  "versions": [torch.__version__, gradckpt.__version__]}))
"""


def interpreter(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Away from the checkout, so that what is imported is what is installed; with compiled modules,
    which the first run writes."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [sys.executable, *arguments]
        ran = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True)
    said = (ran.stderr.splitlines() or [""])[-1]
    guards.check(ran.returncode == 0, f"bench_import: a fresh interpreter ended with status {ran.returncode}: {said}")
    return ran


def measure(runs: int) -> dict[str, object]:
    found = [json.loads(interpreter("-c", PROGRAM).stdout) for _ in range(runs + 1)][1:]
    result: dict[str, object] = {"torch": found[0]["versions"][0], "gradckpt": found[0]["versions"][1], "runs": runs}
    for i, clock in enumerate(("wall", "cpu")):
        result[f"{clock}_torch_s"] = statistics.median(one["torch"][i] for one in found)
        result[f"{clock}_both_s"] = statistics.median(one["torch"][i] + one["gradckpt"][i] for one in found)
        result[f"{clock}_difference_s"] = statistics.median(one["gradckpt"][i] for one in found)
    return result


def breakdown(count: int) -> list[tuple[str, int, int]]:
    """Modules imported after torch: name, own microseconds, those with what it imports;
    the slowest first."""
    text = interpreter("-X", "importtime", "-c", "import torch; import gradckpt").stderr
    lines = re.findall(r"^import time: +(\d+) \| +(\d+) \| +(\S+)$", text, re.MULTILINE)
    names = [name for _, _, name in lines]
    after = [(name, int(own), int(total)) for own, total, name in lines[names.index("torch") + 1 :]]
    return sorted(after, key=lambda row: -row[1])[:count]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=7, help="fresh interpreters (default %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="the slowest modules")
    machine.add_quick(parser)
    options = parser.parse_args(argv)
    if options.quick:
        options.runs = 1
    found = measure(options.runs)
    print(f"gradckpt {found['gradckpt']}, torch {found['torch']}, Python {sys.version.split()[0]}, {options.runs} runs")
    print(f"{'seconds':<10}{'torch':>10}{'torch, gradckpt':>18}{'difference':>12}")
    for clock in ("wall", "cpu"):
        torch, both, difference = (found[f"{clock}_{what}_s"] for what in ("torch", "both", "difference"))
        print(f"{clock:<10}{torch:>10.3f}{both:>18.3f}{difference:>12.3f}")
    if options.verbose:
        print("\nslowest modules, us own, us with what they import")
        for name, own, total in breakdown(15):
            print(f"{own:>10}{total:>10}  {name}")
    print(json.dumps(found))
    difference, of_torch = found["cpu_difference_s"], found["cpu_torch_s"]
    assert isinstance(difference, float)
    assert isinstance(of_torch, float)
    guards.check(difference > 0, f"importing gradckpt took {difference} s of the processor, so it was not imported")
    bound = of_torch / 2 if options.quick else BOUND
    print(f"ceiling: {bound:.3g} s of the processor over torch's own import")
    guards.at_most("importing gradckpt, s", difference, bound, "the ceiling")
    return 0


if __name__ == "__main__":
    sys.exit(main())
