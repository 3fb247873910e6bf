"""Commands that have to succeed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class Failed(Exception):
    """A check failed; the output of its command is part of the message."""


def run(command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Return standard output and error of a command; raise Failed if its exit status is not 0."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise Failed(f"{Path(words[0]).name} {' '.join(words[1:4])} failed:\n{done.stdout}")
    return done.stdout


def last_line(text: str) -> str:
    """Return the line that says what was wrong: setup.py's own, the last error of pip or Python,
    or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    errors = [line.removeprefix("ERROR: ") for line in lines if re.match(r"ERROR: |[\w.]+(Error|Exception):", line)]
    ours = [line for line in lines if line.startswith("gradckpt: ")]
    return (ours or errors or lines)[-1]
