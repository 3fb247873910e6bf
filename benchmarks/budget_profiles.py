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

import machine
import torch
import transformers
from budget_models import Case, Size, balanced, case_of

from gradckpt._planning.block_times import Cost
from gradckpt._planning.budget import Budget
from gradckpt._planning.options import KEEP
from gradckpt._planning.profile import Profile
from gradckpt._training_step import alone

CODECS = ("int8", "int4")


class SavedCosts:
    """Costs of regions from a file, in place of measured ones."""

    def __init__(self, profile: Profile, numbers: list[list[list[float]]]) -> None:
        self._of = {
            (id(block), option): Cost(*cost)
            for block, row in zip(profile.blocks, numbers, strict=True)
            for option, cost in zip(profile.options, row, strict=True)
        }

    def of(self, block: Any, option: Any) -> Cost | None:
        return self._of.get((id(block), option))


def numbers_of(profile: Profile) -> dict[str, Any]:
    """What is measured of a profile; the rest is arithmetic on the model's shapes."""
    costs = [[profile.cost(i, option) for option in profile.options] for i in range(len(profile.blocks))]
    return {
        "step_seconds": profile.step_seconds,
        "costs": [[[cost.seconds, cost.error] for cost in row] for row in costs],
    }


def plan_from(case: Case, numbers: dict[str, Any], path: str) -> None:
    profile = case.profile(CODECS, measure=False)
    profile.step_seconds = numbers["step_seconds"]
    profile.costs = SavedCosts(profile, numbers["costs"])  # type: ignore[assignment]
    peak = profile.traces[KEEP].peak().size
    with alone(case.model):
        torch.manual_seed(0)
        profile.plan(Budget(peak * 6 // 10, True, "60%"), batch=case.batch).save(path)


def deterministic(o: argparse.Namespace, cases: Callable[..., Any]) -> None:
    rows = []
    for case, _ in cases(o):
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder, "profile.json")
            saved.write_text(json.dumps(numbers_of(case.profile(CODECS))))
            seen = {}
            for seed, threads in ((0, 1), (1, 1), (2, 2), (3, 2)):
                path = Path(folder, f"plan{seed}.json")
                command = [sys.executable, __file__, case.name, str(saved), str(path), str(threads)]
                command += [str(o.width), str(o.tokens), str(o.batch)]
                subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": str(seed)})
                seen[seed, threads] = path.read_bytes()
            here = Path(folder, "here.json")
            plan_from(case, json.loads(saved.read_text()), str(here))
            seen["here", o.threads] = here.read_bytes()
            if len(set(seen.values())) > 1:
                _explain(list(seen.values()))
            digests = {hashlib.sha256(text).hexdigest()[:8] for text in seen.values()}
            rows.append([case.name, str(len(seen)), " ".join(sorted(digests)), "yes" if len(digests) == 1 else "NO"])
            print("  " + "  ".join(rows[-1]), flush=True)
    machine.print_table("plans of one saved profile", ["model", "processes", "digests", "the same"], rows)


def _explain(texts: list[bytes]) -> None:
    first = json.loads(texts[0])
    for text in texts[1:]:
        other = json.loads(text)
        for key in first:
            if first[key] != other[key]:
                print(f"  differs in {key}: {str(first[key])[:200]} and {str(other[key])[:200]}")


def main() -> None:
    name, saved, path, threads, *size = sys.argv[1:]
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(int(threads))
    case = case_of(name, Size(*map(int, size)))
    assert case is not None
    with balanced(case):
        plan_from(case, json.loads(Path(saved).read_text()), path)


if __name__ == "__main__":
    main()
