"""How a random program goes on after its forward, and the contexts it can ask for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint as torch_checkpoint

if TYPE_CHECKING:
    from random_program_runs import Run


class ProgramError(Exception):
    """An exception of a program that is not caught below it."""


def fingerprint(value: Any) -> Any:
    """Everything about a tensor that a program could depend on; to the last bit."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    try:
        node = (value.is_leaf, type(value.grad_fn).__name__)
    except RuntimeError as error:  # a view of a result of a Function whose base was changed in place
        node = (None, str(error))
    about = (tuple(value.shape), value.dtype, value.stride(), value.requires_grad, *node)
    return (*about, bytes(value.detach().contiguous().view(-1).view(torch.uint8).numpy()))


@torch.enable_grad()
def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(t.float() * t.float()).sum() for t in tensors]).sum()


CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "device": lambda: torch.device("cpu"),
    "early stop off": lambda: torch_checkpoint.set_checkpoint_early_stop(False),
    "early stop on": lambda: torch_checkpoint.set_checkpoint_early_stop(True),
    "group": torch_checkpoint.GraphExecGroup,
    "catch": lambda: contextlib.suppress(ProgramError),
    "catch all": lambda: contextlib.suppress(Exception),  # what stops a recompute too: torch then objects
    "logged": contextlib.nullcontext,
    "one shot": contextlib.nullcontext,
}


# ---- between forward and backward, and the ways to run backward ----


def _mutate(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(0.5)


BETWEEN: dict[str, Callable[[Run, list[torch.Tensor]], Any]] = {
    "draw": lambda run, outputs: torch.rand(7),
    "seed": lambda run, outputs: torch.manual_seed(99),
    "change an input": lambda run, outputs: _mutate(run.x),
    "change a parameter": lambda run, outputs: _mutate(run.w),
    "change data": lambda run, outputs: run.x.data.add_(0.5),
    "change an output": lambda run, outputs: outputs[-1].mul_(2),
    "detach an output": lambda run, outputs: outputs[0].detach_(),
}


def _twice(run: Run, outputs: list[torch.Tensor]) -> None:
    run.backward("first backward", outputs, retain_graph=True)
    torch.rand(2)
    run.backward("second backward", outputs)
    run.backward("third backward", outputs)


def _pieces(run: Run, outputs: list[torch.Tensor]) -> None:
    while outputs:
        run.backward(f"backward of {len(outputs)}", [outputs.pop()], retain_graph=len(outputs) > 0)


def _partial(run: Run, outputs: list[torch.Tensor]) -> None:
    keep = [outputs[-1]]
    del outputs[:]
    run.backward("backward of a part", keep)


def _grad(run: Run, outputs: list[torch.Tensor]) -> None:
    grads = run.attempt("grad", lambda: torch.autograd.grad(total(outputs), run.leaves, allow_unused=True))
    run.note("grad", [fingerprint(g) for g in grads or ()])


def _double(run: Run, outputs: list[torch.Tensor]) -> None:
    def second() -> None:
        grads = torch.autograd.grad(total(outputs), run.leaves, allow_unused=True, create_graph=True)
        run.note("first grads", [fingerprint(g) for g in grads])
        total([g for g in grads if g is not None] + outputs).backward()

    run.attempt("double", second)


def _group(run: Run, outputs: list[torch.Tensor]) -> None:
    """Not on after an exception: torch's counter then stays where the recompute broke off, and the
    next backward of the group takes values of the wrong slots for gradients (2.13). Ours starts
    again."""
    with torch_checkpoint.GraphExecGroup():
        while outputs and run.backward(f"backward of {len(outputs)}", [outputs.pop()], retain_graph=True):
            pass


def _hooked(run: Run, outputs: list[torch.Tensor]) -> None:
    """A backward inside a backward over the same regions; not from a recompute:
    it could reach the node that waits."""
    last = outputs[-1]

    def hook(grad: torch.Tensor) -> None:
        if run.inside:
            return
        inner = torch.autograd.grad(last.float().sum(), run.x, retain_graph=True, allow_unused=True)
        run.note("inner grad", fingerprint(inner[0]))

    # Read first: torch 2.13 crashes in register_hook of a view of a
    # leaf that was changed under no_grad since.
    _ = outputs[0].grad_fn
    handle = outputs[0].register_hook(hook)
    run.backward("outer backward", outputs, retain_graph=True)
    handle.remove()


def _saved(run: Run, outputs: list[torch.Tensor]) -> None:
    """Saved tensors read outside backward, twice; then backward."""

    def read() -> None:
        node = outputs[-1].grad_fn
        for name in [n for n in dir(node) if n.startswith("_saved_")] * 2:
            run.note(name, fingerprint(getattr(node, name)))

    run.attempt("read", read)
    run.backward("backward", outputs)


def _thread(run: Run, outputs: list[torch.Tensor]) -> None:
    other = threading.Thread(target=run.backward, args=("backward on a thread", outputs))
    other.start()
    other.join()


ENDINGS: dict[str, Callable[[Run, list[torch.Tensor]], Any]] = {
    "backward": lambda run, outputs: run.backward("backward", outputs),
    "drop nothing": lambda run, outputs: run.backward("backward", outputs),
    "inputs": lambda run, outputs: run.backward("backward", outputs, inputs=[run.x, run.w]),
    "twice": _twice,
    "pieces": _pieces,
    "partial": _partial,
    "grad": _grad,
    "double": _double,
    "group": _group,
    "hooked": _hooked,
    "saved": _saved,
    "thread": _thread,
    "never": lambda run, outputs: outputs.clear(),
}
