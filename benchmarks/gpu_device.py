"""A device by the type that torch gives it: streams, events, graphs, memory and autocast.

``cuda``; ``virtual``, the device of the tests (tests/helpers/virtual_device.py registers it); or
``cpu`` for a rehearsal: no queue, so that streams do nothing, events read the clock of the host,
and memory is what gradckpt.track_memory() sees. What a device does not offer is None in
``Device.missing()``, and the caller skips what needs it, with a reason.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import machine
import torch

import gradckpt

HELPERS = pathlib.Path(__file__).resolve().parent.parent / "tests" / "helpers"
#: Of a device without a queue.
CPU = "cpu"
#: The device of the tests, and the module that registers it.
VIRTUAL, REGISTERS = "virtual", "virtual_device"
#: What a stage may ask a device for, by the names that torch.cuda has for it.
OFFERS = {
    "graphs": ("CUDAGraph", "graph"),
    "a delay on a stream": ("_sleep",),
    "a limit of its memory": ("set_per_process_memory_fraction", "mem_get_info"),
    "figures of its allocator": ("max_memory_reserved", "memory_reserved", "empty_cache"),
}


class Memory(NamedTuple):
    """Bytes of a run: allocated at its peak; what the allocator took for that from the driver, from
    an empty cache; what was allocated before."""

    allocated: int
    needed: int | None
    before: int


class HostEvent:
    """The clock of the host, read when it is recorded."""

    at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.at - self.at) * 1e3


def register(kind: str) -> None:
    """Load what defines the device, where torch does not have it."""
    if kind != VIRTUAL or hasattr(torch, VIRTUAL):
        return
    if str(HELPERS) not in sys.path:
        sys.path.insert(0, str(HELPERS))
    try:
        module = importlib.import_module(REGISTERS)
    except ModuleNotFoundError as error:
        sys.exit(
            f"gpu: --device {VIRTUAL} needs tests/helpers/{REGISTERS}.py ({error}); --device cpu rehearses without"
        )
    if not hasattr(torch, VIRTUAL):
        module.load()
        module.introduce()


class Device:
    """A device type that torch knows."""

    def __init__(self, kind: str) -> None:
        register(kind)
        try:
            torch.device(kind)
        except RuntimeError as error:
            sys.exit(f"gpu: --device {kind}: {str(error).splitlines()[0]}")
        self.kind = kind
        self.module: Any = torch.get_device_module(kind)

    def __str__(self) -> str:
        return self.kind

    @property
    def is_cuda(self) -> bool:
        """A card: only here figures are judged."""
        return self.kind == "cuda"

    @property
    def queues(self) -> bool:
        """Does work wait on streams?"""
        return self.kind != CPU

    def missing(self, offer: str) -> str | None:
        """A reason to skip what needs this; None: the device has it. A CUDA device has all."""
        if self.kind == CPU:
            return f"the CPU has no {offer.removeprefix('a ')}"
        absent = [name for name in OFFERS[offer] if not hasattr(self.module, name)]
        if absent and self.is_cuda:
            raise RuntimeError(f"torch.cuda has no {absent[0]}")
        return f"torch.{self.kind} has no {absent[0]}" if absent else None

    @contextlib.contextmanager
    def codecs_of_the_host(self) -> Iterator[None]:
        """On the device of the tests, whose own codecs emulate kernels and take most of a call."""
        registered = sys.modules.get(REGISTERS)
        if registered is None or self.kind != VIRTUAL:
            yield
            return
        registered.use_host_codecs(True)
        try:
            yield
        finally:
            registered.use_host_codecs(False)

    # ---- queue

    def synchronize(self) -> None:
        if self.queues:
            self.module.synchronize()

    def event(self) -> Any:
        return self.module.Event(enable_timing=True) if self.queues else HostEvent()

    def stream(self) -> Any:
        """A new stream; of the CPU, torch's that does nothing."""
        return self.module.Stream()

    def on(self, stream: Any) -> Any:
        """Context: work goes to this stream."""
        return self.module.stream(stream)

    def current(self) -> Any:
        return self.module.current_stream()

    def delay(self) -> None:
        """Keep the current stream busy for some milliseconds, where the device can."""
        if self.missing("a delay on a stream") is None:
            self.module._sleep(50_000_000)

    def autocast(self) -> Any:
        return torch.autocast(self.kind, torch.bfloat16)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.kind).manual_seed(seed)

    def seconds(self, call: Callable[[], Any], repeat: int = 1) -> float:
        """Of one call, by the clock of the host, from an idle device to an idle device."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        self.synchronize()
        return (time.perf_counter() - start) / repeat

    # ---- memory

    @property
    def counts_memory(self) -> bool:
        return self.queues and hasattr(self.module, "max_memory_allocated")

    def collect(self) -> None:
        """Free what nothing holds, and give cached blocks back."""
        gc.collect()
        if self.queues and hasattr(self.module, "empty_cache"):
            self.module.empty_cache()

    def memory_of(self, run: Callable[[], Any]) -> Memory:
        """Of a run that begins with an empty cache. On the CPU: what the run adds."""
        self.collect()
        if not self.counts_memory:
            with gradckpt.track_memory() as tracked:
                run()
            return Memory(tracked.peak, None, 0)
        self.synchronize()
        self.module.reset_peak_memory_stats()
        before = self.module.memory_allocated()
        run()
        self.synchronize()
        needed = None if self.missing("figures of its allocator") else self.module.max_memory_reserved()
        return Memory(self.module.max_memory_allocated(), needed, before)

    def total(self) -> int | None:
        """Bytes of its memory; None: it has no limit of its own."""
        return None if self.missing("a limit of its memory") else self.module.mem_get_info()[1]

    @contextlib.contextmanager
    def limited(self, limit: int) -> Iterator[None]:
        """Let torch's allocator take at most so many bytes of the device."""
        total = self.total()
        if total is None:
            raise RuntimeError(self.missing("a limit of its memory"))
        self.collect()
        self.module.set_per_process_memory_fraction(min(1.0, limit / total))
        try:
            yield
        finally:
            self.module.set_per_process_memory_fraction(1.0)

    def fits(self, run: Callable[[], Any], limit: int) -> bool:
        """Does it end within the limit? Without one on the device: by the peak it has."""
        if self.total() is None:
            return self.memory_of(run).allocated <= limit
        ended = False
        with self.limited(limit):
            try:
                run()
                self.synchronize()
                ended = True
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        return ended  # outside the handler: the error's traceback held the step's tensors

    def facts(self) -> dict[str, Any]:
        return {**machine.facts(self.kind), "device": self.kind}


def is_out_of_memory(error: RuntimeError) -> bool:
    """torch's own error, or what a library raises that allocates for itself."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text


def why_not(device: Device) -> str | None:
    """Why nothing can run on it: a sentence without its end; None: it can."""
    return machine.why_no_cuda() if device.is_cuda else None
