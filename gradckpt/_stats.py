"""Counters of what was compressed, what was not, and why: :data:`stats`."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gradckpt import _C
from gradckpt._engine import places


class Compiled:
    """Counters of torch.compile's graphs: what one call of each keeps."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ever = False  # a region was traced in this process, and its graph may run without being counted
        self.reset()

    def reset(self) -> None:
        self.counters = Counter(dict.fromkeys(("regions", "graphs", "tensors", "bytes_in", "bytes_out"), 0))
        self.uncompressed: Counter[str] = Counter()

    def flat(self) -> dict[str, Any]:
        counters = {f"compiled_{key}": n for key, n in self.counters.items()}
        return counters | {"compiled_uncompressed": dict(self.uncompressed)}

    def add(self, **counts: int) -> None:
        with self.lock:
            self.counters.update(counts)

    def add_exact(self, reasons: Mapping[str, int]) -> None:
        """Count what ``compress_saved()`` leaves uncompressed in a graph."""
        with self.lock:
            self.uncompressed.update(reasons)


compiled = Compiled()

#: Current and highest values, which are not counts.
_LEVELS = ("live_bytes", "peak_live_bytes", "replay_bytes", "peak_bytes")
#: Of these, the highest ones.
PEAKS = ("peak_live_bytes", "peak_bytes")
#: Those of places. A ring and pinned memory only grow.
_PLACE_LEVELS = ("memory", "ring", "pinned", "file")


class Stats(dict[str, Any]):
    """Counters of this process at one moment: a dict for programs, and with ``str`` a text for
    people.
    """

    def __init__(self, counters: Mapping[str, Any], epoch: int) -> None:
        super().__init__(counters)
        self._epoch = epoch
        self["ratio"] = self["bytes_out"] / self["bytes_in"] if self["bytes_in"] else None

    def since(self, earlier: Stats) -> Stats:
        """Return the counts since ``earlier``, or since ``stats.reset()`` if it was called in
        between.

        ``live_bytes``, ``replay_bytes``, their peaks and the bytes that places use are not changed.
        """
        if self._epoch != earlier._epoch:
            return self
        counters = {key: n if key in _LEVELS else n - earlier[key] for key, n in self.items() if isinstance(n, int)}
        for key in ("codecs", "uncompressed", "compiled_uncompressed"):
            then = earlier[key]
            counters[key] = {name: n - then.get(name, 0) for name, n in self[key].items() if n > then.get(name, 0)}
        then = earlier["exact_functions"]
        counters["exact_functions"] = {
            name: (n - then.get(name, (0, 0))[0], nbytes - then.get(name, (0, 0))[1])
            for name, (n, nbytes) in self["exact_functions"].items()
            if n > then.get(name, (0, 0))[0]
        }
        then = earlier["offload"]
        counters["offload"] = {
            key: n if key.split("_")[0] in _PLACE_LEVELS else max(0, n - then.get(key, 0))
            for key, n in self["offload"].items()
        }
        return Stats(counters, self._epoch)

    def scalars(self, prefix: str = "gradckpt/") -> dict[str, float]:
        """Return flat numbers for a logger, each name after ``prefix``.

        Bytes are in MiB (``bytes_in_mib``, ``peak_live_mib``). ``ratio`` is missing where nothing
        was encoded. Tensors kept by reference have one number for each reason,
        ``uncompressed/smaller_than_min_numel``; those of ``offload`` are ``offload/bytes_out`` and
        so on, in bytes.
        """
        numbers = {key: n for key, n in self.items() if isinstance(n, (int, float))}
        scalars = {_in_mib(key): n / 2**20 if "bytes" in key else n for key, n in numbers.items()}
        for reason, n in self["uncompressed"].items():
            scalars["uncompressed/" + reason.replace(" ", "_").replace(",", "")] = n
        scalars |= {f"exact_functions/{name}_mib": n / 2**20 for name, (_, n) in self["exact_functions"].items()}
        scalars |= {f"offload/{key}": n for key, n in self["offload"].items()}
        return {prefix + key: float(n) for key, n in scalars.items()}

    def headline(self) -> str:
        """Return the first line of the text."""
        steps = self["steps"] or 1
        regions, peak = self["regions"], self["peak_live_bytes"]
        each = self._layers()
        compressed = each * self["regions_compressed"] / regions if regions else 0
        about = "" if each == int(each) and compressed == int(compressed) else "about "
        layers = f"{about}{_whole(compressed)} of {_whole(each)} layers"
        if self["ratio"] and not regions:
            tensors = f"{self['compressed']} of {self['eligible']} tensors"
            return (
                f"saved tensors: {_sizes(self['bytes_in'], self['bytes_out'])}, {_sizes(peak)} at the peak, {tensors}"
            )
        if not peak and self["ratio"]:
            sizes = _sizes(self["bytes_in"] / steps, self["bytes_out"] / steps)
            return f"checkpoints: {sizes} a step, offloaded, {layers}"
        if peak and self["ratio"]:
            before = peak / self["ratio"]
            if self["shared"]:  # a second use is encoded before its equal bytes drop it, and the original was one
                before = min(before, self["bytes_in"] / steps)
            return f"checkpoints at the peak: {_sizes(before, max(peak, self['peak_bytes']))}, {layers}"
        if self["compiled_tensors"]:
            sizes = _sizes(self["compiled_bytes_in"], self["compiled_bytes_out"])
            what = "checkpoints" if self["compiled_regions"] else "saved tensors"
            return f"{what} of compiled graphs: {sizes} for one call, {self['compiled_tensors']} tensors"
        if self["regions_eligible"]:
            return f"checkpoints: nothing is compressed, {layers}"
        if regions:
            return f"checkpoints: not compressed, {about}{_whole(each)} layers with compress=None"
        if self["eligible"]:
            return f"saved tensors: nothing is compressed, 0 of {self['eligible']} tensors"
        if self["compiled_regions"]:
            return f"checkpoints: not counted, {self['compiled_regions']} layers in compiled graphs"
        return "checkpoints: none so far"

    def _layers(self) -> float:
        """Return the regions of a step: none of forwards that had no backward."""
        met: int = self["regions_met"] if self["recomputes"] else self["regions"] - self["regions_dropped"]
        regions: int = met or self["regions"]
        steps: int = self["steps"] or 1
        return regions / steps

    def __str__(self) -> str:
        rows = [row for row in self._rows() if row[1] or row[2]]
        if not rows:
            return self.headline()
        lines = [f"  {line}" for line in columns(rows, right=(1,))]
        lines += advice(self["exact_functions"])
        steps = self["steps"]
        span = f"a step, of {steps:,} steps:" if steps > 1 else "in one step:" if steps else "in all:"
        return "\n".join([self.headline(), span, *lines])

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return a label, a count and bytes for each row; the count and bytes are empty if they are
        0.
        """
        steps = self["steps"] or 1
        reasons = sorted(self["uncompressed"].items(), key=lambda item: (-item[1], item[0]))
        places = self["offload"]
        moved = places if places.get("puts") else {}

        def row(what: str, count: int | None, *sizes: int, by: int = steps) -> tuple[str, str, str]:
            has_sizes = any(sizes) if count is None else count and sizes
            size = _sizes(*(n / by for n in sizes)) if has_sizes else ""
            return what, _number(count / by) if count else "", size

        def counted(what: str, key: str, *sizes: str) -> tuple[str, str, str]:
            return row(what, self[key], *(self[size] for size in sizes))

        return [
            ("layers that checkpoint", _whole(self._layers()) if self["regions"] else "", ""),
            ("layers run again", _whole(self["recomputes"] / steps) if self["recomputes"] else "", ""),
            row("left to torch: use_reentrant=True", self.get("reentrant", 0)),  # of a patch
            counted(f"tensors compressed in {', '.join(self['codecs'])}", "encoded", "bytes_in", "bytes_out"),
            counted("payloads used again", "shared"),
            counted("outputs that a policy keeps", "policy_outputs", "policy_bytes"),
            counted("discrete outputs kept", "discrete_outputs", "discrete_bytes"),
            counted("originals that stayed alive", "originals_alive", "originals_alive_bytes"),
            row("originals held for the region around", None, self["held_bytes"]),
            counted("saved tensors that differed", "differing_saves"),
            *(row(f"not compressed: {reason}", n) for reason, n in reasons),
            row("not compressed though they could be", None, self["uncompressed_bytes"]),
            *(row(f"saved exactly by {name}", *counts) for name, counts in sorted(self["exact_functions"].items())),
            row(
                "in compiled graphs, for one call",
                self["compiled_tensors"],
                *(self["compiled_bytes_in"], self["compiled_bytes_out"]),
                by=1,
            ),
            *(
                row(f"not compressed in compiled graphs: {reason}", n, by=1)
                for reason, n in sorted(self["compiled_uncompressed"].items())
            ),
            row("payloads alive now", None, self["live_bytes"], by=1),
            row("discrete outputs, random states alive now", None, self["replay_bytes"], by=1),
            row("not offloaded: smaller than min_bytes", places.get("small", 0)),
            ("offloaded, host memory at the peak", "", _sizes(moved["memory_peak"]) if moved else ""),
            row("written to the disk", None, moved.get("written", 0)),
            row("rings on devices", None, moved.get("ring", 0), by=1),
            row("not offloaded", moved.get("kept", 0) + moved.get("misses_out", 0)),
        ]


def advice(functions: Iterable[str]) -> list[str]:
    """Return lines on autograd Functions of which nothing is known: how to compress what they
    save.
    """
    if not (names := sorted(functions)):
        return []
    rules = ", ".join(f'"{name}": "int8"' for name in names)
    return [
        "if their backwards tolerate rounded values, of all that they save or of single places (NameBackward.0):",
        f'  compress={{"codec": "int8", "operators": {{{rules}}}}}',
    ]


def _in_mib(key: str) -> str:
    return key.removesuffix("_bytes") + "_mib" if "bytes" in key else key


def _number(n: float) -> str:
    return f"{n:,.0f}" if n == int(n) else f"{n:,.1f}"


def _whole(n: float) -> str:
    return f"{n:,.0f}"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _sizes(*sizes: float) -> str:
    """Format sizes in one unit, that of the largest: ``12.0 -> 3.05 MiB``."""
    power = next((i for i in range(len(_UNITS) - 1) if max(sizes) < 1000 * 1024**i), len(_UNITS) - 1)
    scaled = (n / 1024**power for n in sizes)
    return " -> ".join(f"{n:.0f}" if not power or n >= 100 else f"{n:#.3g}" for n in scaled) + f" {_UNITS[power]}"


class _Counting:
    """Counters since import or the last ``stats.reset()``, for this process.

    ``print(stats())`` shows the size of the checkpoints at their peak, and per step what was
    compressed, what was not and why; a step is a backward with the forwards before it.
    ``stats().scalars()`` is a flat dict of numbers for a logger, ``stats().since(earlier)`` the
    counts after another ``stats()``. The keys:

    ``steps``: backwards that met a region. ``regions``: checkpoint calls with grad on;
    ``regions_eligible``: those with compression; ``regions_compressed``: those of which an input
    was compressed; ``regions_met``: those that a backward met, or that saved nothing for one;
    ``regions_dropped``: those whose graph went without a backward. ``eligible``: tensors that could
    be compressed (floating, require grad and are not leaves): region inputs, outputs that a policy
    keeps compressed, tensors saved under :class:`gradckpt.compress_saved`; ``compressed``: those
    that were. ``encoded``: payloads written; ``codecs``: how many by each codec; ``shared``: times
    one payload served another region. ``bytes_in``, ``bytes_out``: bytes of the encoded tensors and
    of their payloads; ``ratio``: their quotient out / in, or None. ``live_bytes``,
    ``peak_live_bytes``: payload bytes alive now, and at most; ``replay_bytes``: bytes of discrete
    outputs and random states that are kept for recomputes now; ``peak_bytes``: payloads and these
    at most, together. ``recomputes``. ``differing_saves``: tensors that a recompute saved and the
    forward did not. ``held_bytes``: inputs of regions inside a region, which stayed until that one
    had ended. ``policy_outputs``: outputs of operators that a policy keeps; ``policy_bytes``: bytes
    of those that it keeps as they are. ``uncompressed``: tensors kept by reference, counted by
    reason; ``uncompressed_bytes``: bytes of those that could have been compressed.
    ``exact_functions``: a dict from the names of autograd Functions' nodes of which nothing is
    known to the number and the bytes of the tensors that stay exact because of that.
    ``originals_alive``, ``originals_alive_bytes``: inputs that something else still held when their
    payload was restored (``output_hidden_states``, for one): there compression saved nothing.
    ``discrete_outputs``, ``discrete_bytes``: what :attr:`CompressionConfig.replay_discrete` kept
    from the forward. ``compiled_regions``: regions in graphs that ``torch.compile`` made, which the
    other counters do not see; ``compiled_graphs``: those graphs that keep tensors compressed;
    ``compiled_tensors``, ``compiled_bytes_in``, ``compiled_bytes_out``: for one call of each;
    ``compiled_uncompressed``: what ``compress_saved()`` leaves as it is there, by reason.
    ``offload``: a dict, of all places, open or ended; :doc:`/offload` lists its keys.
    """

    epoch = 0
    earlier_peaks = (0,) * len(PEAKS)  # before the last restart_peaks()
    _hidden: Stats | None = None  # what uncounted() blocks counted

    def __call__(self) -> Stats:
        found = self._all()
        return found if self._hidden is None else found.since(self._hidden)

    def _all(self) -> Stats:
        counters = _C.stats() | compiled.flat() | {"offload": places.figures()}
        counters |= dict(zip(PEAKS, highest(self.earlier_peaks, latest_peaks(counters)), strict=True))
        return Stats(counters, self.epoch)

    def reset(self) -> None:
        """Set all counters to zero; payloads that are alive stay counted in ``live_bytes``."""
        self.epoch += 1
        self.earlier_peaks = (0,) * len(PEAKS)
        self._hidden = None
        _C.reset_stats()
        places.figures(restart=True)
        compiled.reset()

    def __repr__(self) -> str:
        return "<gradckpt.stats: call it>"


stats = _Counting()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Count inside the block, and afterwards continue from the counts before it."""
    before = stats()
    try:
        yield
    finally:
        continue_from(before)


def continue_from(before: Stats) -> None:
    """Take back what was counted since these counts."""
    stats._hidden = stats._all().since(before)
    _C.restart_peak()
    stats.earlier_peaks = latest_peaks(before) if stats.epoch == before._epoch else (0,) * len(PEAKS)


def highest(*peaks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(max, zip(*peaks, strict=True)))


def restart_peaks() -> tuple[int, ...]:
    """Return :data:`PEAKS` since the last call, and begin others."""
    peaks = _C.restart_peak()
    stats.earlier_peaks = highest(stats.earlier_peaks, peaks)
    return peaks


def latest_peaks(counters: Mapping[str, Any]) -> tuple[int, ...]:
    """Return :data:`PEAKS` since the last :func:`restart_peaks`, of ``_C.stats()``."""
    return tuple(counters[key] for key in PEAKS)


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return a line for each row; the cells of some columns are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [cell.rjust(n) if i in right else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in padded]


def format_bytes(n: float) -> str:
    power = next((i for i in range(3) if n < 1024 ** (i + 1)), 3)
    return f"{n / 1024**power:.{2 if power else 0}f} {_UNITS[power]}"
