"""What a random program can do to its registers: 3x3 floats in, 3x3 floats out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch.autograd.function import once_differentiable


def _halves(a: torch.Tensor) -> torch.Tensor:
    top, rest = a[:1], a[1:]
    return torch.cat([top.sin(), rest * rest])


OPERATORS: dict[str, Any] = {
    "sin": lambda a, b: a.sin(),
    "tanh": lambda a, b: a.tanh(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "gelu": lambda a, b: F.gelu(a),
    "relu": lambda a, b: a.relu(),
    "softmax": lambda a, b: a.softmax(-1),
    "norm": lambda a, b: F.layer_norm(a, (3,)),
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "scale": lambda a, b: a * 0.5,
    "neg": lambda a, b: -a,
    "mm": lambda a, b: a.float() @ b.float(),
    "linear": lambda a, b: F.linear(a.float(), b.float()).tanh(),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "max": lambda a, b: a.max(dim=1, keepdim=True).values.expand(3, 3),
    "cumsum": lambda a, b: a.cumsum(0) * 0.3,
    "index": lambda a, b: a[torch.tensor([0, 2, 2])],
    "empty": lambda a, b: torch.cat([a[:0].sin(), a]),
    "item": lambda a, b: b * a.detach().float().mean().item(),
    # views
    "transpose": lambda a, b: a.t(),
    "flat": lambda a, b: a.reshape(-1).view(3, 3),
    "expand": lambda a, b: a[:1].expand(3, 3),
    "halves": lambda a, b: _halves(a),
    "unbind": lambda a, b: torch.stack(a.unbind(1)),
    "chunk": lambda a, b: torch.cat([c.tanh() for c in a.t().chunk(2)]),
    "alias": lambda a, b: a.view_as(a),
    # dtypes
    "double": lambda a, b: a.double().sin(),
    "bf16": lambda a, b: a.bfloat16().tanh(),
    "float": lambda a, b: a.float(),
    # random
    "dropout": lambda a, b: F.dropout(a, 0.4),
    "rand": lambda a, b: a * torch.rand(3, 3),
    "randn": lambda a, b: (a + torch.randn(3, 3)).sin(),
    "bernoulli": lambda a, b: a * torch.bernoulli(torch.full((3, 3), 0.5)),
    # graph
    "detach": lambda a, b: a.detach(),
    "clone": lambda a, b: a.clone(),
    "new leaf": lambda a, b: a.detach().clone().requires_grad_(),
}
VIEWS = {"transpose", "flat", "expand", "halves", "unbind", "chunk", "alias"}
RANDOM = {"dropout", "rand", "randn", "bernoulli"}
SAVES_NOTHING = {"add", "scale", "neg", "transpose", "flat", "expand", "alias", "unbind", "clone"}


def _fill_row(a: torch.Tensor, b: torch.Tensor) -> None:
    a[1] = 0.25


IN_PLACE: dict[str, Any] = {
    "add_": lambda a, b: a.add_(0.5),
    "mul_": lambda a, b: a.mul_(b),
    "sin_": lambda a, b: a.sin_(),
    "tanh_": lambda a, b: a.tanh_(),
    "relu_": lambda a, b: a.relu_(),
    "copy_": lambda a, b: a.copy_(b),
    "row": _fill_row,
    "on a view": lambda a, b: a.t().mul_(0.5),
    "dropout_": lambda a, b: F.dropout(a, 0.3, inplace=True),
    "data": lambda a, b: a.data.mul_(0.5),
}


# ---- autograd Functions ----


class _SavesInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        a, b = ctx.saved_tensors
        return (grad * b).to(a.dtype), (grad * a).to(b.dtype)


class _SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        result = a.sigmoid()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (result,) = ctx.saved_tensors
        return grad * result * (1 - result), None


class _SavesNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        return a * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2, None


class _TwoOutputs(torch.autograd.Function):
    """Saves an input, None, an output, and a number beside them."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        first, second = a.sin(), a + b
        ctx.save_for_backward(a, None, second)
        ctx.factor = 3
        return first, second

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        a, nothing, out = ctx.saved_tensors
        assert nothing is None
        return first * a.cos() + second + out.detach() * 0, second * ctx.factor


class _ChangesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.mark_dirty(a)
        ctx.save_for_backward(b)
        return a.mul_(b.detach())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (b,) = ctx.saved_tensors
        return grad * b, None


class _KeepsOnContext(torch.autograd.Function):
    """A tensor that no hook sees, and an output without gradient."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.kept = a.detach().cos()
        mask = (a > 0).to(a.dtype)
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return a.sin(), mask

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return grad * ctx.kept * mask, None


class _ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a)
        return a.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (a,) = ctx.saved_tensors
        (again,) = ctx.saved_tensors
        return grad * (1 - a.tanh() * again.tanh()), None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a)
        return a.exp().clamp(max=9)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        (a,) = ctx.saved_tensors
        return grad * a.exp(), None


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a)
        return a * 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        _ = ctx.saved_tensors
        raise ValueError("no gradient today")


CUSTOM: dict[str, Any] = {
    "saves inputs": _SavesInputs,
    "saves output": _SavesOutput,
    "saves nothing": _SavesNothing,
    "two outputs": _TwoOutputs,
    "changes input": _ChangesInput,
    "keeps on context": _KeepsOnContext,
    "reads twice": _ReadsTwice,
    "once differentiable": _Once,
    "fails in backward": _FailsInBackward,
}


# ---- How a random program goes on after its forward, and the contexts it can ask for.

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
