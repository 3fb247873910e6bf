"""Memory, page cache and time of checkpoints on a disk: ``offload="disk"``.

    python benchmarks/bench_disk.py [--mib 512 --payload-mib 8 --budget-mib 128]
    python benchmarks/bench_disk.py --directory /scratch

A chain of light blocks on the CPU, with one raw payload for each. One step is taken in three ways:
payloads in memory; on the disk; and *nothing kept*, where zeros come back instead, so its gradients
are wrong and its memory is that of the work alone. What is resident is read at the end of each
block, in the forward and in each recompute. Payloads take what the peak of a way has above that of
nothing kept. Free memory that glibc keeps does not count.

Of the file, mincore() counts the pages in the page cache at the same moments.

Rate: a store alone writes all payloads, then reads them, last first. Beside it, as many threads
copy as many bytes with O_DIRECT, in requests of the same size, between another file of the
directory and as much memory as the store has: in pages of 4 KiB, and in huge ones, of which a
request has fewer pieces. All take turns; ratios are of each round, and their median is shown.

Checked: gradients are those without an offload, bit for bit; with nothing kept they are not;
payloads take at least their bytes in memory, and at most the budget on the disk; mincore() sees
what is read through the page cache; no store is faster than the faster copy by more than 5%.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import guards
import machine
import timing
import torch

import gradckpt
from gradckpt._engine.places import SAVED, place_of

MIB = 2**20
WIDTH = 256
#: Threads of a store, and the largest request that its file makes.
THREADS, REQUEST = 2, 8 * MIB
#: Resident memory that threads and allocators change meanwhile.
NOISE = 4 * MIB
GOAL, CEILING = 0.8, 1.05
HUGE = "huge pages"
PAGES = ("pages of 4 KiB", HUGE)
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


# ---- what is resident


def resident_bytes() -> int:
    """Without the free memory that glibc keeps."""
    with contextlib.suppress(AttributeError):
        LIBC.malloc_trim(0)
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def unnamed_files(directory: str) -> list[int]:
    """Descriptors of deleted files in this folder."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(f"{directory}/") and target.endswith(" (deleted)"):
                found.append(int(name))
    return found


def cached_pages(fd: int) -> int:
    """Pages of a file that are in the page cache."""
    size = os.fstat(fd).st_size
    if size == 0:
        return 0
    at = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    guards.check(at != ctypes.c_void_p(-1).value, "the file cannot be mapped")
    marks = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    status = LIBC.mincore(at, size, marks)
    LIBC.munmap(at, size)
    guards.check(status == 0, "mincore() fails on the file")
    return sum(mark & 1 for mark in marks.raw)


def check_mincore(fd: int) -> None:
    """Read a part of the file through the page cache: its pages must be seen."""
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    part = min(MIB, os.fstat(fd).st_size)
    got = len(os.pread(again, part, 0))
    seen = cached_pages(fd)
    os.posix_fadvise(again, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(again)
    guards.at_least("pages seen by mincore()", seen, got // mmap.PAGESIZE, "those read through the page cache")


# ---- a step


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class Step(NamedTuple):
    gradients: str  # a digest
    peak: int  # bytes resident
    pages: list[int]  # of the file, by the end of a block


class Net:
    def __init__(self, options: argparse.Namespace, directory: str) -> None:
        torch.manual_seed(0)
        self.payload = options.payload
        self.blocks = [Block() for _ in range(options.mib * MIB // options.payload)]
        self.net = torch.nn.Sequential(*self.blocks)
        self.x = torch.randn(self.payload // (4 * WIDTH), WIDTH, requires_grad=True)
        self.directory = directory
        self.place = gradckpt.Offload("disk", directory=directory, host_budget=options.budget, min_bytes=self.payload)

    def step(self, way: str) -> None:
        for x in self.leaves():  # which keep their memory
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad.zero_()
        context = forgotten(self.payload) if way == "nothing kept" else contextlib.nullcontext()
        with gradckpt.enable(self.net, "raw", modules=Block, offload=self.place if way == "disk" else False):
            with context:
                loss = self.net(self.x * 1).square().mean()
            loss.backward()

    def leaves(self) -> list[torch.Tensor]:
        return [self.x, *self.net.parameters()]

    def gradients(self) -> str:
        found = hashlib.sha256()
        for x in self.leaves():
            assert x.grad is not None
            found.update(x.grad.numpy().tobytes())
        return found.hexdigest()

    def watched(self, way: str) -> Step:
        """The step, with what is resident at each block's end."""
        peaks: list[int] = []
        pages: list[int] = []

        def watch(*_: Any) -> None:
            peaks.append(resident_bytes())
            pages.extend(cached_pages(fd) for fd in unnamed_files(self.directory))

        hooks = [block.linear.register_forward_hook(watch) for block in self.blocks]
        self.step(way)
        for hook in hooks:
            hook.remove()
        guards.check(len(peaks) == 2 * len(hooks), f"{way}: {len(peaks)} ends of blocks, not {2 * len(hooks)}")
        return Step(self.gradients(), max(peaks), pages)


def forgotten(payload: int) -> torch.autograd.graph.saved_tensors_hooks:
    """Saved payloads are dropped, and come back as zeros."""

    def pack(x: torch.Tensor) -> torch.Tensor | int:
        return payload if x.dtype is torch.uint8 and x.numel() == payload else x.detach()

    def unpack(kept: torch.Tensor | int) -> torch.Tensor:
        return torch.zeros(kept, dtype=torch.uint8) if isinstance(kept, int) else kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def training(options: argparse.Namespace, directory: str) -> dict[str, dict[str, float]]:
    """Of each way: bytes resident for payloads, pages in the page cache, and seconds of a step."""
    net = Net(options, directory)
    nbytes, steps = len(net.blocks) * net.payload, {}
    for way in ("nothing kept", "memory", "disk"):  # the store keeps its memory, so it comes last
        net.step(way)
        steps[way] = net.watched(way)
    right, figures = steps["memory"].gradients, place_of(net.place).figures()  # type: ignore[union-attr]
    guards.at_least("bytes put", figures["puts"] * net.payload, 2 * nbytes, "the payloads of two steps")
    guards.check(steps["disk"].gradients == right, "disk: the gradients differ from those with payloads in memory")
    guards.check(steps["nothing kept"].gradients != right, "nothing kept: the gradients are right")
    cached = max(steps["disk"].pages)
    few = cached * mmap.PAGESIZE <= figures["file_peak"] / 100
    guards.check(few, f"{cached:,} pages of the file are in the page cache")
    check_mincore(unnamed_files(directory)[0])
    above = {way: step.peak - steps["nothing kept"].peak for way, step in steps.items()}
    guards.at_least("memory: resident bytes", above["memory"] + NOISE, nbytes, "the payloads")
    fits = above["disk"] - NOISE <= options.budget
    guards.check(fits, f"payloads on the disk take {above['disk']:,} bytes of memory, above the budget")
    machine.keep_memory()
    rounds = [{way: timing.seconds(functools.partial(net.step, way)) for way in steps} for _ in range(options.steps)]
    for way in steps:
        guards.check(min(each[way] for each in rounds) > 0, f"{way}: a step takes no time; the measurement is wrong")
    return {
        way: {
            "peak": steps[way].peak,
            "payloads": above[way],
            "file": figures["file_peak"] if way == "disk" else 0,
            "moments": len(steps[way].pages),
            "cached": cached if way == "disk" else 0,
            "seconds": statistics.median(each[way] for each in rounds),
            "ratio": statistics.median(each[way] / each["memory"] for each in rounds),
        }
        for way in steps
    }


# ---- a rate


class Moved(NamedTuple):
    """Bytes and seconds of a direction."""

    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.nbytes / self.seconds / 1e9


def both(moved: tuple[Moved, Moved]) -> float:
    return sum(each.nbytes for each in moved) / sum(each.seconds for each in moved) / 1e9


def timed(run: Callable[[], int]) -> Moved:
    moved: list[int] = []
    seconds = timing.seconds(lambda: moved.append(run()))
    guards.check(seconds > 0 and moved[0] > 0, f"{moved[0]:,} bytes in {seconds} s; the measurement is wrong")
    return Moved(moved[0], seconds)


class Saved:
    """Tensors that a graph saves and reads again, last first, in a place on the disk.

    The store says what its threads wrote and read, and how long some thread did.
    """

    def __init__(self, offload: gradckpt.Offload, payload: torch.Tensor, n: int) -> None:
        self.pack, self.unpack = gradckpt.compress_saved(None, offload=offload).hooks
        leaf = payload.view(torch.float32).requires_grad_()
        self.tensors = [leaf * 1 for _ in range(n)]
        self.figures = place_of(offload, SAVED).figures  # type: ignore[union-attr]

    def directions(self) -> tuple[Moved, Moved]:
        before = self.figures()
        packed = [self.pack(x) for x in self.tensors]
        while packed:
            back = self.unpack(packed.pop())
            guards.check(torch.equal(back, self.tensors[0]), "other values come back from the disk")
        after = self.figures()
        spans = (("written", "write_ns"), ("read", "read_ns"))
        write, read = (Moved(after[n] - before[n], (after[t] - before[t]) / 1e9) for n, t in spans)
        guards.check(min(*write, *read) > 0, "nothing was written or read; the measurement is wrong")
        return write, read


@contextlib.contextmanager
def direct_file(directory: str) -> Iterator[int]:
    """A file without a name, past the page cache."""
    fd, path = tempfile.mkstemp(dir=directory)
    os.close(fd)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    os.unlink(path)
    try:
        yield fd
    finally:
        os.close(fd)


class Copy:
    """Threads that write n payloads to a file, and read them."""

    def __init__(self, fd: int, payload: torch.Tensor, n: int, slots: int, huge: bool) -> None:
        self.fd, self.payload, self.n, self.nbytes, self.slots = fd, payload, n, payload.numel(), slots
        area = mmap.mmap(-1, slots * self.nbytes + 2 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % (2 * MIB)
        self.memory = memoryview(area)[start : start + slots * self.nbytes]

    def move(self, writes: bool, order: Iterator[int]) -> None:
        for i in order:  # an iterator that threads share: each takes the next one
            for at in range(0, self.nbytes, REQUEST):
                size, slot = min(REQUEST, self.nbytes - at), i % self.slots * self.nbytes + at
                part, offset = self.memory[slot : slot + size], i * self.nbytes + at
                moved = os.pwrite(self.fd, part, offset) if writes else os.preadv(self.fd, [part], offset)
                if moved != size:
                    raise OSError(f"{moved:,} of {size:,} bytes were moved")

    def pass_over(self, writes: bool) -> int:
        order = iter(range(self.n) if writes else range(self.n - 1, -1, -1))
        with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(functools.partial(self.move, writes), [order] * THREADS))
        return self.n * self.nbytes

    def directions(self) -> tuple[Moved, Moved]:
        self.memory[:] = self.slots * self.payload.numpy().tobytes()
        written = timed(functools.partial(self.pass_over, True))
        self.memory[:] = bytes(len(self.memory))
        read = timed(functools.partial(self.pass_over, False))
        back = torch.frombuffer(self.memory, dtype=torch.uint8).view(self.slots, -1)
        guards.check(bool((back == self.payload).all()), "other bytes come back from the plain copy")
        return written, read


def digest_rate(memory: torch.Tensor, rounds: int) -> float | None:
    """GB/s of the digest in one thread, compiled from the store's source; None: no compiler."""
    csrc = pathlib.Path(__file__).parents[1] / "csrc"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/file.so"
        command = [compiler, "-std=c11", "-O3", "-shared", "-fPIC", f"-I{csrc}", "-o", library]
        subprocess.run([*command, str(csrc / "offload" / "file.c")], check=True)
        digest = ctypes.CDLL(library).gck_file_digest
    digest.argtypes, digest.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint64
    run = functools.partial(digest, memory.data_ptr(), memory.numel())
    seconds = statistics.median(timing.seconds(run) for _ in range(rounds))
    guards.check(seconds > 0, "the digest takes no time; the measurement is wrong")
    return memory.numel() / seconds / 1e9


def rates(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Of each way: GB/s, and the median ratio of the store's to it."""
    n, slots = options.mib * MIB // options.payload, options.budget // options.payload
    payload = torch.randn(options.payload // 4, generator=torch.Generator().manual_seed(0)).view(torch.uint8)
    place = gradckpt.Offload("disk", host_budget=options.budget, directory=directory, min_bytes=options.payload)
    saved = Saved(place, payload, n)
    runs: dict[str, Callable[[], tuple[Moved, Moved]]] = {"store": saved.directions}
    rounds = []
    with contextlib.ExitStack() as files:
        for pages in PAGES:
            fd = files.enter_context(direct_file(directory))
            runs[f"copy, {pages}"] = Copy(fd, payload, n, slots, pages == HUGE).directions
        for i in range(options.rounds + 1):  # the first one allocates the files, and does not count
            rounds.append({name: runs[name]() for name in (list(runs) if i % 2 else reversed(runs))})
    found = {name: rates_of(name, rounds[1:]) for name in runs}
    ratio = min(each["both"] for name, each in found.items() if name != "store")
    guards.at_most("rate of the store, in copies", ratio, options.ceiling, "the ceiling")
    return {"ways": found, "digest": digest_rate(payload.repeat(slots), options.rounds)}


def rates_of(name: str, rounds: list[dict[str, tuple[Moved, Moved]]]) -> dict[str, float]:
    """Medians of a way: GB/s written and read, and the ratios of the store's to them."""
    pairs = [(each["store"], each[name]) for each in rounds]
    return {
        "GB/s written": statistics.median(way[0].rate for _, way in pairs),
        "GB/s read": statistics.median(way[1].rate for _, way in pairs),
        "written": statistics.median(store[0].rate / way[0].rate for store, way in pairs),
        "read": statistics.median(store[1].rate / way[1].rate for store, way in pairs),
        "both": statistics.median(both(store) / both(way) for store, way in pairs),
    }


# ---- the program


def show(steps: dict[str, dict[str, float]], found: dict[str, Any], options: argparse.Namespace) -> None:
    rows = [
        [
            way,
            f"{step['peak'] / MIB:,.1f}",
            f"{step['payloads'] / MIB:,.1f}",
            f"{step['file'] / MIB:,.0f}",
            f"{step['cached']:,.0f} at {step['moments']}" if way == "disk" else "",
            f"{step['seconds']:.3f}",
            f"{step['ratio']:.3f}",
        ]
        for way, step in steps.items()
    ]
    head = [
        "payloads",
        "peak RSS MiB",
        "of payloads MiB",
        "file MiB",
        "pages cached, moments",
        "s a step",
        "of memory's",
    ]
    title = f"a step with {options.mib} MiB of payloads, budget {options.budget / MIB:g} MiB"
    machine.print_table(title, head, rows)
    rows = [
        [way, *(f"{each[key]:.2f}" for key in ("GB/s written", "GB/s read")), *ratios_of(way, each)]
        for way, each in found["ways"].items()
    ]
    head = ["way", "GB/s written", "GB/s read", "store's of it: written", "read", "both"]
    title = f"payloads of {options.payload / MIB:g} MiB, {THREADS} threads, median of {options.rounds} rounds"
    machine.print_table(title, head, rows)
    print(digest_words(found))


def ratios_of(way: str, each: dict[str, float]) -> list[str]:
    return ["", "", ""] if way == "store" else [f"{each[key]:.2f}" for key in ("written", "read", "both")]


def digest_words(found: dict[str, Any]) -> str:
    """What the digest costs the store's threads, and whether it limits the rate."""
    if found["digest"] is None:
        return "digest: not measured, since there is no C compiler"
    store, copy = found["ways"]["store"], found["ways"][f"copy, {HUGE}"]
    shares = [store[key] / (THREADS * found["digest"]) for key in ("GB/s written", "GB/s read")]
    most = [1 / (1 / copy[key] + 1 / (THREADS * found["digest"])) for key in ("GB/s written", "GB/s read")]
    return (
        f"digest: {found['digest']:.1f} GB/s a thread, {shares[0]:.0%} of the threads' time in writing and "
        f"{shares[1]:.0%} in reading; after the copy in huge pages it would leave {most[0]:.1f} and {most[1]:.1f} GB/s"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of all payloads (default %(default)s)")
    parser.add_argument("--payload-mib", type=float, default=8, help="of one (default %(default)s)")
    parser.add_argument("--budget-mib", type=float, default=128, help="host_budget (default %(default)s)")
    parser.add_argument("--directory", default="/var/tmp", help="of the files (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="of the rates (default %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="timed, of each way (default %(default)s)")
    machine.add_quick(parser)
    options = parser.parse_args(argv)
    options.ceiling = CEILING
    if options.quick:  # so few bytes that a ratio says little
        options.mib, options.payload_mib, options.budget_mib, options.rounds, options.steps = 16, 0.5, 2, 2, 1
        options.ceiling = 100.0
    options.payload, options.budget = int(options.payload_mib * MIB), int(options.budget_mib * MIB)
    if options.payload % (4 * WIDTH) or options.payload % mmap.PAGESIZE or options.payload <= 0:
        parser.error("--payload-mib is a multiple of 4 KiB")
    if not 2 * options.payload <= options.budget <= options.mib * MIB / 2 or min(options.rounds, options.steps) < 1:
        parser.error("--budget-mib holds two payloads and half of all at most; --rounds and --steps are 1 or more")
    return options


def check_room(options: argparse.Namespace) -> None:
    """End with one sentence if the directory does not serve."""
    needed = 4 * options.mib * MIB
    try:
        place_of(gradckpt.Offload("disk", host_budget=options.budget, directory=options.directory))
        free = shutil.disk_usage(options.directory).free
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    guards.check(free >= needed, f"{options.directory} has {free / MIB:,.0f} MiB free; {needed / MIB:,.0f} are needed")


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    check_room(options)
    facts = machine.facts() | {"load": [round(each, 1) for each in os.getloadavg()]}
    machine.print_head("checkpoints on a disk", facts)
    try:
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench_disk.") as directory:
            directory = os.path.realpath(directory)
            steps = training(options, directory)
            found = rates(options, directory)
    except OSError as error:
        sys.exit(f"{options.directory}: {error}")
    show(steps, found, options)
    print(
        f"recipe: python benchmarks/bench_disk.py --mib {options.mib} --payload-mib {options.payload_mib:g} "
        f"--budget-mib {options.budget_mib:g} --rounds {options.rounds} --steps {options.steps}; "
        f"goal {GOAL:g} of a copy; load at the end {os.getloadavg()[0]:.1f}"
    )
    machine.print_json({"benchmark": "bench_disk", **facts, "steps": steps, **found})


if __name__ == "__main__":
    main()
