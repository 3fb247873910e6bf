"""Why a step cannot run on paper: :class:`NotOnPaper`."""

from __future__ import annotations

from gradckpt._apart import shown_as_base

__all__ = ["CAPTURED", "ELSEWHERE", "RECURRENT", "RESIZED", "NotOnPaper"]

RECURRENT = "the size of what it keeps is unknown"
ELSEWHERE = "it ran in another thread"
CAPTURED = "Dynamo has to capture it first"
RESIZED = "a storage gets another size"


@shown_as_base
class NotOnPaper(RuntimeError):
    """An operator needs the values of a tensor that has none, or cannot be run without values."""
