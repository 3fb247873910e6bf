"""Speed of the CUDA kernels beside a device copy and beside torch.compile.

    python benchmarks/gpu_roofline.py [--codecs int8,fp8_e4m3]
        [--shapes "1 MiB,32k x 4096"] [--markdown]

GB/s counts bytes read plus bytes written, scales included; the ceiling is torch's copy_ of the same
tensor in the same rounds. Timed by CUDA events around one call; before each, a buffer many times
the L2 is overwritten, which also keeps the device busy while the host queues the call, so that no
launch is waited for. The median counts.

torch.compile: the same arithmetic written in torch (E4M3: largest of 128, power-of-two scale, cast;
int8: 128 values times a Hadamard matrix, largest, round), its GB/s by our bytes, so that the two
columns compare times.

Small tensors: microseconds per call, many calls in one CUDA graph (gaps between kernels included),
and host time per call (allocation and launch, nothing waited for).

Checked: the bytes of a payload are its format's, what is decoded is near (exact codecs: equal), and
no median is below half of what a copy of as many bytes took.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import guards
import machine
import timing
import torch

import gradckpt

#: Values.
SHAPES = {"1 MiB": 1 << 19, "8 MiB": 1 << 22, "32k x 4096": 1 << 27, "128k x 4096": 1 << 29}
FARTHEST = 0.13  # relative L2, of Gaussian values: int4's is 0.09
TINY = {"tiny": 1 << 14}
#: Compiling takes seconds for each shape.
PEERS_FROM = 1 << 27
SMALL_TO = 1 << 22
#: Bytes overwritten between calls.
FLUSH = 1 << 29
CALLS_IN_GRAPH = 50
Call = Callable[[], Any]


# ---- clocks ----


class DeviceClock:
    def __init__(self) -> None:
        self.flushed = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")

    def flush(self) -> None:
        self.flushed.zero_()

    def medians(self, calls: dict[str, Call], repeat: int) -> dict[str, float]:
        """Seconds; the calls take turns."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for n in range(repeat + 3):  # three rounds of warming up
            events = {}
            for name, call in calls.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.flush()
                begin.record()
                call()
                end.record()
                events[name] = begin, end
            torch.cuda.synchronize()
            for name, (begin, end) in events.items():
                if n >= 3:
                    times[name].append(begin.elapsed_time(end) / 1000)
        return {name: statistics.median(seconds) for name, seconds in times.items()}

    def in_graph(self, call: Call) -> float | None:
        """Seconds per call of many in a row."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS_IN_GRAPH):
                call()
        return self.medians({"": graph.replay}, 11)[""] / CALLS_IN_GRAPH

    def on_host(self, call: Call, n: int = 300) -> float | None:
        """Seconds of the host per call."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            call()
        seconds = (time.perf_counter() - start) / n
        torch.cuda.synchronize()
        return seconds


class HostClock:
    """For the dry run."""

    def medians(self, calls: dict[str, Call], repeat: int) -> dict[str, float]:
        found = timing.rounds_of(calls, repeat)
        return {name: statistics.median(each[name] for each in found) for name in calls}

    def in_graph(self, call: Call) -> float | None:
        return None

    def on_host(self, call: Call) -> float | None:
        return None


# ---- the same arithmetic in torch ----


def e4m3_encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.view(-1, 128).float()
    amax = groups.abs().amax(1, keepdim=True).clamp_min(1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return (groups / scale).to(torch.float8_e4m3fn), scale.to(torch.bfloat16)


def e4m3_decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (codes.float() * scale.float()).to(torch.bfloat16)


def hadamard(device: torch.device) -> torch.Tensor:
    """Orthonormal and symmetric: its own inverse."""
    h = torch.ones(1, 1)
    while len(h) < 128:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (h / math.sqrt(128)).to(device, torch.bfloat16)


def int8_encode(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x.view(-1, 128) @ h).float()
    scale = y.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return torch.round(y / scale).to(torch.int8), scale.to(torch.bfloat16)


def int8_decode(codes: torch.Tensor, scale: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return (codes.float() * scale.float()).to(torch.bfloat16) @ h


def peers(codec: str, x: torch.Tensor, compiled: bool) -> dict[str, Call]:
    """Calls that do what the codec does; none where torch has no such thing,
    or cannot compile it."""

    def prepare(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False) if compiled else function

    if x.dtype != torch.bfloat16 or codec not in ("fp8_e4m3", "int8"):
        return {}
    try:
        if codec == "fp8_e4m3":
            encode, decode, rest = prepare(e4m3_encode), prepare(e4m3_decode), ()
        else:
            encode, decode, rest = prepare(int8_encode), prepare(int8_decode), (hadamard(x.device),)
        payload = encode(x, *rest)
        decode(*payload, *rest)
    except Exception as error:  # no compiler, no Triton: the rest can still be measured
        print(f"torch.compile of {codec} failed: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return {}
    return {"peer encode": lambda: encode(x, *rest), "peer decode": lambda: decode(*payload, *rest)}


# ---- measuring ----


def values_of(dtype: torch.dtype, n: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1)
    kind = dtype if dtype.is_floating_point else torch.float32
    x = torch.randn(n, dtype=kind, device=device, generator=generator)
    return x if dtype.is_floating_point else x > 0


def measure(codec: str, x: torch.Tensor, clock: DeviceClock | HostClock, options: argparse.Namespace) -> dict[str, Any]:
    out, dtype = torch.empty_like(x), str(x.dtype).removeprefix("torch.")
    payload = torch.ops.gradckpt.encode(x, codec)
    shape = [x.numel()]
    own: dict[str, Call] = {
        "encode": lambda: torch.ops.gradckpt.encode(x, codec),
        "decode": lambda: torch.ops.gradckpt.decode(payload, codec, shape, x.dtype),
    }
    cuda = options.device == "cuda"
    others = peers(codec, x, cuda) if x.numel() >= PEERS_FROM or not cuda else {}
    seconds = clock.medians({"copy": lambda: out.copy_(x), **own, **others}, options.repeat)
    check(codec, x, payload, out)
    moved = x.nbytes + payload.nbytes
    for name in own:
        floor = seconds["copy"] * moved / (2 * x.nbytes) if x.numel() > SMALL_TO else 0.0
        guards.takes(f"{codec}, {x.numel():,} values, {name}", seconds[name], floor, "a copy of as many bytes")
    speed = {name: (2 * x.nbytes if name == "copy" else moved) / s / 1e9 for name, s in seconds.items()}
    row: dict[str, Any] = {"codec": codec, "dtype": dtype, "values": x.numel(), "copy_gbs": speed["copy"]}
    for what, call in own.items():
        row |= {f"{what}_us": seconds[what] * 1e6, f"{what}_gbs": speed[what]}
        row |= {f"{what}_share": speed[what] / speed["copy"], f"{what}_compiled_gbs": speed.get(f"peer {what}")}
        if x.numel() <= SMALL_TO:
            graph, host = clock.in_graph(call), clock.on_host(call)
            row |= {f"{what}_graph_us": graph and graph * 1e6, f"{what}_host_us": host and host * 1e6}
    return row


def check(codec: str, x: torch.Tensor, payload: torch.Tensor, out: torch.Tensor) -> None:
    info = gradckpt.codecs.info(codec)
    bits = info["sizes"][str(x.dtype).removeprefix("torch.")][0]
    wanted = x.numel() * bits / 8
    guards.check(payload.nbytes == wanted, f"{codec}: {payload.nbytes:,} bytes; its format has {wanted:,.0f}")
    out.fill_(1)
    torch.ops.gradckpt.decode_many([payload], codec, [out])
    if not info["max_error"]:
        guards.check(torch.equal(out, x), f"{codec}: what is decoded is not what was encoded")
        return
    wrong = (out.float() - x.float()).norm() / x.float().norm()
    guards.at_most(f"{codec}: relative error", float(wrong), FARTHEST, "the most of any codec")


def dtype_for(codec: str) -> torch.dtype:
    taken = gradckpt.codecs.info(codec)["dtypes"]
    return torch.bfloat16 if "bfloat16" in taken else getattr(torch, taken[0])


def fits(n: int, device: str) -> bool:
    """Five tensors of float32: values, their copy, what is decoded,
    and what a peer makes in between."""
    if device == "cpu":
        return True
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] > 20 * n


def rows_of_shape(n: int, clock: DeviceClock | HostClock, options: argparse.Namespace, step: Any) -> list[Any]:
    rows = []
    x = torch.empty(0)
    for codec in options.codecs:
        step(codec)
        if x.dtype != dtype_for(codec) or x.numel() != n:
            x = values_of(dtype_for(codec), n, options.device)
        rows.append(measure(codec, x, clock, options))
    return rows


# ---- what is shown ----


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def show(shape: str, rows: list[dict[str, Any]], table: Callable[..., None]) -> None:
    columns = ["codec", "dtype", "us", "GB/s", "copy GB/s", "of copy", "torch.compile GB/s"]
    for what in ("encode", "decode"):
        cells = []
        for r in rows:
            cells.append([r["codec"], r["dtype"], number(r[f"{what}_us"], 1), number(r[f"{what}_gbs"])])
            cells[-1] += [number(r["copy_gbs"]), number(r[f"{what}_share"], 2, "x")]
            cells[-1].append(number(r[f"{what}_compiled_gbs"]))
        table(f"{what}, {shape}: {rows[0]['values']:,} values; GB/s of bytes read and written", columns, cells)
    small = [r for r in rows if "encode_graph_us" in r]
    if small:
        keys = ["encode_graph_us", "decode_graph_us", "encode_host_us", "decode_host_us"]
        titles = ["encode us, in a graph", "decode us, in a graph", "encode us, host", "decode us, host"]
        table(
            f"small calls, {shape}", ["codec", *titles], [[r["codec"], *[number(r[k], 1) for k in keys]] for r in small]
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_device(parser)
    parser.add_argument("--codecs", default=",".join(gradckpt.codecs.names()), help="comma-separated, of: %(default)s")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, of: %(default)s")
    parser.add_argument("--repeat", type=int, default=25, help="timed rounds; the median counts (%(default)s)")
    parser.add_argument("--markdown", action="store_true", help="tables in Markdown, as docs/performance.md has them")
    options = parser.parse_args(argv)
    machine.choose(parser, options, "codecs", gradckpt.codecs.names())
    machine.choose(parser, options, "shapes", SHAPES)
    if options.repeat < 1:
        parser.error("--repeat is at least 1")
    # Those of one dtype one after the other: their values are made once.
    options.codecs.sort(key=lambda codec: str(dtype_for(codec)))
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    machine.require(options.device, "gpu_roofline")
    cuda = options.device == "cuda"
    shapes = {name: SHAPES[name] for name in options.shapes} if cuda else TINY
    found = machine.facts(options.device)
    machine.print_head(f"speed of the kernels, median of {options.repeat}", found)
    table = machine.print_markdown if options.markdown else machine.print_table
    rows: list[dict[str, Any]] = []
    clock = DeviceClock() if cuda else HostClock()
    with torch.no_grad(), machine.progress(len(shapes) * len(options.codecs)) as step:
        for name, n in shapes.items():
            if not fits(n, options.device):
                print(f"{name}: not measured, the device has too little memory for it")
                continue
            of_shape = rows_of_shape(n, clock, options, step)
            show(name, of_shape, table)
            rows += of_shape
    machine.print_json({"benchmark": "gpu_roofline", **found, "repeat": options.repeat, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
