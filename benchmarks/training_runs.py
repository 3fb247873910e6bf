"""One run of bench_training.py, and the folder that keeps those which are done.

Kept by task, way and seed, in a folder whose name says what the figures depend on: the tasks, the
ways, the codecs' sources, torch and transformers. What is there is not run again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import training_tasks
import training_ways
import transformers
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
        return self.folder / self.task / f"{self.way}-{self.seed}-{self.steps}.json"


def meaning(source: str) -> str:
    """Return a source without comments and docstrings, which change no figure."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[:1] = [ast.Pass()]
    return ast.unparse(tree)


def folder_of(parent: Path) -> Path:
    """Return the folder of this state of the sources."""
    facts = [meaning(Path(module.__file__).read_text()) for module in (training_tasks, training_ways)]
    facts += [meaning(Path(__file__).read_text()).partition("class Job")[0]]
    facts += [f.read_text() for f in sorted((ROOT / "csrc" / "codec").rglob("*.[ch]"))]
    facts += [torch.__version__, transformers.__version__]
    return parent / hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


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


def differing(task: str, way: str, steps: int, folder: Path, device: str = "cpu") -> list[str]:
    """Train twice with seed 0, without checkpointing and in this way, and compare all bits of
    losses, weights and buffers. Returns the names of what differs."""
    prepare(device)
    pair = [Training(Job(task, each, 0, steps, device, folder)) for each in (training_ways.EXACT, way)]
    losses = [torch.stack([training.step(number) for number in range(steps)]) for training in pair]
    states = [training.state() for training in pair]
    if not pair[1].way.compressed():
        return ["nothing was compressed"]
    found = [] if torch.equal(*losses) else ["loss"]
    return found + [name for name, x in states[0].items() if not torch.equal(x, states[1][name])]
