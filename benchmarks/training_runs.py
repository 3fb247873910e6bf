"""One run of bench_training.py, and the folder that keeps those which are done.

Kept by device, task, way and seed, in a folder whose name says what the figures depend on: the
sources of the tasks, the ways, the runs, the Llama's and gradckpt's own, without comments; the
texts; versions, and the instruction set of torch's kernels. What is there is not run again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import training_tasks
import training_ways
from torch import Tensor, nn
from training_tasks import STRIDE, TASKS, Batch

ROOT = Path(__file__).resolve().parent.parent
#: Losses are kept as the means of so many steps, and validated as often on the way.
POINTS = 50
VALIDATIONS = 10

Run = dict[str, Any]


class Job(NamedTuple):
    task: str
    way: str
    seed: int
    steps: int
    device: str
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / self.device / self.task / f"{self.way}-{self.seed}-{self.steps}.json"


def meaning(source: str, suffix: str = ".py") -> str:
    """Return a source without comments and docstrings, which change no figure."""
    if suffix != ".py":
        return re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/|//[^\n]*", "", source, flags=re.DOTALL))
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[:1] = [ast.Pass()]
    return ast.unparse(tree)


def sources() -> list[Path]:
    """Return what decides a figure; the report does not."""
    mine = [Path(module.__file__) for module in (training_tasks, training_ways, training_tasks.train_llama)]
    kinds = {".py", ".c", ".h", ".cu", ".cuh", ".def"}
    theirs = [file for folder in ("csrc", "gradckpt") for file in sorted((ROOT / folder).rglob("*.*"))]
    return [*mine, Path(__file__), *(file for file in theirs if file.suffix in kinds)]


def versions() -> list[str]:
    found = [platform.python_version(), torch.backends.cpu.get_cpu_capability()]
    for package in ("torch", "transformers", "peft", "scikit-learn"):
        try:
            found.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return found


def folder_of(parent: Path) -> Path:
    """Return the folder of this state of the sources, texts and versions."""
    facts = [meaning(file.read_text(), file.suffix) for file in sources()]
    facts += [str(len(text)) for text in training_tasks.sources()]
    return parent / hashlib.sha256(repr([facts, versions()]).encode()).hexdigest()[:12]


def to(device: str, batch: Batch) -> Batch:
    return {name: x.to(device) for name, x in batch.items()}


class Training:
    """A model, its optimizer and its way, step by step."""

    def __init__(self, job: Job) -> None:
        self.job, self.task = job, TASKS[job.task]
        self.model: nn.Module = self.task.build(job.seed, job.folder).to(job.device)
        self.way = training_ways.Session(job.way, self.task, self.model, job.seed)
        self.optimizer, self.schedule = training_tasks.optimizer_of(self.model, job.steps, self.task.lr)

    def step(self, number: int) -> Tensor:
        batch = to(self.job.device, self.task.batch(self.job.seed * STRIDE + number))
        change = functools.partial(self.way.change_gradients, batch)
        return training_tasks.train_step(self.model, batch, self.optimizer, self.schedule, self.way.autocast, change)

    def state(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.model.state_dict().items()}


def prepare(device: str) -> None:
    """One thread; on a card, kernels that repeat their bits where torch has them."""
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def train(job: Job) -> Run:
    """Train and validate. Returns losses, the error of the bad codec, and seconds."""
    prepare(job.device)
    start = time.perf_counter()
    training = Training(job)
    held_out = [to(job.device, batch) for batch in training.task.held_out()]
    every, seen = max(1, job.steps // VALIDATIONS), max(1, job.steps // POINTS)
    losses: list[Tensor] = []
    validations = []
    for number in range(job.steps):
        losses.append(training.step(number))
        if (number + 1) % every == 0 or number + 1 == job.steps:
            validations.append([number + 1, *training_tasks.validate(training.model, held_out)])
    found = torch.stack(losses).double()
    return {
        "task": job.task,
        "way": job.way,
        "seed": job.seed,
        "steps": job.steps,
        "device": torch.cuda.get_device_name() if job.device == "cuda" else "cpu",
        "parameters": sum(p.numel() for p in training.model.parameters() if p.requires_grad),
        "first_loss": losses[0].item(),
        "losses": [part.mean().item() for part in found.split(seen)],
        "validations": validations,
        "loss": validations[-1][1],
        "accuracy": validations[-1][2],
        "compressed": training.way.compressed(),
        "cut_error": statistics.median(training.way.errors or [0.0]),
        "seconds": time.perf_counter() - start,
    }


def run(job: Job) -> Run:
    """Return what is kept of this job; run it where nothing is."""
    if job.file.exists():
        found: Run = json.loads(job.file.read_text())
        return found
    found = train(job)
    job.file.parent.mkdir(parents=True, exist_ok=True)
    part = job.file.with_suffix(f".part-{os.getpid()}")
    part.write_text(json.dumps(found))
    part.replace(job.file)
    return found


class Pair(NamedTuple):
    """Of a way and exact, from one seed."""

    differing: list[str]  # names of losses, weights and buffers
    codecs: set[str]
    compressed: int  # in each step
    recomputes: int  # in each step


def pair(task: str, way: str, steps: int, folder: Path, device: str = "cpu") -> Pair:
    """Train twice with seed 0, without checkpointing and in this way, and compare all bits of
    losses, weights and buffers."""
    prepare(device)
    exact = Training(Job(task, training_ways.EXACT, 0, steps, device, folder))
    losses = [torch.stack([exact.step(number) for number in range(steps)])]
    mine = Training(Job(task, way, 0, steps, device, folder))
    losses.append(torch.stack([mine.step(number) for number in range(steps)]))
    states = [exact.state(), mine.state()]
    differing = [] if torch.equal(*losses) else ["loss"]
    differing += [name for name, x in states[0].items() if not torch.equal(x, states[1][name])]
    return Pair(differing, mine.way.codecs(), mine.way.compressed() // steps, mine.way.recomputes() // steps)
