"""Peak and timeline of the memory that a block of code allocates: :class:`track_memory`.

torch's profiler records each allocation and release with its address, and the operators around them; marks put
module calls and region inputs into the same stream. All conclusions are drawn after the block has ended.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import threading
import types
from collections import Counter
from typing import Any

import torch

from gradckpt import _C
from gradckpt import _torch_private as private
from gradckpt._allocations import KINDS, MARK, OUTSIDE, MemoryPoint, analyse, read
from gradckpt.stats import format_bytes

__all__ = ["DeviceMemory", "MemoryPoint", "track_memory"]

#: Modules that only wrap another one; their names are no part of a region's name.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What a block of code allocated on one device.

    ``peak``: bytes. ``seconds``: when, from the start of the block. ``by_kind``, ``by_region``: what was alive then,
    in bytes. ``timeline``: a :class:`MemoryPoint` for each allocation and release.
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
        """Draw the timeline, by kind, to a file whose suffix is one that matplotlib knows.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("gradckpt: plot() needs matplotlib; run pip install matplotlib") from error
        _draw(Figure(figsize=(9, 4.2), layout="constrained"), self, path)


def _result(device: str, timeline: list[MemoryPoint], top: int, by_region: dict[str, int]) -> DeviceMemory:
    seconds, peak, *sizes = timeline[top]
    return DeviceMemory(device, peak, seconds, dict(zip(KINDS, sizes, strict=True)), by_region, timeline)


class track_memory:
    """Record what a block of code allocates: peak, timeline, by kind and by module.

    ``with gradckpt.track_memory(model) as memory: step()``; after the block, ``print(memory)`` or
    ``memory.plot("memory.png")``.

    Args:
        model: Its modules name the regions in ``by_region``. None: regions are not told apart.

    Attributes:
        devices: ``{"cpu": DeviceMemory, "cuda:0": ...}``: the devices on which the block allocated.
        peak, seconds, by_kind, by_region, timeline: those of the device named ``device``, see :class:`DeviceMemory`:
            the one with the highest peak, and a CPU only if there is no other.

    Raises:
        RuntimeError: a torch profiler is active, or another block is being tracked; the result is read before the
            block has ended; a profiler that ran inside the block took its events.
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
            _mark("start")
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
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks: what it allocates is its caller's
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

    def __str__(self) -> str:
        found = sorted(self.devices.values(), key=lambda one: one.device != self.device)
        return "\n".join(map(str, found)) or "nothing was allocated"


_lock = threading.Lock()


# ---- marks ----


def _mark(text: str) -> None:
    with private.record_function(MARK + text):
        pass


class _Mark:
    """A module hook that marks the call. Copies and pickles of the module get one that does nothing."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and self.text:
            _mark(self.text)

    def __reduce__(self) -> tuple[type[_Mark], tuple[()]]:
        return _Mark, ()


def _mark_boundaries(frame: Any) -> None:
    """Mark the memory of what a region keeps of its arguments; called from C, before its function runs."""
    places = []
    for value in gc.get_referents(frame):
        x = value.data if type(value) is _C.Payload else value
        if type(x) is torch.Tensor:  # a parameter is there anyway; of other subclasses nothing is known
            try:
                places.append(f"{x.device} {x.untyped_storage().data_ptr()}")
            except (NotImplementedError, RuntimeError):  # sparse and other tensors without memory of this kind
                continue
    if places:
        _mark("boundaries " + ",".join(places))


def _collapse(regions: dict[str, int]) -> list[tuple[str, int, int]]:
    """Put equal modules into one row: ``layers.*.mlp``, bytes, how many; the largest first."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, size in regions.items():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        sizes[pattern] += size
        counts[pattern] += 1
    return [(name, size, counts[name]) for name, size in sizes.most_common()]


# ---- the picture ----

#: From the bottom up, with colours that also those can tell apart who see few.
_COLOURS = {
    "other": "#bdbdbd",
    "gradients": "#0072b2",
    "boundaries": "#d55e00",
    "saves": "#e69f00",
    "transient": "#56b4e9",
}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_WIDTH = 2000  # points; of those in between, the highest is drawn


def _thin(timeline: list[MemoryPoint]) -> list[MemoryPoint]:
    step = -(-len(timeline) // _WIDTH) or 1
    return [max(timeline[i : i + step], key=lambda point: point.total) for i in range(0, len(timeline), step)]


def _draw(figure: Any, memory: DeviceMemory, path: str) -> None:
    unit, name = next((pair for pair in _UNITS if memory.peak >= pair[0]), (1, "B"))
    points = _thin(memory.timeline)
    times = [point.seconds for point in points]
    axes = figure.add_subplot()
    base = [0.0] * len(points)
    for kind, colour in _COLOURS.items():
        top = [low + getattr(point, kind) / unit for low, point in zip(base, points, strict=True)]
        if any(500 * abs(getattr(point, kind)) >= memory.peak for point in points):  # else it cannot be seen
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
