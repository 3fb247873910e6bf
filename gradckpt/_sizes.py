"""Sizes as people write them: :func:`parse_bytes`."""

from __future__ import annotations

import re
from typing import Any

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?:(?P<prefix>[KMGTP])(?P<binary>I?))?B?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_bytes(size: Any, given: str | None = None, forms: str = "24GiB, 24GB or a number of bytes") -> int:
    """Return the bytes of ``"24GiB"`` (binary units), ``"24GB"`` (decimal), or a number of bytes.

    Case and spaces have no meaning; ``"24G"`` is decimal, too. ``given``: what messages call the
    size, if not by its value; ``forms``: what they list as possible.

    Raises:
        ValueError: It is not a size, or less than one byte, or a unit was forgotten.
    """
    given = repr(size) if given is None else given
    bare = isinstance(size, int) and not isinstance(size, bool)
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is not None:
        whole, _, decimals = match["number"].partition(".")
        unit: int = (1024 if match["binary"] else 1000) ** _POWERS[(match["prefix"] or "").lower()]
        parsed: int = int(whole + decimals) * unit // 10 ** len(decimals)  # exact, unlike a float
        bare = size.strip()[-1] in "0123456789."
    elif bare:
        parsed = size
    else:
        raise ValueError(f"gradckpt: {given} is not a size; write it as {forms}")
    if parsed < 1:
        raise ValueError(f"gradckpt: {given} is less than one byte; write it as {forms}")
    if bare and parsed < 1024:
        raise ValueError(f"gradckpt: {given} is {parsed} bytes; give a unit, as in 24GiB")
    return parsed
