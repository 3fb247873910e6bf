"""Does a training run end in the same place when activations are compressed?

    python benchmarks/bench_training.py [--tasks llama,vit] [--ways exact,int8] [--seeds 10]
        [--jobs N] [--folder build/training] [--page docs/numerics.md] [--picture FILE]
    python benchmarks/bench_training.py --tasks llama-5m --device cuda --seeds 3

Trains each task (benchmarks/training_tasks.py) in each way (benchmarks/training_ways.py) from each
seed, each run on one core. Within a seed all ways start from the same weights and see the same
batches in the same order, and every way is compared with ``exact`` of its seed: the differences of
the last validation loss, their mean and its 95 % interval (Student's t).

Runs are kept in --folder, and an interrupted program goes on where it stopped; a run itself starts
anew. Change a task, a way or a codec, and all runs are made again. --page puts the tables between
their marks on that page; --picture draws the losses and the differences (with matplotlib).

Checked: the first loss of our ways is that of ``exact`` to the last bit, and something was
compressed; every task learns; ``lossless`` and ``save_attention:int8`` leave losses, weights and
buffers equal to the last bit over 50 steps. The controls: the interval of gradients changed by 1e-6
contains 0, and that of a codec with 25 % gradient error does not.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import logging
import math
import multiprocessing
import os
import sys
import tempfile
import warnings
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


def run_all(jobs: list[Job], processes: int) -> list[Run]:
    """Return the runs in the order of the jobs. One process: here, for a card and for trials."""
    found: dict[Job, Run] = {}
    with machine.progress(len(jobs)) as step, contextlib.ExitStack() as open_:

        def done(job: Job, run: Run) -> None:
            found[job] = run
            words = f"{job.task}, {job.way}, seed {job.seed}"
            step(words)
            if not sys.stdout.isatty():
                print(f"{len(found)} of {len(jobs)}: {words}: {run['loss']:.4f}", file=sys.stderr, flush=True)

        if processes == 1:
            for job in jobs:
                done(job, training_runs.run(job))
        else:
            spawn = multiprocessing.get_context("spawn")
            pool = open_.enter_context(concurrent.futures.ProcessPoolExecutor(processes, spawn))
            open_.callback(pool.shutdown, cancel_futures=True)
            waiting = {pool.submit(training_runs.run, job): job for job in jobs}
            for finished in concurrent.futures.as_completed(waiting):
                done(waiting[finished], finished.result())
    return [found[job] for job in jobs]


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
        else:
            guards.check(run["compressed"] == 0, f"{what}: something was compressed")
        if full and run["way"] == EXACT:
            guards.check(run["losses"][-1] < 0.9 * run["losses"][0], f"{what}: nothing was learned")


def check_equal(options: argparse.Namespace, folder: Path) -> list[str]:
    """Compare exact ways bit by bit; return what was compared."""
    found = []
    for task in options.tasks:
        for way in training_ways.of_task(TASKS[task], EQUAL):
            differing = training_runs.differing(task, way, options.equal_steps, folder, options.device)
            guards.check(not differing, f"{task}, {way}: {', '.join(differing[:3])} differ from those of {EXACT}")
            found.append(f"{task} {way}")
    return found


def check_controls(found: list[Comparison]) -> None:
    for one in found:
        if one.way == NOISE:
            # One interval in twenty leaves 0 out by chance; this share of the spread is nothing.
            good = one.contains_zero or abs(one.mean) < 0.01 * one.spread
            guards.check(good, f"{one.task}: a change of 1e-6 is told from 0 ({one.words}), so seeds are no pairs")
        if one.way == CUT:
            guards.check(
                not one.contains_zero, f"{one.task}: an error of 25 % is not told from 0 ({one.words}); change the task"
            )


# ---- the program


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(training_tasks.SMALL), help="comma-separated (%(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated (%(default)s)")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each way (%(default)s)")
    parser.add_argument("--jobs", type=int, default=None, help="processes, each with one thread (the cores)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "training", help="keeps the runs (%(default)s)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the tables between the marks of this page")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the losses to this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    machine.add_quick(parser)
    options = parser.parse_args(argv)
    options.steps, options.equal_steps = None, EQUAL_STEPS
    if options.quick:
        options.steps, options.equal_steps, options.seeds, options.jobs = 3, 2, 2, 1
        options.tasks, options.ways = "llama,resnet", f"{EXACT},int8,{NOISE},{CUT}"
    machine.choose(parser, options, "tasks", TASKS)
    machine.choose(parser, options, "ways", WAYS)
    if EXACT not in options.ways:
        options.ways.insert(0, EXACT)
    if options.seeds < 2:
        parser.error("--seeds: at least 2, or there is no interval")
    options.jobs = options.jobs or (1 if options.device == "cuda" else len(os.sched_getaffinity(0)))
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    if options.device == "cuda":
        machine.require("cuda", "bench_training")
    facts: dict[str, Any] = {**machine.facts(options.device), "transformers": transformers.__version__}
    trial = contextlib.ExitStack()  # keeps nothing
    if options.quick:
        options.folder = Path(trial.enter_context(tempfile.TemporaryDirectory()))
    folder = training_runs.folder_of(options.folder)
    try:
        for task in options.tasks:
            TASKS[task].held_out()  # or the sentence about what is missing
        equal = check_equal(options, folder)
        runs = run_all(jobs_of(options, folder), options.jobs)
        trial.close()
    except training_tasks.MissingPackageError as missing:
        sys.exit(f"bench_training: {missing}")
    except KeyboardInterrupt:
        sys.exit("bench_training: interrupted; the same command goes on with what is left")
    check_runs(runs, full=not options.quick)
    found = compare(runs)
    machine.print_head("training with compressed activations", facts)
    print(f"equal to the last bit over {options.equal_steps} steps: {', '.join(equal)}")
    print(f"{training_report.first_sentence(found)}\n\n{training_report.text(runs, found)}")
    if not options.quick:
        check_controls(found)
    if options.page:
        options.page.write_text(training_report.page_with(runs, found, options.page.read_text()))
    if options.picture:
        training_report.draw(runs, found, options.picture)
    if options.json:
        report = {"benchmark": "training", **facts, "runs": runs, "comparisons": [one._asdict() for one in found]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
