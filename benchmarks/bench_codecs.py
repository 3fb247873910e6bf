"""Speed and quality of the codecs on the CPU; gpu_roofline.py has the speed of the CUDA kernels.

    python benchmarks/bench_codecs.py [--mib 256] [--threads 1,2]
        [--isa scalar,avx2] [--stochastic] ...

GB/s counts bytes read plus bytes written; the ceiling is memcpy of the same values, timed before
and after every repeat of every kernel, so that a noisy machine harms both alike. Everything is
written into warm, preallocated buffers: torch's allocator gives large tensors back to the kernel,
so gradckpt.codecs.encode() pays for page faults that memcpy into a warm buffer does not. The
extension exports nothing but its module, hence the benchmark compiles csrc/codec once more with
the flags of setup.py (gcc is needed) and calls gck_encode() and gck_decode() by ctypes: the shipped
C, dispatch and streaming included. Several threads: as many Python threads, each with its own part
of the buffers (ctypes releases the GIL). The scalar kernels are timed 3 times at most.

SQNR: of Gaussian values, and of the ordinary channels of set X of tests/helpers/codec_inputs.py
(channel and token sizes lognormal, six channels 20 to 45 times larger, two massive values),
bfloat16. What codecs do to real layer inputs and to gradients: bench_fidelity.py.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pathlib
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import machine
import torch
from codec_inputs import noise_set, sqnr

import gradckpt

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODEC = ROOT / "csrc" / "codec"
DTYPES = {
    "float32": (0, torch.float32),
    "float16": (1, torch.float16),
    "bfloat16": (2, torch.bfloat16),
    "bool": (3, torch.bool),
}
FLAGS = shlex.split(
    "-std=c11 -O3 -fPIC -fexceptions -ffp-contract=off -fno-math-errno -fstack-protector-strong -D_FORTIFY_SOURCE=2"
)
ISA_FLAGS = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
}
Times = dict[str, list[float]]


class Tensor(ctypes.Structure):
    """gck_tensor of contiguous host memory."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("ndim", ctypes.c_int),
        ("sizes", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_void_p),
    )


class Dither(ctypes.Structure):
    """gck_dither."""

    _fields_ = (("seed", ctypes.c_uint64), ("step", ctypes.c_uint32), ("tensor", ctypes.c_uint32))


class How(ctypes.Structure):
    """gck_how."""

    _fields_ = (("dither", ctypes.POINTER(Dither)), ("overflow", ctypes.c_void_p))


def build(folder: pathlib.Path) -> ctypes.CDLL:
    gcc = shutil.which(os.environ.get("CC", "gcc"))
    if gcc is None:
        sys.exit("bench_codecs: gcc was not found; the CPU benchmark compiles csrc/codec once more")

    def compile_one(source: pathlib.Path) -> pathlib.Path:
        x86 = platform.machine() == "x86_64"
        extra = next((flags for suffix, flags in ISA_FLAGS.items() if x86 and source.stem.endswith(suffix)), [])
        made = folder / f"{source.stem}.o"
        subprocess.run([gcc, *FLAGS, *extra, f"-I{CODEC.parent}", "-c", source, "-o", made], check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sorted(CODEC.rglob("*.c"))))
    subprocess.run([gcc, "-shared", "-o", folder / "codecs.so", *objects, "-lm"], check=True)
    library = ctypes.CDLL(str(folder / "codecs.so"))
    library.gck_codec_find.restype = ctypes.c_void_p
    return library


# ---- measuring ----


class Parts:
    """A contiguous tensor, its copy and its payloads, cut into one piece per thread."""

    def __init__(self, library: ctypes.CDLL, dtype: str, nbytes: int, threads: int) -> None:
        number, kind = DTYPES[dtype]
        self.item = kind.itemsize
        self.numel = nbytes // self.item // (128 * threads) * threads * 128  # whole groups for each
        self.each = self.numel // threads
        self.library = library
        self.pool = ThreadPoolExecutor(threads)
        x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
        x = x > 0 if kind == torch.bool else x.to(kind)
        self.x = x.repeat(self.numel // x.numel() + 1)[: self.numel].clone()
        self.out = torch.zeros_like(self.x)
        self.payload = torch.zeros(self.numel * self.item + 4096, dtype=torch.uint8)
        self.pieces = range(threads)
        self.number = number

    def view(self, tensor: torch.Tensor, piece: int) -> Tensor:
        data = tensor.data_ptr() + piece * self.each * self.item
        return Tensor(data, self.each, 0, None, None, self.number, -1, None)

    def calls(self, codec: str, stochastic: bool) -> dict[str, list[Callable[[], Any]]]:
        """What each thread calls, for copying, encoding and decoding."""
        library = self.library
        how = How(ctypes.pointer(Dither(1, 2, 3)), None) if stochastic else None
        rounding = ctypes.byref(how) if how else None
        found = ctypes.c_void_p(library.gck_codec_find(codec.encode()))
        size = self.numel * self.item // len(self.pieces)
        step = -(-size // 64) * 64
        made: dict[str, list[Callable[[], Any]]] = {"memcpy": [], "encode": [], "decode": []}
        copy = ctypes.CDLL(None).memcpy
        copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        for piece in self.pieces:
            x, out = self.view(self.x, piece), self.view(self.out, piece)
            payload = ctypes.c_void_p(-(-self.payload.data_ptr() // 64) * 64 + piece * step)
            made["memcpy"].append(lambda x=x, out=out: copy(out.data, x.data, size))
            made["encode"].append(lambda x=x, p=payload: library.gck_encode(found, ctypes.byref(x), p, rounding, None))
            made["decode"].append(lambda o=out, p=payload: library.gck_decode(found, p, ctypes.byref(o), None))
        return made

    def time(self, calls: list[Callable[[], Any]]) -> float:
        if len(calls) == 1:
            start = time.perf_counter()
            calls[0]()
            return time.perf_counter() - start
        start = time.perf_counter()
        for job in [self.pool.submit(call) for call in calls]:
            job.result()
        return time.perf_counter() - start


def measure(parts: Parts, codec: str, repeat: int, stochastic: bool) -> Times:
    """Seconds; memcpy between all others. The first round warms up and is dropped."""
    calls = parts.calls(codec, stochastic)
    times: Times = {"memcpy": [], "encode": [], "decode": []}
    for n in range(repeat + 1):
        for what in ("memcpy", "encode", "memcpy", "decode"):
            seconds = parts.time(calls[what])
            if n > 0:
                times[what].append(seconds)
    return times


def cpu_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        library = build(pathlib.Path(folder))
        names = options.isa.split(",") if options.isa else ["scalar", "avx2", "avx512"]
        isas = [isa for isa in names if library.gck_isa_supported(isa.encode()) == 1]
        for isa in set(names) - set(isas):
            print(f"{isa}: not supported by this CPU, not measured")
        for threads in options.threads:
            parts = Parts(library, options.dtype, options.mib << 20, threads)
            for codec in options.codecs:
                for isa in isas if codec != "raw" else isas[-1:]:
                    library.gck_isa_force(isa.encode())
                    repeat = options.repeat if isa != "scalar" else min(options.repeat, 3)
                    times = measure(parts, codec, repeat, options.stochastic)
                    rows.append(row(options, codec, isa if codec != "raw" else "-", threads, parts.numel, times))
            parts.pool.shutdown()
    return rows


# ---- figures ----


def row(options: argparse.Namespace, codec: str, isa: str, threads: int, numel: int, times: Times) -> dict[str, Any]:
    item = DTYPES[options.dtype][1].itemsize
    bits = gradckpt.codecs.info(codec)["sizes"][options.dtype][0]
    moved = {"memcpy": 2 * item * numel, "encode": (item + bits / 8) * numel, "decode": (item + bits / 8) * numel}
    speed = {what: moved[what] / statistics.median(times[what]) / 1e9 for what in times}
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

    title = "bytes read and written per second; share: of memcpy in the same run"
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


def parse() -> argparse.Namespace:
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
    options = parser.parse_args()
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


def main() -> None:
    options = parse()
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
