"""Does a training run end in the same place when activations are compressed?

    python benchmarks/bench_training.py [--tasks llama,vit] [--ways exact,int8] [--seeds 10]
        [--jobs N] [--folder build/training] [--page docs/numerics.md] [--picture FILE]
    python benchmarks/bench_training.py --tasks llama-5m --device cuda --seeds 3

Trains each task (benchmarks/training_tasks.py) in each way (benchmarks/training_ways.py) from each
seed, each run on one core. Within a seed all ways start from the same weights and see the same
batches in the same order, and every way is compared with ``exact`` of its seed: the differences of
the last validation loss, their mean and its 95 % interval (Student's t).

Ways: no checkpointing (exact), bf16 autocast, codecs by name, recompute=False (saved),
policy="save_matmuls:int8" (products), stochastic rounding, and the two controls (noise, cut).
A run takes up to a minute on one core, and the first one of lora trains its base before. --page
takes all tasks and ways. --quick: 3 steps of llama and resnet, exact, int8 and the controls, two
seeds, unless others are given; nothing is kept.

Runs are kept in --folder, and an interrupted program goes on where it stopped; a run itself
starts anew. Change a source that matters (comments do not), a version or the instruction set of
the machine, and all runs are made again. --page puts the tables between their marks on that page;
--picture draws the losses and the differences (with matplotlib).

Checked: the first loss of our ways is that of ``exact`` to the last bit; each way uses its codec,
compresses in every step, recomputes or does not, and changes something; ``lossless`` and
``save_attention:int8`` leave losses, weights and buffers equal to the last bit over 50 steps; every
task learns. The controls: gradients changed by 1e-6 differ by less than a twentieth of the seeds'
standard deviation and their interval contains 0 (or their mean is below a hundredth); that of a
codec with 25 % gradient error does not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import guards
import machine
import torch
import training_report
import training_runs
import training_tasks
import training_ways
import transformers
from training_report import Comparison, compare
from training_runs import Job, Run
from training_tasks import TASKS
from training_ways import BF16, CUT, EQUAL, EXACT, NOISE, OURS, WAYS

ROOT = Path(__file__).resolve().parent.parent
EQUAL_STEPS = 50


def jobs_of(options: argparse.Namespace, folder: Path) -> list[Job]:
    """All runs; those of a seed follow one another, so that what is done can be compared early."""
    return [
        Job(task, way, seed, options.steps or TASKS[task].steps, options.device, folder)
        for seed in range(options.seeds)
        for way in options.ways
        for task in options.tasks
        if way in training_ways.of_task(TASKS[task], WAYS)
    ]


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the first process, which ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_all(jobs: list[Job], processes: int) -> list[Run]:
    """Return the runs in the order of the jobs. One process: here, for a card and for trials."""
    found: list[Run] = []
    with contextlib.ExitStack() as open_:
        step = open_.enter_context(machine.progress(len(jobs)))
        runs = map(training_runs.run, jobs)
        if processes > 1:
            pool = multiprocessing.get_context("spawn").Pool(processes, ignore_interrupts)
            runs = open_.enter_context(pool).imap(training_runs.run, jobs)
        for job, run in zip(jobs, runs, strict=True):
            found.append(run)
            words = f"{job.task}, {job.way}, seed {job.seed}"
            step(words)
            if not sys.stdout.isatty():
                print(f"{len(found)} of {len(jobs)}: {words}: {run['loss']:.4f}", file=sys.stderr, flush=True)
    return found


# ---- what is checked


def check_runs(runs: list[Run], full: bool) -> None:
    first = {(run["task"], run["seed"]): run["first_loss"] for run in runs if run["way"] == EXACT}
    for run in runs:
        what = f"{run['task']}, {run['way']}, seed {run['seed']}"
        guards.check(math.isfinite(run["loss"]), f"{what}: the loss is not finite")
        if run["way"] != BF16:
            same = run["first_loss"] == first[run["task"], run["seed"]]
            guards.check(same, f"{what}: the first loss is not that of {EXACT}, so the runs are no pair")
        if run["way"] in OURS:
            guards.at_least(f"{what}: tensors compressed", run["compressed"], run["steps"], "one in each step")
        if full and run["way"] == EXACT:
            fell = run["loss"] < 0.97 * run["validations"][0][1]
            guards.check(fell, f"{what}: the validation loss fell by less than 3 % after its first tenth")


def check_ways(options: argparse.Namespace, folder: Path) -> list[str]:
    """Train in each way for a few steps beside exact; return those that change no bit."""
    equal = []
    for task in options.tasks:
        for name in training_ways.of_task(TASKS[task], WAYS | EQUAL):
            if name == EXACT or (name in WAYS and name not in options.ways):
                continue
            steps = options.equal_steps if name in EQUAL else 1
            found = training_runs.pair(task, name, steps, folder, options.device)
            check_way(f"{task}, {name}", name, found)
            equal += [f"{task} {name}"] if name in EQUAL else []
    return equal


def check_way(what: str, name: str, found: training_runs.Pair) -> None:
    way = (WAYS | EQUAL)[name]
    if name in EQUAL:
        words = f"{', '.join(found.differing[:3])} differ from those of {EXACT}"
        guards.check(not found.differing, f"{what}: {words}")
    else:
        guards.check(bool(found.differing), f"{what}: nothing differs from {EXACT}, so it is no other way")
    guards.check(
        (found.compressed > 0) == bool(way.settings), f"{what}: {found.compressed} tensors compressed in a step"
    )
    if way.codec:
        codecs = ", ".join(sorted(found.codecs)) or "none"
        guards.check(way.codec in found.codecs, f"{what}: its codecs are {codecs}, not {way.codec}")
    recomputes = bool(way.settings) and way.settings.get("recompute", True)
    guards.check((found.recomputes > 0) == recomputes, f"{what}: {found.recomputes} recomputes in a step")


def check_controls(found: list[Comparison]) -> None:
    for one in found:
        if one.way == NOISE:
            small = one.deviation <= training_report.SHARE * one.spread
            guards.check(small, f"{one.task}: a change of 1e-6 grows to {one.deviation:.2g}; lower the learning rate")
            # One interval in twenty leaves 0 out by chance; this share of the spread is nothing.
            good = one.contains_zero or abs(one.mean) < 0.01 * one.spread
            guards.check(good, f"{one.task}: a change of 1e-6 is told from 0 ({one.words})")
        if one.way == CUT:
            guards.check(
                not one.contains_zero, f"{one.task}: an error of 25 % is not told from 0 ({one.words}); change the task"
            )


# ---- the program


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small = ",".join(training_tasks.SMALL)
    parser.add_argument(
        "--tasks", help=f"comma-separated ({small}); also {','.join(TASKS.keys() - training_tasks.SMALL)}"
    )
    parser.add_argument("--ways", help=f"comma-separated ({','.join(WAYS)})")
    parser.add_argument("--seeds", type=int, help="runs of each way, at least 2 (10)")
    parser.add_argument("--jobs", type=int, default=None, help="processes, each with one thread (the cores)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "training", help="keeps the runs (%(default)s)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the tables between the marks of this page")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the losses to this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    machine.add_quick(parser)
    options = parser.parse_args(argv)
    options.steps, options.equal_steps = None, EQUAL_STEPS
    if options.quick:  # of what was not given
        options.steps, options.equal_steps, options.jobs = 3, 2, 1
        options.seeds = 2 if options.seeds is None else options.seeds
        options.tasks, options.ways = options.tasks or "llama,resnet", options.ways or f"{EXACT},int8,{NOISE},{CUT}"
    options.seeds = 10 if options.seeds is None else options.seeds
    options.tasks = ",".join(training_tasks.SMALL) if options.tasks is None else options.tasks
    options.ways = ",".join(WAYS) if options.ways is None else options.ways
    machine.choose(parser, options, "tasks", TASKS)
    machine.choose(parser, options, "ways", WAYS)
    if EXACT not in options.ways:
        options.ways.insert(0, EXACT)
    if options.seeds < 2:
        parser.error("--seeds: at least 2, or there is no interval")
    if options.jobs is not None and options.jobs < 1:
        parser.error("--jobs: at least 1")
    for path in (options.picture, options.json):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path.parent} is no folder")
    if options.page:
        check_page(parser, options)
    options.jobs = options.jobs or (1 if options.device == "cuda" else len(os.sched_getaffinity(0)))
    return options


def check_page(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Look for what would be missed hours later."""
    whole = set(options.tasks) >= set(training_tasks.SMALL) and set(options.ways) == set(WAYS)
    if options.quick or not whole:
        parser.error("--page: only with all tasks and ways")
    if not options.page.is_file():
        parser.error(f"--page: {options.page} is no file")
    text = options.page.read_text()
    missing = [mark for mark in (*training_report.FIRST, *training_report.MARKS) if mark not in text]
    if missing:
        parser.error(f"--page: {options.page} lacks the mark {missing[0]}")


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    machine.allow_old_name()
    reason = machine.why_no_cuda() if options.device == "cuda" else None
    if reason:
        sys.exit(f"bench_training: {reason}; without --device it trains on the cores")
    if options.picture:
        import matplotlib  # noqa: F401  # missing, it would be missed hours later
    facts: dict[str, Any] = {**machine.facts(options.device), "transformers": transformers.__version__}
    trial = contextlib.ExitStack()  # keeps nothing
    if options.quick:
        options.folder = Path(trial.enter_context(tempfile.TemporaryDirectory()))
    folder = training_runs.folder_of(options.folder)
    try:
        for task in options.tasks:
            TASKS[task].held_out()  # or the sentence about what is missing
        equal = check_ways(options, folder)
        runs = run_all(jobs_of(options, folder), options.jobs)
        trial.close()
    except training_tasks.MissingPackageError as missing:
        sys.exit(f"bench_training: {missing}")
    except KeyboardInterrupt:
        later = "" if options.quick else "; the same command goes on with what is left"
        sys.exit(f"bench_training: interrupted{later}")
    check_runs(runs, full=not options.quick)
    found = compare(runs)
    machine.print_head("training with compressed activations", facts)
    print(f"equal to the last bit over {options.equal_steps} steps: {', '.join(equal)}")
    print(f"{training_report.first_sentence(found)}\n\n{training_report.text(runs, found)}")
    if options.picture:
        training_report.draw(runs, found, options.picture)
    if options.json:
        report = {"benchmark": "training", **facts, "runs": runs, "comparisons": [one._asdict() for one in found]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if not options.quick:
        check_controls(found)
    if options.page:
        options.page.write_text(training_report.page_with(runs, found, options.page.read_text()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
