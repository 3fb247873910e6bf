"""A small run of every kernel under compute-sanitizer: memcheck, racecheck, initcheck, synccheck.

    python benchmarks/gpu_sanitize.py [--tools memcheck,racecheck]

Runs `gpu_parity.py --sanitize` under each tool, all of them side by side, without torch's caching
allocator (in whose blocks neither a read out of bounds nor one of memory never written would be
seen). That run copies tensors and launches hardly a kernel but ours, so none is filtered out:
initcheck has to see every write. The exit status is 1 when a tool reports an error or bytes differ.
As a stage of gpu.py: its result has a row for each tool.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import machine
from gpu_job import Job, Skip

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
#: Of a tool that found something: no status that Python or gpu_parity ends with.
FOUND = 86
#: Seconds for all of them.
LIMIT = 300.0
#: Of the stage, in which it writes what it found.
SPARE = 8.0
PROGRAM = [sys.executable, str(pathlib.Path(__file__).with_name("gpu_parity.py")), "--sanitize"]
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: *(.+)")


def find_sanitizer() -> str | None:
    """On PATH, or in the toolkit that nvcc belongs to."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    homes += [str(pathlib.Path(nvcc).resolve().parent.parent)] if nvcc else []
    places = [shutil.which("compute-sanitizer")]
    for home in filter(None, homes):
        places += [f"{home}/bin/compute-sanitizer", f"{home}/compute-sanitizer/compute-sanitizer"]
    return next((p for p in places if p and os.access(p, os.X_OK)), None)


def command(sanitizer: str, tool: str) -> list[str]:
    # torch asks the driver what it may not know and looks at the answer: such calls are no errors.
    api = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *api, *PROGRAM]


def verdict(status: int, said: str) -> str:
    """One line on a tool's run; "" when all is well."""
    if status == 0:
        return ""
    if status == FOUND:
        return "it reports errors"
    if re.search(r"[1-9][\d,]* differences", said):
        return "bytes differ under it"
    return f"it did not come to its end (status {status})"


def shortened(said: str) -> str:
    """The first report says most; the end, how many there are."""
    return said if len(said) <= 8000 else f"{said[:4000]}\n[...]\n{said[-4000:]}"


def run_tools(sanitizer: str, tools: list[str], device: str, limit: float = LIMIT) -> list[tuple[str, str, str, str]]:
    """(tool, summary, verdict, all it said)"""
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    ends = time.monotonic() + limit
    found = []
    with tempfile.TemporaryDirectory() as folder:
        logs = {tool: pathlib.Path(folder, tool) for tool in tools}
        running = {}
        for tool, log in logs.items():
            with log.open("w") as out:
                running[tool] = subprocess.Popen(
                    [*command(sanitizer, tool), "--device", device],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                )
        try:
            for process in running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(1.0, ends - time.monotonic()))
        finally:
            for process in running.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # the tool, and what it runs
        for tool, process in running.items():
            said = logs[tool].read_text(errors="replace")
            summary = SUMMARY.findall(said)
            found.append((tool, summary[-1] if summary else "-", verdict(process.wait(), said), said))
    return found


def run(job: Job) -> None:
    """A stage of gpu.py."""
    if not job.device.is_cuda:
        raise Skip("needs CUDA: compute-sanitizer watches kernels of a card")
    sanitizer = find_sanitizer()
    if sanitizer is None:
        raise Skip("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    row = job.table("every kernel under compute-sanitizer", ["tool", "its summary", "verdict"])
    job.progress(", ".join(TOOLS))
    for tool, summary, wrong, said in run_tools(sanitizer, list(TOOLS), job.device.kind, job.left - SPARE):
        row(tool, summary, wrong or "ok")
        if not job.check(not wrong, f"{tool}: {wrong}: {summary}"):
            print(shortened(said), flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_device(parser)
    parser.add_argument("--tools", default=",".join(TOOLS), help="comma-separated, of: %(default)s")
    options = parser.parse_args(argv)
    machine.choose(parser, options, "tools", TOOLS)
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    machine.require(options.device, "gpu_sanitize")
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("gpu_sanitize: compute-sanitizer is not installed (it comes with the CUDA toolkit), so nothing was run.")
        return 0
    start = time.perf_counter()
    found = run_tools(sanitizer, options.tools, options.device)
    for tool, _, wrong, said in found:
        if wrong:
            print(f"---- {tool}: {wrong} ----\n{shortened(said)}")
    rows = [[tool, summary, wrong or "ok"] for tool, summary, wrong, _ in found]
    machine.print_table("every kernel under compute-sanitizer", ["tool", "its summary", "verdict"], rows)
    print(f"{time.perf_counter() - start:.0f} s")
    return 1 if any(wrong for _, _, wrong, _ in found) else 0


if __name__ == "__main__":
    sys.exit(main())
