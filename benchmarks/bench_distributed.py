"""Two ranks on gloo: gradckpt in torch's engines and in accelerate,
beside stock checkpointing there.

    python benchmarks/bench_distributed.py [--json FILE]

The worlds of tests/frameworks/test_distributed.py: a small model and two micro-batches in each
engine, same seed. Of rank 0: modules that are wrapped; whether losses, gradients and the keys of
the state dict are those of stock checkpointing (gradients with None: to the last bit); bytes of the
regions' inputs before and after; the gradients' relative L2 error and cosine over all parameters.
Then whether the two replicas' payloads are the same bytes, and what is said of FSDP's own flag
beside gradckpt. The exit status is 1 when something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import machine
import world_accelerate
import world_torch
import worlds

Row = dict[str, Any]
HEADS = ["engine", "how", "wrapped", "loss", "keys", "KiB", "gradients"]


def ok(row: Row, how: str) -> bool:
    exact = how.endswith("None")
    close = row["equal"] if exact else row["error"] < 0.01 and row["cosine"] > 0.9998 and row["compressed"] > 0
    return bool(row["wrapped"] and row["same losses"] and row["keys"] and close)


def cells(engine: str, how: str, row: Row) -> list[str]:
    exact = how.endswith("None")
    sizes = "-" if exact else f"{row['bytes_in'] / 1024:.0f} -> {row['bytes_out'] / 1024:.0f}"
    close = "equal" if row["equal"] else f"{row['error']:.2%}, {row['cosine']:.6f}"
    same = ["equal" if row[key] else "DIFFERENT" for key in ("same losses", "keys")]
    return [engine, how, str(row["wrapped"]), *same, sizes, close]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each rank found to FILE")
    options = parser.parse_args()
    machine.print_head("two gloo ranks: gradckpt beside stock checkpointing", machine.facts())
    found: dict[str, list[Row]] = {}
    for name, function in (
        ("torch", world_torch.torch_engines),
        ("accelerate", world_accelerate.accelerate_engines),
    ):
        print(f"two ranks: {name} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            found[name] = worlds.run(function, Path(folder))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    rows: list[list[str]] = []
    good = True
    for name, ranks in found.items():
        for engine, hows in ranks[0].items():
            if engine in ("hashes", "flags", "ranks"):
                continue
            for how, row in hows.items():
                rows.append(cells(f"accelerate {engine}" if name == "accelerate" else engine, how, row))
                good &= all(ok(rank[engine][how], how) for rank in ranks)
    machine.print_table("rank 0", HEADS, rows)
    for what, first in found["torch"][0]["hashes"].items():
        same = first == found["torch"][1]["hashes"][what]
        print(f"{what}: {first[0]} payloads on each replica, {'the same bytes' if same else 'DIFFERENT BYTES'}")
        good &= same
    for what, message in found["accelerate"][0]["flags"].items():
        print(f"FSDP's own flag and gradckpt, {what}: {message or 'NOT REFUSED'}")
        good &= message not in (None, "prepared")
    return not good


if __name__ == "__main__":
    sys.exit(main())
