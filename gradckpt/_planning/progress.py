"""What is being computed, on the terminal: :func:`late_progress`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

__all__ = ["late_progress"]

#: Seconds of work that is not worth a word.
_SILENT = 3.0


@contextlib.contextmanager
def late_progress(work: str, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is being computed, from the third second on and if stderr is
    a terminal; at the end of the block nothing of it remains.
    """
    shown = shown and sys.stderr is not None and sys.stderr.isatty()
    began, written = time.monotonic(), False

    def show(text: str) -> None:
        nonlocal written
        if shown and time.monotonic() - began >= _SILENT:
            written = True
            print(f"\r\x1b[Kgradckpt: {work}: {text} ...", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if written:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
