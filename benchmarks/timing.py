"""Time several ways of doing one thing, in turn, so that a busy machine slows each of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import guards
import torch

Call = Callable[[Callable[..., Any], torch.Tensor], torch.Tensor]


def clock_of(threads: int) -> Callable[[], float]:
    """With one thread the time of the processor: on an idle machine that of the clock, and other
    jobs change it less."""
    return time.process_time if threads == 1 else time.perf_counter


def seconds(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    run()
    return clock() - start


def rounds_of(runs: dict[str, Callable[[], Any]], rounds: int, floor: str | None = None) -> list[dict[str, float]]:
    """Seconds of each, in turn; the first rounds are left out. Garbage is collected between the
    rounds, not in them: what a collection costs depends on what else the process holds. ``floor``:
    the run whose work each includes."""
    warm, found, clock = 3, [], clock_of(torch.get_num_threads())
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(rounds + warm):
            found.append({name: seconds(run, clock) for name, run in runs.items()})
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    for name in runs if floor else ():
        guards.takes(name, *(min(each[which] for each in found) for which in (name, floor)), f"{floor!r}")
    return found[warm:]


def typical(found: list[dict[str, float]], what: Callable[[dict[str, float]], float]) -> float:
    """Of the lower quartile of each way, since other processes only ever add time."""
    return what({name: sorted(each[name] for each in found)[len(found) // 4] for name in found[0]})


def with_hook(call: Call, again: bool) -> Call:
    """The plain region, with a hook in backward that runs it again, or does nothing."""

    def run(f: Callable[..., Any], h: torch.Tensor) -> torch.Tensor:
        out = call(f, h)

        def hook(grads: Any) -> None:
            with torch.enable_grad():
                if again:
                    call(f, h)

        if out.grad_fn is not None and out is not h:
            out.grad_fn.register_prehook(hook)
        return out

    return run
