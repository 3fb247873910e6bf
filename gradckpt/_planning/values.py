"""Why a step cannot run on paper: :class:`NotOnPaper`."""

from __future__ import annotations

__all__ = ["CAPTURED", "ELSEWHERE", "RECURRENT", "RESIZED", "NotOnPaper"]

RECURRENT = "the size of what it keeps is unknown"
ELSEWHERE = "it ran in another thread"
CAPTURED = "Dynamo has to capture it first"
RESIZED = "a storage gets another size"


class NotOnPaper(RuntimeError):
    """An operator needs the values of a tensor that has none, or cannot be run without values."""
