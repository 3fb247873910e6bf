"""Speed of the kernels as a share of a device-to-device copy in the same rounds.

GB/s counts bytes read plus bytes written, scales included; the ceiling is torch's copy_ of as many
values of the dtype, contiguous. Timed by the device's events around one call, in turn; the median
counts. Before each call a buffer of many times the L2 is *read*: dirty lines are written back
before the timed window (zero_() would leave up to the whole L2 to be written inside it), and the
device is busy while the host queues the call, so that no launch is waited for.

On a card a row fails if its share is above MOST (then the measurement is wrong) or below its floor:
SHARE_KEPT of what an H200 showed, or FLOOR where nothing was measured yet. Small calls:
microseconds per call of many in a captured graph, and of the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gpu_inputs
import torch
from gpu_device import Device
from gpu_job import Job, cell

import gradckpt

Call = Callable[[], Any]
#: Values.
LARGE, LARGER, SMALL, TINY = 1 << 26, 1 << 29, 1 << 19, 1 << 14
#: Bytes read between calls, and of a rehearsal.
FLUSH, FLUSH_TINY = 1 << 29, 1 << 16
ROUNDS, WARM = 15, 3
CALLS_IN_GRAPH, CALLS_ON_HOST = 50, 300
#: Of Gaussian values, relative L2: int4's is 0.09.
FARTHEST = 0.13
#: A share above this is a wrong measurement.
MOST = 1.25
#: Encode and decode on an H200 as a share of its copy: contiguous, bfloat16 (mask: bool; bf16 and
#: fp16: float32).
MEASURED = {
    "fp8_e4m3": (1.00, 0.89),
    "fp8_e5m2": (1.00, 0.89),
    "int8_plain": (1.00, 0.89),
    "int8": (0.72, 0.88),
    "int6": (0.50, 0.38),
    "int4": (0.37, 0.37),
    "lossless": (0.47, 0.34),
    "mask": (0.99, 0.91),
    "bf16": (0.99, 0.52),
    "fp16": (0.99, 0.55),
}
#: How much of it must remain, and the floor of what was never measured.
SHARE_KEPT, FLOOR = 0.85, 0.10
#: Codecs whose other layouts and roundings are timed.
TRIED = ("int8", "int4", "fp8_e4m3", "lossless")
#: Rows of a width that is no multiple of a group of 128, odd or even.
WIDTHS = (1000, 1001, 4097)
DITHER = (7, 3, 1)


class Case(NamedTuple):
    codec: str
    x: torch.Tensor
    layout: str
    dither: tuple[int, int, int] | None = None

    @property
    def dtype(self) -> str:
        return str(self.x.dtype).removeprefix("torch.")


class Clock:
    """Medians of the device's time of calls that take turns."""

    def __init__(self, device: Device, small: bool) -> None:
        self.device, self.rounds = device, 2 if small else ROUNDS
        nbytes = FLUSH_TINY if small else FLUSH
        self.buffer = torch.zeros(nbytes // 4, dtype=torch.float32, device=device.kind)

    def flush(self) -> None:
        """Evict the L2 by reading, so that no line of it is dirty."""
        self.buffer.sum()

    def medians(self, calls: dict[str, Call]) -> dict[str, float]:
        """Seconds."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(self.rounds + WARM):
            events = {}
            for name, call in calls.items():
                begin, end = self.device.event(), self.device.event()
                self.flush()
                begin.record()
                call()
                end.record()
                events[name] = begin, end
            self.device.synchronize()
            for name, (begin, end) in events.items():
                if number >= WARM:
                    times[name].append(begin.elapsed_time(end) / 1e3)
        return {name: statistics.median(seconds) for name, seconds in times.items()}

    def in_graph(self, call: Call) -> float | None:
        """Seconds per call of many in a row; None where the device has no graphs."""
        if self.device.missing("graphs"):
            return None
        module = self.device.module
        stream = self.device.stream()
        stream.wait_stream(self.device.current())
        with self.device.on(stream):
            call()
        self.device.current().wait_stream(stream)
        graph = module.CUDAGraph()
        with module.graph(graph):
            for _ in range(CALLS_IN_GRAPH):
                call()
        return self.medians({"": graph.replay})[""] / CALLS_IN_GRAPH

    def on_host(self, call: Call) -> float:
        """Seconds of the host per call; nothing is waited for."""
        self.device.synchronize()
        count = CALLS_ON_HOST if self.rounds == ROUNDS else 5
        start = time.perf_counter()
        for _ in range(count):
            call()
        seconds = (time.perf_counter() - start) / count
        self.device.synchronize()
        return seconds


# ---- what is timed


def values(dtype: str, n: int, device: Device) -> torch.Tensor:
    kind = torch.float32 if dtype == "bool" else getattr(torch, dtype)
    x = torch.randn(n, dtype=torch.float32, device=device.kind, generator=device.generator(1))
    return x > 0 if dtype == "bool" else x.to(kind)


def contiguous_cases(n: int, device: Device) -> Iterator[Case]:
    """Each codec with each dtype; those of one dtype one after the other share their values."""
    for dtype in ("bfloat16", "float16", "float32", "bool"):
        x = values(dtype, n, device)
        for codec in gradckpt.codecs.names():
            if dtype in gradckpt.codecs.info(codec)["dtypes"]:
                yield Case(codec, x, "contiguous")


def other_cases(n: int, device: Device) -> Iterator[Case]:
    """Strided, in rows of a width that groups do not divide, and with noise."""
    x = values("bfloat16", n, device)
    transposed = x.view(-1, 4096 if n >= 1 << 20 else 64).t()
    sliced = x.view(-1, 256)[:, :192]
    for codec in TRIED:
        yield Case(codec, transposed, "transposed")
        yield Case(codec, sliced, "rows of 192 of 256")
        for width in WIDTHS:
            yield Case(codec, x[: n // width * width].view(-1, width), f"rows of {width}")
        if gradckpt.codecs.info(codec)["stochastic"]:
            yield Case(codec, x, "contiguous, stochastic", DITHER)


def judged_share(case: Case, what: str) -> tuple[float, str]:
    """(the floor, where it is from)"""
    measured = MEASURED.get(case.codec)
    own = case.dtype == (
        "bool" if case.codec == "mask" else "float32" if case.codec in ("bf16", "fp16") else "bfloat16"
    )
    if measured is None or not own or case.layout != "contiguous":
        return FLOOR, "not measured before"
    return SHARE_KEPT * measured[what == "decode"], f"{SHARE_KEPT:g} of an H200's"


def check_values(job: Job, case: Case, restored: torch.Tensor) -> None:
    info = gradckpt.codecs.info(case.codec)
    name = f"{case.codec}, {case.dtype}, {case.layout}"
    if not info["max_error"]:
        job.check(torch.equal(restored, case.x), f"{name}: what is decoded is not what was encoded")
        return
    wrong = (restored.float() - case.x.float()).norm() / case.x.float().norm()
    most = 2 * FARTHEST if case.dither else FARTHEST
    # sparse formats keep few values of a dense tensor as they are; the others are near.
    job.check(float(wrong) < most, f"{name}: relative error {float(wrong):.3g}, above {most}")


def measure(job: Job, clock: Clock, case: Case, row: Callable[..., None]) -> None:
    payload = gradckpt.codecs.encode(case.x, case.codec, dither=case.dither)
    restored = payload.decode()
    check_values(job, case, restored)
    source = torch.empty(case.x.numel(), dtype=case.x.dtype, device=job.device.kind).fill_(1)
    target = torch.empty_like(source)
    del restored
    seconds = clock.medians(
        {
            "copy": lambda: target.copy_(source),
            "encode": lambda: gradckpt.codecs.encode(case.x, case.codec, dither=case.dither),
            "decode": payload.decode,
        }
    )
    plain = case.x.numel() * case.x.element_size()
    copied = 2 * plain / seconds["copy"]
    for what in ("encode", "decode"):
        moved = plain + payload.nbytes
        share = moved / seconds[what] / copied
        floor, source_of_floor = judged_share(case, what)
        verdict = "not judged: a rehearsal"
        if job.device.is_cuda and not job.small:
            name = f"{what} {case.codec}, {case.dtype}, {case.layout}"
            fast = job.check(share <= MOST, f"{name}: {share:.2f} of a copy, above {MOST}: the measurement is wrong")
            slow = job.check(share >= floor, f"{name}: {share:.2f} of a copy, below {floor:.2f} ({source_of_floor})")
            verdict = "ok" if fast and slow else "FAILED"
        row(
            f"{what} {case.codec}",
            case.dtype,
            case.layout,
            f"{case.x.numel():,}",
            cell(seconds[what] * 1e6, 1),
            cell(moved / seconds[what] / 1e9, 0),
            cell(copied / 1e9, 0),
            cell(share),
            f"{floor:.2f}, {source_of_floor}",
            verdict,
        )


def small_calls(job: Job, clock: Clock, n: int) -> None:
    row = job.table(
        f"small calls, {n:,} values",
        ["codec", "dtype", "encode us, in a graph", "decode us, in a graph", "encode us, host", "decode us, host"],
    )
    if reason := job.device.missing("graphs"):
        job.skip("small calls in a graph", reason)
    for codec in gradckpt.codecs.names():
        dtypes = gradckpt.codecs.info(codec)["dtypes"]
        dtype = "bfloat16" if "bfloat16" in dtypes else dtypes[0]
        x = values(dtype, n, job.device)
        payload = torch.ops.gradckpt.encode(x, codec)
        calls = (
            lambda x=x, codec=codec: torch.ops.gradckpt.encode(x, codec),
            lambda x=x, codec=codec, payload=payload: torch.ops.gradckpt.decode(payload, codec, [n], x.dtype),
        )
        graphs = [clock.in_graph(call) for call in calls]
        hosts = [clock.on_host(call) for call in calls]
        job.check(all(seconds > 0 for seconds in hosts), f"{codec}: a call took no time")
        row(codec, dtype, *(cell(s and s * 1e6, 1) for s in graphs), *(cell(s * 1e6, 1) for s in hosts))


def run(job: Job) -> None:
    clock = Clock(job.device, job.small)
    n = TINY if job.small else LARGE
    assert set(gpu_inputs.DTYPES) == {"bfloat16", "float16", "float32", "bool"}
    columns = ["kernel", "dtype", "layout", "values", "us", "GB/s", "copy GB/s", "of the copy", "floor", "verdict"]
    with torch.no_grad():
        row = job.table("kernels beside a device-to-device copy; GB/s of bytes read and written", columns)
        for cases in (contiguous_cases(n, job.device), other_cases(n, job.device)):
            for case in cases:
                with job.part(f"{case.codec}, {case.dtype}, {case.layout}"):
                    measure(job, clock, case, row)
        with job.part("small calls"):
            small_calls(job, clock, TINY if job.small else SMALL)
        if not job.small and job.left > 20:
            for codec in ("int8", "fp8_e4m3"):
                with job.part(f"{codec}, 1 GiB"):
                    x = values("bfloat16", LARGER, job.device)
                    measure(job, clock, Case(codec, x, "contiguous"), row)
