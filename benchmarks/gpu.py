"""Everything that a device can show of gradckpt, in one go: `make gpu`.

    python benchmarks/gpu.py [--stages smoke,kernels] [--device cuda] [--small] [--out FOLDER]

Each stage runs in a process of its own with a time limit; one that fails or is ended there is
counted and named, and the next one runs. The folder gets results.json and results.md, the picture
story.png, and a log of each stage. The exit status is 1 when a stage failed.

--device cpu --small rehearses the stages' code: tiny, and its figures mean nothing. --device
virtual does so on the device of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gpu_report
import machine
from gpu_device import Device, why_not
from gpu_job import Job, Stage

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: The most valuable first. Estimates: docs/performance.md has their sources.
STAGES = (
    Stage("smoke", "every entry point and codec", 30, 90),
    Stage("parity", "bytes of the kernels against the host's", 70, 80),
    Stage("sanitize", "kernels under compute-sanitizer", 60, 150),
    Stage("streams", "streams, threads, captures, GradScaler", 20, 60),
    Stage("offload", "payloads in host memory: rate, order, ways", 20, 90),
    Stage("kernels", "speed of the kernels beside a device copy", 30, 90),
    Stage("host", "host cost of a region beside torch's", 15, 45),
    Stage("neighbours", "libraries beside gradckpt", 30, 90),
    Stage("story", "memory, time and error of each way to train", 185, 230),
    Stage("fidelity", "update ratio and SQNR of each layer", 20, 45),
)
SECONDS = 480.0
#: Less than this is no time for a stage.
LEAST = 5.0
#: A rehearsal runs beside other programs, on few cores: it has so many times the limits.
PATIENCE = 4.0


# ---- a stage, in its process


def run_stage(options: argparse.Namespace) -> int:
    """The other end of run_one(): 0, also where checks failed; the result file has them."""
    path = pathlib.Path(options.file)
    sys.path.insert(0, str(path.parent))
    device = Device(options.device)
    reason = why_not(device)
    if reason:
        sys.exit(f"gpu: {reason}; --device cpu --small rehearses")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    job = Job(device, options)
    with job.part("the whole stage"):
        module.run(job)
    job.figures.setdefault("facts", device.facts())
    job.write()
    return 0


# ---- all of them


def command_of(stage: Stage, options: argparse.Namespace, result: pathlib.Path, limit: float) -> list[str]:
    words = [sys.executable, str(pathlib.Path(__file__).resolve()), "--stage", stage.name, "--file", str(stage.path)]
    words += ["--device", options.device, "--out", str(options.out), "--result", str(result), "--seconds", f"{limit}"]
    return [*words, "--small"] if options.small else words


def lines_until(process: subprocess.Popen[str], ends: float) -> Iterator[str]:
    """What it prints, as it does; stops at its end, also where a process that it has started holds
    its output open, or at that time."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while time.monotonic() < ends:
        ended = process.poll() is not None
        try:
            line = lines.get(timeout=min(1.0, max(0.01, ends - time.monotonic())))
        except queue.Empty:
            if ended:
                return
            continue
        if line is None:
            return
        yield line


def end(process: subprocess.Popen[str]) -> None:
    """The stage, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits in a driver stays
        process.wait(10)


def read_result(path: pathlib.Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        empty: dict[str, Any] = {"passed": 0, "failures": [], "skipped": [], "notes": []}
        return {"status": "failed", **empty, "tables": [], "pictures": [], "figures": {}}
    return found


def run_one(stage: Stage, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Its result: that of its file, and how its process ended."""
    result, log = options.out / f"{stage.name}.json", options.out / f"{stage.name}.log"
    result.unlink(missing_ok=True)
    start = time.monotonic()
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    # What a step needs is that of torch's defaults.
    env |= {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    env.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if options.small:
        env.setdefault("OMP_NUM_THREADS", "1")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command_of(stage, options, result, limit),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
    )
    try:
        last = ""
        with log.open("w") as written:
            for line in lines_until(process, start + limit):
                written.write(line)
                last = line.strip() or last
                if line.startswith("["):
                    print(line, end="", flush=True)
        # It may close its output before it ends.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, start + limit - time.monotonic()))
        status = process.poll()
    finally:
        end(process)
    found = read_result(result)
    result.unlink(missing_ok=True)
    if status is None:
        found["failures"].append(f"ended at its limit of {limit:.0f} s, at: {last[:200]}")
        found["status"] = "ended"
    elif status:
        found["failures"].append(f"its process ended with status {status}: {last[:300]}")
        found["status"] = "failed"
    found |= {"stage": stage.name, "title": stage.title, "seconds": round(time.monotonic() - start, 1)}
    return {**found, "estimate_s": stage.estimate, "limit_s": round(limit, 1), "log": log.name}


def not_started(stage: Stage, total: float) -> dict[str, Any]:
    sentence = f"not started: the {total:.0f} s of --seconds were used"
    found = {**read_result(pathlib.Path("/nonexistent")), "stage": stage.name, "title": stage.title, "seconds": 0.0}
    return {**found, "failures": [sentence], "estimate_s": stage.estimate, "limit_s": 0.0, "log": None}


def say_estimates(stages: Sequence[Stage]) -> None:
    print("estimated on an H100, in seconds: " + ", ".join(f"{s.name} {s.estimate:g}" for s in stages), flush=True)
    print(f"sum {sum(s.estimate for s in stages):g} s of {SECONDS:g}", flush=True)


def run_all(stages: Sequence[Stage], options: argparse.Namespace) -> list[dict[str, Any]]:
    ends = time.monotonic() + options.seconds
    found = []
    for number, stage in enumerate(stages, 1):
        left = ends - time.monotonic()
        print(f"---- {number} of {len(stages)}: {stage.name}, {stage.title}", flush=True)
        limit = min(stage.limit * (PATIENCE if options.small else 1.0), left)
        found.append(run_one(stage, options, limit) if left >= LEAST else not_started(stage, options.seconds))
        r = found[-1]
        counts = f"{r['passed']} checks passed, {len(r['failures'])} failed, {len(r['skipped'])} skipped"
        print(f"---- {stage.name}: {r['status']}, {r['seconds']:.0f} s, {counts}", flush=True)
        gpu_report.write(options, found)  # what is there if this run is ended
    return found


def parse(argv: list[str] | None, stages: Sequence[Stage]) -> argparse.Namespace:
    names = [stage.name for stage in stages]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(names), help="comma-separated, of: %(default)s")
    parser.add_argument("--device", default="cuda", help="a device type of torch (%(default)s)")
    parser.add_argument("--small", action="store_true", help="a rehearsal: tiny sizes, no figure is judged")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the results (build/gpu/<time>)")
    parser.add_argument(
        "--seconds", type=float, help=f"for all stages together ({SECONDS:g}; --small: {PATIENCE:g} times)"
    )
    for hidden in ("--stage", "--file", "--result"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.stage is None:
        machine.choose(parser, options, "stages", names)
        if options.seconds is None:
            options.seconds = SECONDS * (PATIENCE if options.small else 1.0)
        if options.seconds <= 0:
            parser.error("--seconds is above 0")
        if options.device == "cpu" and not options.small:
            parser.error("--device cpu is a rehearsal: it needs --small")
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    options.out = (options.out or ROOT / "build" / "gpu" / now).resolve()
    return options


def main(argv: list[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    options = parse(argv, stages)
    if options.stage is not None:
        return run_stage(options)
    options.out.mkdir(parents=True, exist_ok=True)
    if reason := why_not(Device(options.device)):
        sys.exit(f"gpu: {reason}; --device cpu --small rehearses")
    chosen = [stage for stage in stages if stage.name in options.stages]
    say_estimates(chosen)
    start = time.monotonic()
    found = run_all(chosen, options)
    failed = [r["stage"] for r in found if r["failures"] or r["status"] == "failed"]
    print(f"gpu: {len(found) - len(failed)} of {len(found)} stages passed in {time.monotonic() - start:.0f} s")
    if failed:
        print(f"gpu: {len(failed)} failed: {' '.join(failed)}")
    print(f"gpu: results in {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
