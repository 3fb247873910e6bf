"""Sizes as people write them: :func:`parse_bytes`."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["parse_bytes"]

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?:(?P<prefix>[KMGTP])(?P<binary>I?))?B?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_bytes(size: str | int) -> int:
    """Return the bytes of ``"24GiB"`` (binary units), ``"24GB"`` (decimal), or a number of bytes.

    Case and spaces have no meaning; ``"24G"`` is decimal, too.

    Raises:
        ValueError: The text is not a size, or less than one byte.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return _whole(size, size)
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None:
        raise ValueError(f"gradckpt: {size!r} is not a size; write it as 24GiB, 24GB or a number of bytes")
    whole, _, decimals = match["number"].partition(".")
    unit: int = (1024 if match["binary"] else 1000) ** _POWERS[(match["prefix"] or "").lower()]
    parsed: int = int(whole + decimals) * unit // 10 ** len(decimals)  # exact, unlike a float
    return _whole(parsed, size) if str(size).strip().isdecimal() else _at_least_one(parsed, size)


def _at_least_one(parsed: int, size: Any) -> int:
    if parsed < 1:
        raise ValueError(f"gradckpt: {size!r} is less than one byte; give a unit, as in 24GiB")
    return parsed


def _whole(parsed: int, size: Any) -> int:
    """Return a number of bytes that was given without a unit, unless a unit was forgotten."""
    if 1 <= parsed < 1024:
        raise ValueError(f"gradckpt: {size!r} is {parsed} bytes; give a unit, as in 24GiB")
    return _at_least_one(parsed, size)
