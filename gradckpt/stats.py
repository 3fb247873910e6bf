"""What was compressed, what was not, and why: :func:`stats`; and the proof of activity."""

from __future__ import annotations

import logging
import threading
from typing import Any

from gradckpt import _C
from gradckpt.config import warn_inactive

__all__ = ["reset_stats", "stats"]

logger = logging.getLogger("gradckpt")


class Compiled:
    """Of the graphs that torch.compile made: what one call of each keeps."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.counters = dict.fromkeys(("graphs", "tensors", "bytes_in", "bytes_out"), 0)

    def add(self, **counts: int) -> None:
        with self.lock:
            for key, count in counts.items():
                self.counters[key] += count


compiled = Compiled()


def stats() -> dict[str, Any]:
    """Counters since import or the last :func:`reset_stats`, for this process.

    Returns:
        ``regions``: checkpoint calls with grad on; ``regions_asked``: those with compression.
        ``asked``: region inputs that could be compressed (floating tensors that require grad and
        are not leaves); ``compressed``: those that were. ``encoded``: payloads written;
        ``shared``: times one payload served another region. ``bytes_in``, ``bytes_out``: bytes of
        the encoded tensors and of their payloads; ``ratio``: their quotient out / in, or None.
        ``live_bytes``, ``peak_live_bytes``: payload bytes alive now, and at most.
        ``recomputes``. ``kept``: tensors kept by reference, counted by reason; ``kept_bytes``:
        bytes of those that could have been compressed. ``originals_alive``,
        ``originals_alive_bytes``: inputs that somebody else still held when their payload was
        restored (``output_hidden_states``, for one): there compression saved nothing. ``compiled``: of the graphs that
        ``torch.compile`` made, which the other counters do not see: ``graphs`` that keep tensors compressed, and for
        one call of each the number of those ``tensors``, their ``bytes_in`` and ``bytes_out``.
    """
    counters: dict[str, Any] = _C.stats()
    counters["ratio"] = counters["bytes_out"] / counters["bytes_in"] if counters["bytes_in"] else None
    counters["compiled"] = dict(compiled.counters)
    return counters


def reset_stats() -> None:
    """All counters to zero; what is alive stays counted in ``live_bytes``."""
    _C.reset_stats()
    compiled.reset()


def format_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError


def announce() -> None:
    """The line a user looks for: once, at the first backward."""
    s = stats()
    logger.info(
        "compressed %d of %d region inputs, %s -> %s",
        s["compressed"],
        s["asked"],
        format_bytes(s["bytes_in"]),
        format_bytes(s["bytes_out"]),
    )


def inactive_reason(kept: dict[str, int]) -> str:
    """The likeliest reason, from what was kept and why."""
    if not kept:
        return "the regions got no tensors; pass the activations as arguments instead of closing over them"
    reason, _ = max(kept.items(), key=lambda item: item[1])
    advice = {
        "does not require grad": "does the input need enable_input_require_grads(), or was the model frozen whole?",
        "leaf": "leaves stay alive anyway, so compressing them saves nothing",
        "smaller than min_numel": 'lower it with compress={"codec": ..., "min_numel": ...}',
    }.get(reason, "see gradckpt.stats()['kept']")
    return f"most region inputs were kept because: {reason} ({advice})"


def warn_if_inactive() -> None:
    s = stats()
    if s["regions_asked"] and not s["compressed"]:
        reason = inactive_reason(s["kept"])
        warn_inactive(f"compression is on, but nothing was compressed by the second backward: {reason}")
