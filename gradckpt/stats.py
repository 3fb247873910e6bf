"""What was compressed, what was not, and why: :func:`stats`, for programs and people; and the proof of activity."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from gradckpt import _C
from gradckpt.config import warn_inactive

__all__ = ["format_stats", "log_stats", "print_stats", "reset_stats", "stats", "stats_scalars"]

logger = logging.getLogger("gradckpt")


class Compiled:
    """Of the graphs that torch.compile made: what one call of each keeps."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.counters = dict.fromkeys(("graphs", "tensors", "bytes_in", "bytes_out"), 0)

    def flat(self) -> dict[str, int]:
        return {f"compiled_{key}": n for key, n in self.counters.items()}

    def add(self, **counts: int) -> None:
        with self.lock:
            for key, count in counts.items():
                self.counters[key] += count


compiled = Compiled()


def stats() -> dict[str, Any]:
    """Counters since import or the last :func:`reset_stats`, for this process.

    Returns:
        ``regions``: checkpoint calls with grad on; ``regions_asked``: those with compression.
        ``asked``: tensors that could be compressed (floating, require grad and are not leaves): region inputs, outputs
        that a policy keeps compressed, tensors saved under :class:`gradckpt.compress_saved`; ``compressed``: those
        that were. ``encoded``: payloads written;
        ``shared``: times one payload served another region. ``bytes_in``, ``bytes_out``: bytes of
        the encoded tensors and of their payloads; ``ratio``: their quotient out / in, or None.
        ``live_bytes``, ``peak_live_bytes``: payload bytes alive now, and at most.
        ``recomputes``. ``kept``: tensors kept by reference, counted by reason; ``kept_bytes``:
        bytes of those that could have been compressed. ``originals_alive``,
        ``originals_alive_bytes``: inputs that somebody else still held when their payload was
        restored (``output_hidden_states``, for one): there compression saved nothing. ``decisions``,
        ``decision_bytes``: what :attr:`CompressionConfig.decisions` kept from the forward. ``compiled_graphs``:
        graphs that ``torch.compile`` made and that keep tensors compressed, which the other counters do not see;
        ``compiled_tensors``, ``compiled_bytes_in``, ``compiled_bytes_out``: for one call of each.
    """
    counters: dict[str, Any] = _C.stats()
    counters["ratio"] = counters["bytes_out"] / counters["bytes_in"] if counters["bytes_in"] else None
    return counters | compiled.flat()


_resets = 0


def resets() -> int:
    """Calls of :func:`reset_stats` so far: across one, earlier counters and later ones have no difference."""
    return _resets


def reset_stats() -> None:
    """All counters to zero; what is alive stays counted in ``live_bytes``."""
    global _resets
    _resets += 1
    _C.reset_stats()
    compiled.reset()


# ---- for loggers ----

#: What is now, or was at most, and not what has happened since.
_LEVELS = ("live_bytes", "peak_live_bytes")


class ScalarWriter(Protocol):
    """``torch.utils.tensorboard.SummaryWriter``, and whatever else has its ``add_scalar``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None, /) -> object: ...


def stats_scalars(prefix: str = "gradckpt/", *, since: Mapping[str, Any] | None = None) -> dict[str, float]:
    """:func:`stats` as flat numbers, for any logger.

    Args:
        prefix: Before every name.
        since: What :func:`stats` returned earlier: only what happened after is counted, except ``live_mib`` and
            ``peak_live_mib``, which stay what they are. Ignored where a counter has become smaller, by
            :func:`reset_stats`.

    Returns:
        The numbers of :func:`stats`; bytes are in MiB (``bytes_in_mib``, ``peak_live_mib``). ``ratio`` is missing where
        nothing was encoded. Tensors kept by reference have one number for each reason, ``kept/smaller_than_min_numel``.
    """
    now = stats()
    if since is None or any(now[key] < value for key, value in since.items() if _is_counter(key)):
        since = {"kept": {}}
    counters = {key: value - since.get(key, 0) for key, value in now.items() if _is_counter(key)}
    scalars = {_in_mib(key): value / 2**20 if "bytes" in key else value for key, value in counters.items()}
    scalars |= {_in_mib(key): now[key] / 2**20 for key in _LEVELS}
    if counters["bytes_in"]:
        scalars["ratio"] = counters["bytes_out"] / counters["bytes_in"]
    for reason, n in now["kept"].items():
        scalars["kept/" + reason.replace(" ", "_").replace(",", "")] = n - since["kept"].get(reason, 0)
    return {prefix + key: float(value) for key, value in scalars.items()}


def _is_counter(key: str) -> bool:
    return key not in (*_LEVELS, "ratio", "kept")


def _in_mib(key: str) -> str:
    return key.removesuffix("_bytes") + "_mib" if "bytes" in key else key


def log_stats(writer: ScalarWriter, step: int, *, prefix: str = "gradckpt/") -> None:
    """Each of :func:`stats_scalars` to ``writer.add_scalar(name, number, step)``."""
    for name, value in stats_scalars(prefix).items():
        writer.add_scalar(name, value, step)


# ---- for people ----


def _rows(s: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, how many, bytes) of one line each."""
    written = f"{format_bytes(s['bytes_in'])} -> {format_bytes(s['bytes_out'])}"
    ratio = "" if s["ratio"] is None else f", ratio {s['ratio']:.3f}"
    compiled = f"{format_bytes(s['compiled_bytes_in'])} -> {format_bytes(s['compiled_bytes_out'])}"
    alive = f"{format_bytes(s['live_bytes'])}, at most {format_bytes(s['peak_live_bytes'])}"
    kept = sorted(s["kept"].items(), key=lambda item: (-item[1], item[0]))
    return [
        ("regions", f"{s['regions']:,}", ""),
        ("regions with compression", f"{s['regions_asked']:,}", ""),
        ("recomputes", f"{s['recomputes']:,}", ""),
        ("tensors that could be compressed", f"{s['asked']:,}", ""),
        ("tensors compressed", f"{s['compressed']:,}", ""),
        ("payloads written", f"{s['encoded']:,}", written + ratio),
        ("payloads used again", f"{s['shared']:,}", ""),
        ("payloads alive", "", alive),
        ("of compiled graphs, for one call", f"{s['compiled_tensors']:,}", compiled),
        ("originals that stayed alive", f"{s['originals_alive']:,}", format_bytes(s["originals_alive_bytes"])),
        ("decisions kept", f"{s['decisions']:,}", format_bytes(s["decision_bytes"])),
        *((f"kept: {reason}", f"{n:,}", "") for reason, n in kept),
        ("kept though compressible", "", format_bytes(s["kept_bytes"])),
    ]


def format_stats() -> str:
    """:func:`stats` as a table of plain text, one line for each reason why a tensor was kept; no newline at its end."""
    rows = _rows(stats())
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{what:<{widths[0]}}  {n:>{widths[1]}}  {size}".rstrip() for what, n, size in rows)


def print_stats(file: TextIO | None = None) -> None:
    """Print :func:`format_stats` to ``file`` (default: standard output); to a terminal by rich, if there is rich."""
    file = sys.stdout if file is None else file
    if not (file.isatty() and _print_with_rich(file)):
        print(format_stats(), file=file)


def _print_with_rich(file: TextIO) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table("", title="gradckpt.stats()", title_justify="left")
    table.add_column("tensors", justify="right")
    table.add_column("bytes")
    for row in _rows(stats()):
        table.add_row(*row)
    Console(file=file).print(table)
    return True


def format_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError


# ---- proof of activity ----


def announce() -> None:
    """The line a user looks for: once, at the first backward."""
    s = stats()
    logger.info(
        "compressed %d of %d tensors, %s -> %s",
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
        "does not require grad": "is it the batch itself, was the model frozen whole, or does it need "
        "enable_input_require_grads()?",
        "float64, which no codec takes": "train in float32 or bfloat16, or pass compress=None",
        "leaf": "leaves stay alive anyway, so compressing them saves nothing",
        "smaller than min_numel": 'lower it with compress={"codec": ..., "min_numel": ...}',
    }.get(reason, "see gradckpt.stats()['kept']")
    return f"most region inputs were kept because: {reason} ({advice})"


def warn_if_inactive() -> None:
    s = stats()
    if s["regions_asked"] and not s["compressed"]:
        reason = inactive_reason(s["kept"])
        warn_inactive(f"compression is on, but nothing was compressed by the second backward: {reason}")
