"""Time several ways of doing one thing, in turn, so that a busy machine slows each of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[Callable[..., Any], torch.Tensor], torch.Tensor]


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def rounds_of(runs: dict[str, Callable[[], Any]], rounds: int) -> list[dict[str, float]]:
    """Seconds of each, in turn; the first rounds are left out. Garbage is collected between the
    rounds, not in them: what a collection costs depends on what else the process holds."""
    warm, found = 3, []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(rounds + warm):
            found.append({name: seconds(run) for name, run in runs.items()})
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
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
