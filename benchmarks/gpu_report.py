"""What gpu.py leaves in its folder: results.json, and results.md for a reader."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from typing import Any

Result = dict[str, Any]


def facts_of(found: list[Result]) -> Result:
    """Of the first stage that came to its end: the machine, the device, torch."""
    return next((r["figures"]["facts"] for r in found if "facts" in r["figures"]), {})


def as_json(options: argparse.Namespace, found: list[Result]) -> Result:
    failures = sum(len(r["failures"]) for r in found)
    return {
        "benchmark": "gpu",
        "device": options.device,
        "small": options.small,
        "facts": facts_of(found),
        "estimate_s": sum(r["estimate_s"] for r in found),
        "seconds": round(sum(r["seconds"] for r in found), 1),
        "failures": failures,
        "failed": [r["stage"] for r in found if r["failures"] or r["status"] == "failed"],
        "stages": found,
    }


def escaped(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def table(columns: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(escaped(value) for value in line) + " |" for line in lines] + [""]


def as_markdown(whole: Result) -> str:
    lines = [f"# gradckpt on {whole['facts'].get('gpu', whole['device'])}", ""]
    if whole["small"]:
        lines += ["A rehearsal with tiny sizes: its figures mean nothing.", ""]
    lines += [", ".join(f"{key} {value}" for key, value in whole["facts"].items()), ""]
    rows = [
        [r["stage"], r["title"], r["status"], r["passed"], len(r["failures"]), len(r["skipped"])]
        + [f"{r['seconds']:.0f}", f"{r['estimate_s']:g}"]
        for r in whole["stages"]
    ]
    columns = ["stage", "what", "status", "checks passed", "failed", "skipped", "s", "estimated s on an H100"]
    lines += table(columns, rows)
    lines += [f"Failures: {whole['failures']}.", ""]
    for r in whole["stages"]:
        lines += [f"## {r['stage']}: {r['title']}", ""]
        lines += [f"- FAILED: {sentence}" for sentence in r["failures"]]
        lines += [f"- skipped: {sentence}" for sentence in r["skipped"]]
        lines += [f"- {sentence}" for sentence in r["notes"]]
        lines += [""] if r["failures"] or r["skipped"] or r["notes"] else []
        for each in r["tables"]:
            if each["rows"]:
                lines += [f"**{each['title']}**", "", *table(each["columns"], each["rows"])]
        lines += [f"![{name}]({name})\n" for name in r["pictures"]]
    return "\n".join(lines)


def write_whole(path: pathlib.Path, text: str) -> None:
    made = path.with_suffix(".new")
    made.write_text(text)
    os.replace(made, path)


def write(options: argparse.Namespace, found: list[Result]) -> None:
    whole = as_json(options, found)
    write_whole(options.out / "results.json", json.dumps(whole, indent=1) + "\n")
    write_whole(options.out / "results.md", as_markdown(whole))
