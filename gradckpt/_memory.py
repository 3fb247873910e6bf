"""Peak and timeline of the memory that a block of code allocates: :class:`track_memory`.

torch's profiler records each allocation and release with its address, and the operators around
them; marks add module calls and region inputs to the same stream. The analysis runs after the block
has ended.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
import threading
import types
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from gradckpt import _C
from gradckpt._allocations import KINDS, OUTSIDE, MemoryPoint, analyse, mark, read
from gradckpt._engine import torch_private as private
from gradckpt._stats import format_bytes

#: Modules that only wrap another one; their names are not part of a region's name.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The allocations of a block of code on one device.

    ``peak``: bytes. ``seconds``: the time of the peak, from the start of the block. ``by_kind``,
    ``by_region``: bytes alive at the peak. ``timeline``: a :class:`MemoryPoint` for each allocation
    and release.
    """

    device: str
    peak: int
    seconds: float
    by_kind: dict[str, int]
    by_region: dict[str, int]
    timeline: list[MemoryPoint]

    def __str__(self) -> str:
        kinds = [(kind, size, 1) for kind, size in self.by_kind.items() if 1000 * size >= self.peak > 0]
        modules = _collapse(self.by_region)[:6] if self.by_region.keys() - {OUTSIDE} else []
        width = max((len(name) for name, *_ in kinds + modules), default=0)
        since = " above the start of the block" if self.device == "cpu" else ""
        lines = [f"{self.device}: peak {format_bytes(self.peak)}{since}, at {self.seconds:.3f} s"]
        for title, rows in (("by kind:", kinds), ("by module:", modules)):
            lines += [title] if rows else []
            for name, size, n in rows:
                row = f"  {name:<{width}}  {format_bytes(size):>10}  {size / self.peak:4.0%}"
                lines.append(f"{row}  {n} modules" if n > 1 else row)
        return "\n".join(lines)

    def plot(self, path: str) -> None:
        """Draw the timeline, by kind, to a file whose suffix matplotlib knows.

        Raises:
            ImportError: matplotlib is not installed.
        """
        _draw(_figure(), self, path)


def _result(device: str, timeline: list[MemoryPoint], top: int, by_region: dict[str, int]) -> DeviceMemory:
    seconds, peak, *sizes = timeline[top]
    return DeviceMemory(device, peak, seconds, dict(zip(KINDS, sizes, strict=True)), by_region, timeline)


class track_memory:
    """Record what a block of code allocates: peak, timeline, by kind and by module.

    ``with gradckpt.track_memory(model) as memory: step()``; after the block, ``print(memory)`` or
    ``memory.plot("memory.png")``.

    Args:
        model: Its modules name the regions in ``by_region``. None: the regions are not told apart.

    Attributes:
        devices: ``{"cpu": DeviceMemory, "cuda:0": ...}``: the devices on which the block allocated.
        device: The name of the device with the highest peak; the CPU only if it is the only one.
        peak, seconds, by_kind, by_region, timeline: Those of that device, see
            :class:`DeviceMemory`.

    Raises:
        RuntimeError: A torch profiler is active, or another block is being tracked; the result is
            read before the block has ended; a profiler that ran inside the block took its events.
        TypeError: ``model`` is not a module.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"gradckpt: track_memory() takes a torch.nn.Module, not {type(model).__name__}")
        self._model = model
        self._devices: dict[str, DeviceMemory] | None = None
        self._profile: Any = None
        self._handles: list[Any] = []

    def __enter__(self) -> track_memory:
        if private.profiler_entered():
            raise RuntimeError("gradckpt: track_memory() cannot run inside a torch profiler; use one of the two")
        if not _lock.acquire(blocking=False):
            raise RuntimeError("gradckpt: track_memory() is already active; leave that block first")
        try:
            self._devices = None
            self._profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
            self._add_marks()
            self._profile.__enter__()
            mark("start")
        except BaseException:
            self._remove_marks()
            if private.profiler_active():
                self._profile.__exit__(None, None, None)
            _lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        try:
            self._remove_marks()
            alive = private.profiler_active()
            if alive:
                self._profile.__exit__(None, None, None)
            threads = read(self._profile.kineto_results.experimental_event_tree() if alive else [])
        finally:
            self._profile = None
            _lock.release()
        if threads is not None:
            self._devices = {device: _result(device, *found) for device, found in analyse(threads).items()}
        elif error is None:
            raise RuntimeError("gradckpt: a profiler inside track_memory() took its events; use one of the two")

    def _add_marks(self) -> None:
        for name, module in self._model.named_modules() if self._model is not None else ():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks; its allocations are its caller's
                continue
            region = ".".join(part for part in name.split(".") if part not in _WRAPPERS) or type(self._model).__name__
            enter, leave = _Mark("enter " + region), _Mark("leave " + region)
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))
        _C.observe_regions(_mark_boundaries)

    def _remove_marks(self) -> None:
        _C.observe_regions(None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- the result ----

    @property
    def devices(self) -> dict[str, DeviceMemory]:
        if self._devices is None:
            raise RuntimeError("gradckpt: track_memory() has no result yet; read it after the block")
        return self._devices

    @property
    def device(self) -> str:
        found = self.devices.values()
        return max(found, key=lambda one: (one.device != "cpu", one.peak)).device if found else "cpu"

    @property
    def _main(self) -> DeviceMemory:
        nothing = DeviceMemory("cpu", 0, 0.0, dict.fromkeys(KINDS, 0), {}, [])
        return self.devices.get(self.device, nothing)

    @property
    def peak(self) -> int:
        return self._main.peak

    @property
    def seconds(self) -> float:
        return self._main.seconds

    @property
    def by_kind(self) -> dict[str, int]:
        return self._main.by_kind

    @property
    def by_region(self) -> dict[str, int]:
        return self._main.by_region

    @property
    def timeline(self) -> list[MemoryPoint]:
        return self._main.timeline

    def plot(self, path: str) -> None:
        """Draw the timeline of ``device``: :meth:`DeviceMemory.plot`."""
        self._main.plot(path)

    @staticmethod
    def compare(blocks: Mapping[str, track_memory], target: Any) -> None:
        """Draw the timelines of several blocks on one axis, each with its name and its peak.

        Args:
            blocks: The blocks by the names to show. Each line goes through the highest point of
                every sixtieth of its block; the scale is logarithmic.
            target: A file whose suffix is one that matplotlib knows,
                or matplotlib's ``Axes`` to draw into.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if hasattr(target, "plot"):
            return _draw_together(target, blocks)
        figure = _figure()
        _draw_together(figure.add_subplot(), blocks)
        figure.savefig(target, dpi=150)

    def __str__(self) -> str:
        found = sorted(self.devices.values(), key=lambda one: one.device != self.device)
        return "\n".join(map(str, found)) or "nothing was allocated"


_lock = threading.Lock()


# ---- marks ----


class _Mark:
    """A module hook that marks the call. Copies and pickles of the module get one that does
    nothing.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text

    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and self.text:
            mark(self.text)

    def __reduce__(self) -> tuple[type[_Mark], tuple[()]]:
        return _Mark, ()


def _mark_boundaries(frame: Any) -> None:
    """Mark the memory of the arguments that a region keeps; called from C, before its function
    runs.
    """
    places = []
    for value in gc.get_referents(frame):
        x = value.codes if type(value) is _C.Payload else value
        if type(x) is torch.Tensor:  # a parameter is alive anyway; other subclasses are not understood
            try:
                places.append(f"{x.device} {x.untyped_storage().data_ptr()}")
            except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
                continue
    if places:
        mark("boundaries " + ",".join(places))


def _collapse(regions: dict[str, int]) -> list[tuple[str, int, int]]:
    """Group equal modules into rows: ``layers.*.mlp``, bytes, number of modules; largest first."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, size in regions.items():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        sizes[pattern] += size
        counts[pattern] += 1
    return [(name, size, counts[name]) for name, size in sizes.most_common()]


# ---- the picture ----

#: From the bottom up, in colours that are distinct for colour-blind readers.
_COLOURS = {
    "other": "#bdbdbd",
    "gradients": "#0072b2",
    "boundaries": "#d55e00",
    "saves": "#e69f00",
    "transient": "#56b4e9",
}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
#: Of lines on one axis, for the colour-blind, too.
_LINES = ("#5f6368", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("gradckpt: pictures need matplotlib; run pip install matplotlib") from error
    return Figure(figsize=(9, 4.2), layout="constrained")


def _thin(timeline: list[MemoryPoint], points: int = 2000) -> list[MemoryPoint]:
    """Leave as many points; of those in between, the highest."""
    step = -(-len(timeline) // points) or 1
    return [max(timeline[i : i + step], key=lambda point: point.total) for i in range(0, len(timeline), step)]


def _draw(figure: Any, memory: DeviceMemory, path: str) -> None:
    unit, name = next((pair for pair in _UNITS if memory.peak >= pair[0]), (1, "B"))
    points = _thin(memory.timeline)
    times = [point.seconds for point in points]
    axes = figure.add_subplot()
    base = [0.0] * len(points)
    for kind, colour in _COLOURS.items():
        top = [low + getattr(point, kind) / unit for low, point in zip(base, points, strict=True)]
        if any(500 * abs(getattr(point, kind)) >= memory.peak for point in points):  # otherwise too small to see
            axes.fill_between(times, base, top, step="post", color=colour, linewidth=0, label=kind)
        base = top
    axes.plot(times, base, drawstyle="steps-post", color="#333333", linewidth=0.6)
    if points:
        axes.plot([memory.seconds], [memory.peak / unit], "v", color="#333333", markersize=6, clip_on=False)
        axes.set(xlim=(0, times[-1]), ylim=(min(0.0, *base), memory.peak / unit * 1.08 or 1))
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    axes.set_title(str(memory).partition("\n")[0], loc="left")
    axes.set(xlabel="seconds", ylabel=name)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _draw_together(axes: Any, blocks: Mapping[str, track_memory]) -> None:
    found = {name: block._main for name, block in blocks.items()}
    top = max((memory.peak for memory in found.values()), default=0)
    low = min((memory.peak for memory in found.values() if memory.peak), default=1) / 4
    unit, name_of_unit = next((pair for pair in _UNITS if low * 4 >= pair[0]), (1, "B"))
    end = max((memory.timeline[-1].seconds for memory in found.values() if memory.timeline), default=1.0)
    axes.set(
        xlim=(0, end),
        ylim=(low / unit, max(top, low) / unit * 1.5),
        xlabel="seconds",
        ylabel=f"{name_of_unit}, log scale",
    )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    height, apart = low / unit, (max(top, low) / low) ** (1 / 9)  # so that labels do not touch
    for (name, memory), colour in sorted(
        zip(found.items(), itertools.cycle(_LINES), strict=False), key=lambda pair: pair[0][1].peak
    ):
        if memory.timeline:
            peak = memory.peak / unit
            points = _thin(memory.timeline, 60)
            axes.plot([p.seconds for p in points], [p.total / unit for p in points], color=colour, lw=2, label=name)
            axes.plot([memory.seconds, end], [peak, peak], color=colour, lw=0.8, ls=":")
            axes.plot([memory.seconds], [peak], "v", color=colour, markersize=7)
            height = max(peak, height * apart)
            label = f" {name}\n {peak:.1f} {name_of_unit}"
            axes.annotate(label, (end, height), color=colour, va="center", annotation_clip=False)
