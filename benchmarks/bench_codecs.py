"""Speed and quality of the codecs on the CPU; gpu_kernels.py has the speed of the CUDA kernels.

    python benchmarks/bench_codecs.py [--mib 256] [--threads 1,2]
        [--isa scalar,avx2] [--stochastic] [--quick] ...

GB/s counts bytes read plus bytes written; the ceiling is memcpy of the same values, timed before
and after every repeat of every kernel, so that a noisy machine harms both alike. What is timed is
the shipped extension, under each instruction set that the CPU has. Payloads are written to memory
that was used before: glibc is told to keep what is freed, else each call would pay for the page
faults of a new payload. One thread: the time of the processor, which on an idle machine is that of
the clock. Several: torch's threads, and as many copies side by side. Scalar kernels are timed 3
times at most.

Checked: a payload is as long as its format says, what was decoded has the bits that the scalar
kernels give, and its error is that of the format. A median beyond twice the fastest memcpy ends the
program: no kernel moves bytes so fast.

SQNR: of Gaussian values, and of the ordinary channels of set X of tests/helpers/codec_inputs.py
(channel and token sizes lognormal, six channels 20 to 45 times larger, two massive values),
bfloat16. What codecs do to real layer inputs and to gradients: bench_fidelity.py.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pathlib
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import guards
import machine
import timing
import torch
from codec_inputs import noise_set, sqnr
from codec_libraries import ISAS, forced

import gradckpt

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "bool")}
PERIOD = 1 << 20  # values that are drawn; the others repeat them
DITHER = (1, 2, 3)
Times = dict[str, list[float]]


# ---- measuring ----


class Values:
    """A contiguous tensor, and its copy by one or more threads."""

    def __init__(self, dtype: str, nbytes: int, threads: int) -> None:
        kind = DTYPES[dtype]
        numel = nbytes // kind.itemsize // 4096 * 4096
        self.period = min(PERIOD, numel)
        drawn = torch.randn(self.period, generator=torch.Generator().manual_seed(1))
        drawn = drawn > 0 if kind == torch.bool else drawn.to(kind)
        self.x = drawn.repeat(-(-numel // self.period))[:numel].clone()
        self.out = torch.zeros_like(self.x)
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)
        torch.zeros(2 * self.x.nbytes + (1 << 20), dtype=torch.uint8)  # the heap grows here, not in a round

    def copy(self) -> None:
        x, out, each = self.x.data_ptr(), self.out.data_ptr(), self.x.nbytes // self.threads
        if self.threads == 1:
            ctypes.memmove(out, x, each)
        else:
            places = range(0, each * self.threads, each)
            list(self.pool.map(lambda at: ctypes.memmove(out + at, x + at, each), places))


def whole(payload: gradckpt.codecs.Payload) -> torch.Tensor:
    """The payload in one tensor, as the operators take it."""
    return torch.cat([payload.codes, payload.scales])


def decode_into(packed: torch.Tensor, codec: str, out: torch.Tensor) -> None:
    torch.ops.gradckpt.decode_many([packed], codec, [out])


def measure(values: Values, codec: str, repeat: int, dither: Any) -> Times:
    """Seconds; memcpy between all others. The first round warms up and is dropped. What the last
    one made is checked."""
    payload: Any = gradckpt.codecs.encode(values.x, codec, dither=dither)
    packed, kind = whole(payload), payload.codec

    def encode() -> None:
        nonlocal payload
        payload = gradckpt.codecs.encode(values.x, codec, dither=dither)

    clock = timing.clock_of(values.threads)
    steps: list[tuple[str, Callable[[], Any]]] = [("memcpy", values.copy), ("encode", encode)]
    steps += [("memcpy", values.copy), ("decode", lambda: decode_into(packed, kind, values.out))]
    times: Times = {"memcpy": [], "encode": [], "decode": []}
    for n in range(repeat + 1):
        payload = None
        for what, call in steps:
            seconds = timing.seconds(call, clock)
            if n > 0:
                times[what].append(seconds)
    verify(values, codec, payload, dither)
    return times


def verify(values: Values, codec: str, payload: gradckpt.codecs.Payload, dither: Any) -> None:
    x, out, name = values.x, values.out, f"{codec}, {gradckpt._C.isa()}"
    wanted = nbytes_of(codec, x)
    guards.check(payload.nbytes == wanted, f"{name}: {payload.nbytes:,} bytes of payload; its format has {wanted:,}")
    out.fill_(1)  # else what memcpy left there would pass for what was decoded
    decode_into(whole(payload), payload.codec, out)
    with forced("scalar"):
        first = gradckpt.codecs.encode(x[: values.period], codec, dither=dither).decode()
    guards.check(torch.equal(out[: values.period], first), f"{name}: other bits are decoded than by the scalar kernels")
    wrong = sum(squares(a.float() - b.float()) for a, b in zip(out.split(PERIOD), x.split(PERIOD), strict=True))
    size = sum(squares(part.float()) for part in x.split(PERIOD))
    guards.at_most(
        f"{name}: relative error", (wrong / size) ** 0.5, most_error(codec, dither is not None), "its format's"
    )


def squares(x: torch.Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def nbytes_of(codec: str, x: torch.Tensor) -> int:
    _, value, group, block, scales, _ = gradckpt.codecs.info(codec)["sizes"][str(x.dtype).removeprefix("torch.")]
    return int(value * x.numel() + (group + scales) * -(-x.numel() // 128) + block * -(-x.numel() // 4096))


def most_error(codec: str, stochastic: bool) -> float:
    """Relative L2, of Gaussian values: a part in 2 ** (bits - 1) of integers; a float's error is
    relative to the value itself."""
    info = gradckpt.codecs.info(codec)
    of_value = info["max_error"] if info["max_error"] < 0.1 else 0.0  # beyond: all errors of a group in one value
    integer = 2.0 ** (1 - int(info["bits_per_value"])) if info["max_error"] else 0.0
    return float(max(of_value, integer) * (1 + stochastic))


def cpu_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    names = options.isa.split(",") if options.isa else ["scalar", "avx2", "avx512"]
    for isa in [name for name in names if name not in ISAS]:
        print(f"{isa}: not supported by this CPU, not measured", file=sys.stderr)
    isas = [name for name in names if name in ISAS]
    guards.check(bool(isas), "bench_codecs: no instruction set of --isa is supported by this CPU")
    if not options.quick:
        machine.keep_memory()
    for threads in options.threads:
        torch.set_num_threads(threads)
        values = Values(options.dtype, options.mib << 20, threads)
        for codec in options.codecs:
            for isa in isas if codec != "raw" else isas[-1:]:
                repeat = options.repeat if isa != "scalar" else min(options.repeat, 3)
                with forced(isa):
                    times = measure(values, codec, repeat, DITHER if options.stochastic else None)
                rows.append(row(options, codec, isa if codec != "raw" else "-", threads, values.x.numel(), times))
        values.pool.shutdown()
    return rows


# ---- figures ----


def row(options: argparse.Namespace, codec: str, isa: str, threads: int, numel: int, times: Times) -> dict[str, Any]:
    item = DTYPES[options.dtype].itemsize
    bits = gradckpt.codecs.info(codec)["sizes"][options.dtype][0]
    moved = {"memcpy": 2 * item * numel, "encode": (item + bits / 8) * numel, "decode": (item + bits / 8) * numel}
    typical = {what: statistics.median(found) for what, found in times.items()}
    for what in ("encode", "decode"):
        floor = moved[what] / moved["memcpy"] * min(times["memcpy"])
        guards.takes(f"{codec}, {isa}, {what}", typical[what], floor, "memcpy of as many bytes")
    speed = {what: moved[what] / seconds / 1e9 for what, seconds in typical.items()}
    return {
        "codec": codec,
        "isa": isa,
        "threads": threads,
        "memcpy_gbs": round(speed["memcpy"], 2),
        "encode_gbs": round(speed["encode"], 2),
        "decode_gbs": round(speed["decode"], 2),
        "encode_share": round(speed["encode"] / speed["memcpy"], 3),
        "decode_share": round(speed["decode"] / speed["memcpy"], 3),
    }


def quality(codecs: list[str]) -> list[dict[str, Any]]:
    sets = [noise_set("X", seed) for seed in range(8)]
    rows = []
    for codec in codecs:
        info = gradckpt.codecs.info(codec)
        gaussian, *bulk = [
            sqnr(x, gradckpt.codecs.encode(x, codec).decode(), ordinary)
            for x, ordinary in [noise_set("Gaussian"), *sets]
        ]
        values = {"sqnr_gaussian_db": gaussian, "sqnr_outliers_db": statistics.mean(bulk)}
        figures = {key: round(value, 1) if value < 1e9 else None for key, value in values.items()}
        rows.append({"codec": codec, "bits": info["bits_per_value"] or 16.0, "max_error": info["max_error"], **figures})
    return rows


def print_speed(rows: list[dict[str, Any]]) -> None:
    columns = ["codec", "ISA", "threads", "memcpy GB/s", "encode GB/s", "share", "decode GB/s", "share"]
    keys = ["codec", "isa", "threads", "memcpy_gbs", "encode_gbs", "encode_share", "decode_gbs", "decode_share"]

    def cell(key: str, value: Any) -> str:
        return f"{value:.2f}x" if key.endswith("share") else f"{value:.1f}" if key.endswith("gbs") else str(value)

    title = "bytes read and written per second; ceiling and share: memcpy in the same run"
    machine.print_table(title, columns, [[cell(key, r[key]) for key in keys] for r in rows])


def print_quality(rows: list[dict[str, Any]]) -> None:
    def decibel(value: float | None) -> str:
        return "exact" if value is None else f"{value:.1f} dB"

    cells = [
        [
            r["codec"],
            f"{r['bits']:g}",
            f"{r['max_error']:.5f}",
            decibel(r["sqnr_gaussian_db"]),
            decibel(r["sqnr_outliers_db"]),
        ]
        for r in rows
    ]
    columns = ["codec", "bits/value", "max error / amax", "SQNR Gaussian", "SQNR outlier set"]
    machine.print_table("quality, bfloat16", columns, cells)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--mib", type=int, default=256, help="size of the tensor in MiB (default 256)")
    parser.add_argument("--repeat", type=int, default=9, help="timed rounds; the median counts (default 9)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--codecs", help="comma-separated (default: all that take the dtype)")
    parser.add_argument("--isa", help="comma-separated instruction sets (default: all that this CPU has)")
    parser.add_argument("--threads", default="1" if cores == 1 else f"1,{min(cores, 8)}", help="e.g. 1,2")
    parser.add_argument("--stochastic", action="store_true", help="encode with stochastic rounding")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    machine.add_quick(parser)
    options = parser.parse_args(argv)
    if options.quick:
        options.mib, options.repeat, options.threads = 1, 3, "1"
    taking = [
        c
        for c in gradckpt.codecs.names()
        if options.dtype in gradckpt.codecs.info(c)["dtypes"]
        and (gradckpt.codecs.info(c)["stochastic"] or not options.stochastic)
    ]
    options.codecs = options.codecs.split(",") if options.codecs else taking
    unknown = [c for c in options.codecs if c not in taking]
    if unknown:
        rounds = " and rounds" if options.stochastic else ""
        parser.error(f"no codec {unknown[0]!r} that takes {options.dtype}{rounds}; choose from {', '.join(taking)}")
    try:
        options.threads = [int(n) for n in options.threads.split(",")]
    except ValueError:
        parser.error(f"--threads takes numbers, not {options.threads!r}")
    if min(options.threads) < 1 or options.mib < 1 or options.repeat < 1:
        parser.error("--threads, --mib and --repeat are at least 1")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    found = machine.facts()
    rows = cpu_rows(options)
    values = quality([c for c in options.codecs if "bfloat16" in gradckpt.codecs.info(c)["dtypes"]])
    if not options.json:
        rounding = ", stochastic rounding" if options.stochastic else ""
        title = f"codecs: {options.mib} MiB of {options.dtype}{rounding}, median of {options.repeat}, warmed"
        machine.print_head(title, found)
        print_speed(rows)
        if values:
            print_quality(values)
    setting = {"mib": options.mib, "repeat": options.repeat, "dtype": options.dtype, "stochastic": options.stochastic}
    machine.print_json({"benchmark": "codecs", **found, **setting, "speed": rows, "quality": values})


if __name__ == "__main__":
    main()
