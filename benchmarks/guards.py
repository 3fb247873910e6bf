"""What a benchmark checks of its own work: a figure that cannot be ends the program, with status 1
and one sentence.

Bytes are compared with arithmetic, without slack. Times are compared with what the same run needed
for the least work that the measured one includes (a copy of its bytes, its matrix products, the
step without checkpointing). Caches and a busy machine change either, hence SLACK; nothing that was
done is faster by more.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

SLACK = 2.0


def check(good: bool, sentence: str) -> None:
    if not good:
        sys.exit(sentence)


def at_least(what: str, found: float, least: float, of: str) -> None:
    """Of bytes, errors: what it must have by arithmetic."""
    check(found >= least, f"{what}: {found:,.6g} is below {least:,.6g}, {of}; the measurement is wrong")


def at_most(what: str, found: float, most: float, of: str) -> None:
    check(found <= most, f"{what}: {found:,.6g} is above {most:,.6g}, {of}; the measurement is wrong")


def takes(what: str, seconds: float, floor: float, of: str) -> None:
    """The least time of some rounds; the floor is the least time of other work, in the same run."""
    check(
        seconds > 0 and SLACK * seconds >= floor,
        f"{what}: {seconds * 1e3:.4g} ms is below 1/{SLACK:g} of {floor * 1e3:.4g} ms, {of}; the measurement is wrong",
    )


def gradients(what: str, error: float, lossy: bool, most: float = 1.0) -> None:
    """The relative error: 0 of what is exact, else between 0 and the most that is believable."""
    check(math.isfinite(error), f"{what}: the gradients are not finite")
    if not lossy:
        check(error == 0, f"{what}: the gradients differ by {error:.2g} from those without checkpointing")
    else:
        check(error > 0, f"{what}: the gradients are exact, so nothing was compressed")
        at_most(f"{what}: error of the gradients", error, most, "the most that its format makes")


# ---- the arithmetic of a step


class Count(TorchDispatchMode):
    """Of what runs inside: the calls of each operator, and the floating-point operations of matrix
    products and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func] += 1
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def counted(run: Callable[[], Any]) -> Count:
    with Count() as found:
        run()
    return found


class Products:
    """The ceiling of a step on this machine: its arithmetic at the rate of one matrix product."""

    def __init__(self, run: Callable[[], Any], device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        """``run``: the step without checkpointing, whose arithmetic every way has. Of bfloat16's
        and float32's product the faster one counts."""
        found = counted(run)
        self.flops, self.calls = found.flops, found.calls
        check(self.flops > 0, "the step has no matrix product, so it did nothing")
        # Short, and by the processor's time: no program that takes the core lowers the ceiling.
        n = 512 if device == "cpu" else 8192
        clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        found = []
        for kind in {dtype, torch.float32}:
            a, b = (torch.randn(n, n, device=device, dtype=kind) for _ in range(2))
            for _ in range(25):
                start = clock()
                (a @ b).view(-1)[0].item()
                found.append(clock() - start)
        self.rate = 2 * n**3 / min(found)

    @property
    def seconds(self) -> float:
        return self.flops / self.rate

    def check(self, what: str, seconds: float) -> None:
        takes(what, seconds, self.seconds, self.words)

    @property
    def words(self) -> str:
        return f"its {self.flops / 1e9:.2f} GFLOP at {self.rate / 1e9:.0f} GFLOP/s of one matrix product"

    def __str__(self) -> str:
        return f"ceiling of every step: {self.seconds * 1e3:.1f} ms, {self.words}"
