"""The same saved profile gives the same bytes of plan, in any process."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guards
import machine
import torch
import transformers
from budget_models import Case, Size, balanced, case_of

import gradckpt

CODECS = ["int8", "int4"]


def plan_from(case: Case, saved: str, path: str, codecs: list[str]) -> None:
    """Plan from a saved plan for a budget between its smallest and what needs no checkpointing."""
    first = gradckpt.Plan.load(saved)
    budget = f"activations:{(first.plain + first.smallest_budget) // 2 - sum(first.fixed.values())}"
    torch.manual_seed(0)
    case.plan(budget, compress=codecs, profile=first).save(path)


def deterministic(o: argparse.Namespace, cases: Callable[..., Any]) -> None:
    rows, codecs = [], o.codecs or CODECS
    for case, _ in cases(o):
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder, "saved.json")
            case.plan(2**50, compress=codecs).save(saved)
            seen = {}
            for seed, threads in ((0, 1), (1, 1), (2, 2), (3, 2))[: 1 if o.quick else None]:
                path = Path(folder, f"plan{seed}.json")
                command = [sys.executable, __file__, case.name, str(saved), str(path), str(threads)]
                command += [",".join(codecs), str(o.width), str(o.tokens), str(o.batch), str(o.layers)]
                subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": str(seed)})
                seen[seed, threads] = path.read_bytes()
            here = Path(folder, "here.json")
            plan_from(case, str(saved), str(here), codecs)
            seen["here", o.threads] = here.read_bytes()
            if len(set(seen.values())) > 1:
                _explain(list(seen.values()))
            digests = {hashlib.sha256(text).hexdigest()[:8] for text in seen.values()}
            rows.append([case.name, str(len(seen)), " ".join(sorted(digests)), "yes" if len(digests) == 1 else "NO"])
            print("  " + "  ".join(rows[-1]), flush=True)
            guards.check(len(digests) == 1, f"{case.name}: {len(digests)} different plans of one profile")
    machine.print_table("plans of one saved profile", ["model", "processes", "digests", "the same"], rows)


def _explain(texts: list[bytes]) -> None:
    first = json.loads(texts[0])
    for text in texts[1:]:
        other = json.loads(text)
        for key in first:
            if first[key] != other[key]:
                print(f"  differs in {key}: {str(first[key])[:200]} and {str(other[key])[:200]}")


def main() -> None:
    name, saved, path, threads, codecs, *size = sys.argv[1:]
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(int(threads))
    case = case_of(name, Size(*map(int, size)))
    assert case is not None
    with balanced(case):
        plan_from(case, saved, path, codecs.split(","))


if __name__ == "__main__":
    main()
