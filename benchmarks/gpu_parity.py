"""Are the bytes of the CUDA kernels those of the host?

    python benchmarks/gpu_parity.py [--quick] [--fp32 FRACTION] [--codecs int8,int4] [--sanitize]

Every codec and every dtype that it takes: payloads byte by byte, decoded values bit by bit (NaN for
NaN where the format does not keep which), and which tensors are refused. Values: the sets of the
CPU's tests (all 65,536 patterns of the 16-bit dtypes in order, shuffled and under every scale;
hostile ones), strided, misaligned and odd-sized views, stochastic rounding; and all 2^32 float32
values twice, in order and so mixed that a group has four binades. The exit status is 1 when
anything differs.

--sanitize: a few groups of each kind and no kernels of torch's where they can be avoided, for
gpu_sanitize.py. --device cpu: scalar C stands in for the device, and says as late as one whether it
could hold the values. As a stage of gpu.py: as many of the float32 values as its time allows.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import gpu_inputs
import machine
import torch
from gpu_device import Device
from gpu_inputs import WORDS, Case
from gpu_job import Job

import gradckpt
from gradckpt import _C

#: float32 values at a time; all 2^32 are 64 such pieces.
PIECE = 1 << 26
PIECES = (1 << 32) // PIECE
BLOCK = 4096  # of lossless: fits or does not, as a whole
#: Of these the host makes smaller payloads where it can.
SIZED = ("lossless", "sparse")
#: What lies behind the values of sparse_int8 is undefined in a payload with room for more.
CODECS = [codec for codec in gradckpt.codecs.names() if codec != "sparse_int8"]
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: The share of the float32 values in a first pass, which finds out how long they take; and the
#: seconds that are left to the rest of the stage.
FIRST_PASS, SPARE = 2**-9, 8.0


@dataclasses.dataclass
class Tally:
    """Of one codec and dtype."""

    codec: str
    dtype: str
    values: int = 0
    differences: int = 0
    first: str = ""

    def note(self, count: int, text: str) -> None:
        self.differences += count
        self.first = self.first or text

    def line(self) -> str:
        text = f"{self.codec:11}{self.dtype:9}{self.values:>15,} values {self.differences:>6,} differences"
        return text + (f"\n    first: {self.first}" if self.first else "")


def show(tally: Tally) -> None:
    print(tally.line(), flush=True)


# ---- two sides ----


def whole(payload: gradckpt.codecs.Payload) -> torch.Tensor:
    """The codes, and then the scales."""
    return torch.cat([payload.codes, payload.scales])


class OfOperators:
    """What the operators make on the host: payloads of the size that they have on a device."""

    def __init__(self, x: torch.Tensor, codec: str):
        self.x, self.codec, self.codes = x, codec, torch.ops.gradckpt.encode(x, codec)
        self.scales = self.codes.new_empty(0)
        self.nbytes = self.codes.numel()

    def decode(self) -> torch.Tensor:
        out = torch.empty_like(self.x)
        torch.ops.gradckpt.decode_many([self.codes], self.codec, [out])
        return out


def host_encode(x: torch.Tensor, codec: str, dither: tuple[int, int, int] | None) -> Any:
    """None: refused."""
    try:
        return OfOperators(x, codec) if codec in SIZED else gradckpt.codecs.encode(x, codec, dither=dither)
    except (ValueError, RuntimeError) as error:
        if "cannot hold" not in str(error):
            raise
        return None


@contextlib.contextmanager
def as_a_device() -> Iterator[None]:
    before = _C.isa()
    _C.force_isa("scalar")
    _C.late_overflow(True)
    try:
        yield
    finally:
        _C.late_overflow(False)
        _C.force_isa(before)


class Side:
    """The device, or what stands in for it."""

    def __init__(self, device: Device) -> None:
        self.device, self.name = device, device.kind
        self.staging: torch.Tensor | None = None

    def acting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.device.queues else as_a_device()

    def put(self, host: torch.Tensor) -> torch.Tensor:
        """A copy of a flat tensor, never the same memory."""
        return host.to(self.name) if self.device.queues else host.clone()

    def encode(
        self, x: torch.Tensor, codec: str, dither: tuple[int, int, int] | None
    ) -> tuple[gradckpt.codecs.Payload, bool]:
        """The payload, and whether x was refused: then the payload goes on holding x."""
        with self.acting():
            holders = sys.getrefcount(x)
            payload = gradckpt.codecs.encode(x, codec, dither=dither)
            if self.device.queues:
                self.device.synchronize()
            else:
                _C.settle_overflow()
            gradckpt.stats()  # looks at the flags
            return payload, sys.getrefcount(x) > holders

    def decode(self, payload: gradckpt.codecs.Payload) -> torch.Tensor:
        with self.acting():
            return payload.decode()

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """By way of pinned memory, which all threads fill: a pageable copy goes through one."""
        if not self.device.is_cuda:
            return host.to(self.name)
        flat = host.reshape(-1).view(torch.uint8)
        if self.staging is None or self.staging.numel() < flat.numel():
            self.staging = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True)
        staged = self.staging[: flat.numel()].copy_(flat)
        sent = staged.to(self.name, non_blocking=True)
        self.device.synchronize()  # the next upload writes there
        return sent.view(host.dtype)


# ---- differences ----


def differing(a: torch.Tensor, b: torch.Tensor, nan_is_nan: bool) -> torch.Tensor:
    """Flat bools; a and b are flat, contiguous and of one dtype."""
    word = WORDS[a.dtype.itemsize]
    differ = a.view(word) != b.view(word)
    if nan_is_nan and a.is_floating_point():
        differ &= ~((a != a) & (b != b))
    return differ


def value_at(codec: str, dtype: str, numel: int, offset: int) -> int:
    """The value that byte `offset` of a payload belongs to; where several share it, or a scale,
    the first of them."""
    _, value, group, block, scales, _ = gradckpt.codecs.info(codec)["sizes"][dtype]
    if value:
        return offset // value
    beside = scales or int(codec == "lossless")  # whose base is among its codes
    groups, blocks, codes = -(-numel // 128), -(-numel // BLOCK), group if scales else group - beside
    if offset < groups * codes:
        inside = offset % codes * 128 // codes if codec != "lossless" else 0
        return offset // codes * 128 + inside
    offset -= groups * codes
    if offset < blocks * block:
        return offset // block * BLOCK
    return (offset - blocks * block) // beside * 128


def hexadecimal(x: torch.Tensor, i: int) -> str:
    """Value i in contiguous order."""
    bits = int(x.reshape(-1)[i].reshape(1).view(WORDS[x.dtype.itemsize]).item())
    return f"0x{bits % 256**x.dtype.itemsize:0{2 * x.dtype.itemsize}x}"


class Comparison:
    """Encodes and decodes on both sides."""

    def __init__(self, device: Side) -> None:
        self.device = device

    def payloads(self, ours: torch.Tensor, theirs: torch.Tensor, host: torch.Tensor, tally: Tally, name: str) -> bool:
        if ours.numel() != theirs.numel():
            tally.note(1, f"{name}: {ours.numel()} bytes on the device, {theirs.numel()} on the host")
            return False
        differ = differing(ours, theirs, False)
        count = int(differ.sum())
        if count:
            at = int(differ.nonzero()[0])
            i = value_at(tally.codec, tally.dtype, host.numel(), at)
            tally.note(
                count,
                f"{name}: value {i} = {hexadecimal(host, i)}: payload byte {at} is 0x{int(ours[at]):02x} on the "
                f"device, 0x{int(theirs[at]):02x} on the host",
            )
        return count == 0

    def decoded(self, ours: torch.Tensor, theirs: torch.Tensor, host: torch.Tensor, tally: Tally, name: str) -> None:
        differ = differing(ours, theirs, gradckpt.codecs.info(tally.codec)["stochastic"])
        count = int(differ.sum())
        if count:
            i = int(differ.nonzero()[0])
            tally.note(
                count,
                f"{name}: value {i} = {hexadecimal(host, i)} is decoded to {hexadecimal(ours, i)} on the device, "
                f"{hexadecimal(theirs, i)} on the host",
            )

    def together(self, ours: torch.Tensor, theirs: torch.Tensor, large: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Both flat, on the device when they are large; else on the host,
        so that torch runs no kernel."""
        if large:
            return ours.reshape(-1), self.device.upload(theirs).reshape(-1)
        return ours.cpu().reshape(-1), theirs.reshape(-1)

    def view(self, case: Case, tally: Tally) -> None:
        self.tensors(case.view(case.base), case.view(self.device.put(case.base)), tally, case.name, case.dither)

    def tensors(
        self,
        host: torch.Tensor,
        x: torch.Tensor,
        tally: Tally,
        name: str,
        dither: tuple[int, int, int] | None = None,
        large: bool = False,
    ) -> None:
        """x is host's copy on the device."""
        payload, refused = self.device.encode(x, tally.codec, dither)
        wanted = host_encode(host, tally.codec, dither)
        if refused != (wanted is None):
            tally.note(1, f"{name}: refused by the {'device' if refused else 'host'} alone")
        elif wanted is None:
            self.refused(payload, host, x, tally, name, large)
        else:
            tally.values += host.numel()
            if self.payloads(*self.together(whole(payload), whole(wanted), large), host, tally, name):
                restored = self.device.decode(payload)
                self.decoded(*self.together(restored, wanted.decode(), large), host, tally, name)

    def refused(
        self,
        payload: gradckpt.codecs.Payload,
        host: torch.Tensor,
        x: torch.Tensor,
        tally: Tally,
        name: str,
        large: bool,
    ) -> None:
        """What it cannot hold comes back from the original, or as NaN;
        the rest is compared without it."""
        gone = unholdable(tally.codec, host, x)
        if not bool(gone.any()):
            tally.note(1, f"{name}: refused, but there is no value that the codec cannot hold")
            return
        flat = x.reshape(-1)
        wrong = differing(self.device.decode(payload).reshape(-1), flat, False) & gone
        if bool(wrong.any()):
            tally.note(int(wrong.sum()), f"{name}: a refused tensor is not restored from the original")
        if self.device.device.queues:
            bytes_ = torch.ops.gradckpt.encode(x, tally.codec)
            spoiled = torch.ops.gradckpt.decode(bytes_, tally.codec, [x.numel()], x.dtype)
            wrong = gone & (spoiled == spoiled)
            if bool(wrong.any()):
                tally.note(int(wrong.sum()), f"{name}: a value that the codec cannot hold is not decoded to NaN")
        held = torch.where(gone, 0, flat)
        self.tensors(held.cpu(), held, tally, f"{name}, without what it cannot hold", None, large)


def unholdable(codec: str, host: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Flat bools, on x's device: the values, or blocks of values,
    for which the codec must refuse the tensor."""
    flat = x.reshape(-1)
    if codec in CASTS:
        return flat.to(CASTS[codec]).isinf() & flat.isfinite()
    parts = host.reshape(-1).split(BLOCK)
    gone = torch.tensor([host_encode(part, codec, None) is None for part in parts])
    return gone.repeat_interleave(BLOCK)[: flat.numel()].to(x.device)


def several_tensors(codec: str, dtype: str, device: Side, tally: Tally) -> None:
    """More than one launch takes, each second one misaligned, some strided;
    decoded into memory of the same layout."""
    cases = [gpu_inputs.flat(f"tensor {n} of 40", gpu_inputs.gaussian(dtype, 50 + 97 * n, n), n % 2) for n in range(40)]
    for n, name in ((7, "transposed"), (20, "every third"), (33, "padded rows")):
        cases[n] = Case(name, gpu_inputs.gaussian(dtype, 6000), *gpu_inputs.LAYOUTS[name], 1)
    bases = [device.put(case.base) for case in cases]
    written = [device.put(torch.ones_like(case.base)) for case in cases]
    with device.acting():
        payloads = torch.ops.gradckpt.encode_many([c.view(b) for c, b in zip(cases, bases, strict=True)], codec)
        outs = [c.view(w) for c, w in zip(cases, written, strict=True)]
        torch.ops.gradckpt.decode_many(payloads, codec, outs)
    comparison = Comparison(device)
    for case, payload, out in zip(cases, payloads, written, strict=True):
        host, name = case.view(case.base), f"together: {case.name}"
        wanted = OfOperators(host, codec) if codec in SIZED else gradckpt.codecs.encode(host, codec)
        tally.values += host.numel()
        if comparison.payloads(payload.cpu(), whole(wanted), host, tally, name):
            around = torch.ones_like(case.base)
            case.view(around).copy_(wanted.decode())
            comparison.decoded(out.cpu(), around, case.base, tally, f"{name}, and what lies between")


# ---- what is compared ----


def pairs(codecs: list[str]) -> list[tuple[str, str]]:
    return [(c, d) for c in codecs for d in gradckpt.codecs.info(c)["dtypes"]]


def compare_views(device: Side, codecs: list[str], small: bool) -> dict[tuple[str, str], Tally]:
    tallies = {pair: Tally(*pair) for pair in pairs(codecs)}
    cases = {d: list((gpu_inputs.few if small else gpu_inputs.many)(d)) for d in {d for _, d in tallies}}
    comparison = Comparison(device)
    with machine.progress(sum(len(cases[d]) for _, d in tallies)) as step:
        for (codec, dtype), tally in tallies.items():
            for case in cases[dtype]:
                step(f"{codec} {dtype}")
                if case.dither is None or gradckpt.codecs.info(codec)["stochastic"]:
                    comparison.view(case, tally)
            several_tensors(codec, dtype, device, tally)
            show(tally)
    return tallies


def compare_float32(device: Side, codecs: list[str], fraction: float) -> dict[tuple[str, str], Tally]:
    """`fraction` of all values, from everywhere: the beginning of each piece."""
    count = max(128, round(PIECE * fraction) // 128 * 128)
    tallies = {(c, "float32"): Tally(c, "float32") for c, d in pairs(codecs) if d == "float32"}
    comparison = Comparison(device)
    cuda = device.device.is_cuda
    if cuda:
        machine.keep_memory()
    host = torch.empty(count, dtype=torch.float32, pin_memory=cuda)
    with machine.progress(len(gpu_inputs.ORDERS) * PIECES * len(tallies)) as step:
        for order in gpu_inputs.ORDERS:
            for piece in range(PIECES):
                x = gpu_inputs.float32_of(order, piece * PIECE, count, device.name)
                host.copy_(x)
                name = f"float32 {order} from 0x{piece * PIECE:08x}"
                for (codec, _), tally in tallies.items():
                    step(f"{codec}, {name}")
                    comparison.tensors(host, x, tally, name, None, large=True)
    for tally in tallies.values():
        show(tally)
    return tallies


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="a device type of torch (%(default)s)")
    parser.add_argument("--codecs", default=",".join(CODECS), help="comma-separated, of: %(default)s")
    parser.add_argument(
        "--fp32", type=float, metavar="FRACTION", help="how much of the 2^32 float32 values (1; cpu: 2^-18)"
    )
    parser.add_argument("--quick", action="store_true", help="few inputs, and 2^-10 of the float32 values")
    parser.add_argument("--sanitize", action="store_true", help="few inputs, none of the 2^32")
    options = parser.parse_args(argv)
    machine.choose(parser, options, "codecs", gradckpt.codecs.names())
    if options.fp32 is None:
        options.fp32 = 2**-18 if options.device == "cpu" else 2**-10 if options.quick else 1.0
    if not 0 <= options.fp32 <= 1:
        parser.error("--fp32 is a fraction between 0 and 1")
    return options


def stage_float32(job: Job, side: Side) -> list[Tally]:
    """A small share of all float32 values, and then as many as the time allows."""
    start = time.monotonic()
    found = list(compare_float32(side, CODECS, 2**-18 if job.small else FIRST_PASS).values())
    took = time.monotonic() - start
    if job.small:
        return found
    share = min(1.0, FIRST_PASS * (job.left - SPARE) / took)
    if share > 2 * FIRST_PASS:
        found = list(compare_float32(side, CODECS, share).values())
    job.note(f"{max(share, FIRST_PASS):.3g} of the 2^32 float32 values, in order and spread")
    return found


def run(job: Job) -> None:
    """A stage of gpu.py."""
    side = Side(job.device)
    row = job.table("payloads and decoded values, device = host", ["codec", "dtype", "values", "differences", "first"])

    def judge(tallies: Iterable[Tally]) -> None:
        for tally in tallies:
            row(tally.codec, tally.dtype, f"{tally.values:,}", tally.differences, tally.first or "-")
            job.check(tally.values > 0, f"{tally.codec} {tally.dtype}: no value was compared")
            job.check(not tally.differences, f"{tally.codec} {tally.dtype}: {tally.differences} differ: {tally.first}")

    with torch.no_grad():
        with job.part("views of the CPU tests' sets"):
            judge(compare_views(side, CODECS, job.small).values())
        with job.part("float32 values"):
            judge(stage_float32(job, side))


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    device = Device(options.device)
    machine.require(options.device, "gpu_parity")
    small = options.quick or options.sanitize or options.device == "cpu"
    start = time.perf_counter()
    side = Side(device)
    machine.print_head("parity: payloads and decoded values, device = host", device.facts())
    with torch.no_grad():
        tallies = list(compare_views(side, options.codecs, small).values())
        if options.fp32 > 0 and not options.sanitize:
            every = "all" if options.fp32 == 1 else f"{options.fp32:.3g} of"
            print(f"{every} 2^32 float32 values, in order and spread:", flush=True)
            tallies += compare_float32(side, options.codecs, options.fp32).values()
    differences = sum(tally.differences for tally in tallies)
    values = sum(tally.values for tally in tallies)
    print(f"{values:,} values, {differences:,} differences, {time.perf_counter() - start:.0f} s")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
