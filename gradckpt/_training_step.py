"""Training steps without an optimizer: of a batch, of its halves, or a function of the user."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradckpt._engine import torch_private as private
from gradckpt._gradient_report import SAMPLES, TOKENS
from gradckpt._trial_process import shown_as_base

T = TypeVar("T")


def run_alone(model: Module, steps: Callable[[], T]) -> T:
    """Return the result of what runs steps :func:`alone`, and changes nothing where it raises.

    If a step fails in a higher order operator, all run again, and Dynamo traces compiled code: in
    eager programs, too, many of these operators have it capture the functions that they are given.
    """
    try:
        with alone(model):
            return steps()
    except Exception as error:
        if higher_order_in(error) is None:
            raise
    with alone(model), torch.compiler.set_stance("default", force_backend="eager"):
        return steps()


def higher_order_in(error: BaseException) -> str | None:
    """Return the name of the higher order operator in which an error was raised; None: in none."""
    trace = error.__traceback__
    code = getattr(getattr(private.HigherOrderOperator, "dispatch", None), "__code__", None)
    while trace is not None:
        package, _, module = trace.tb_frame.f_globals.get("__name__", "").rpartition(".")
        if package == "torch._higher_order_ops":
            return str(module)  # a backward of torch's
        if trace.tb_frame.f_code is code:
            return str(trace.tb_frame.f_locals["self"])
        trace = trace.tb_next
    return None


@contextlib.contextmanager
def alone(model: Module) -> Iterator[None]:
    """Let steps in the block run on this rank alone, with grad and without compiled graphs.

    Gradients of DistributedDataParallel stay on their rank, and its buckets untouched. Compiled
    code runs eagerly: graphs of each setting would count against Dynamo's limit for the training.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_without_optimizers())
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            stack.enter_context(model.no_sync())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@shown_as_base
class StepWrites(ValueError):
    """The step changes parameters, or is about to."""

    def __init__(self) -> None:
        super().__init__("gradckpt: the step changes parameters; leave optimizer.step() out of it")


@contextlib.contextmanager
def refuse_writes(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Refuse steps in the block that have written to parameters or inputs."""
    before = [(x, x._version) for x in leaves if not x.is_inference()]

    def has_written() -> bool:
        return any(x._version != version for x, version in before)

    try:
        yield
    except Exception as error:
        if has_written():  # the message is ours, so a child passes it on, and nothing runs again here
            raise StepWrites from error
        raise
    if has_written():
        raise StepWrites


@contextlib.contextmanager
def _without_optimizers() -> Iterator[None]:
    """Refuse optimizers' and gradient scalers' steps of this thread before they change anything."""
    thread = threading.get_ident()

    def refuse(*_: object) -> None:
        if threading.get_ident() == thread:
            raise StepWrites

    handle = register_optimizer_step_pre_hook(refuse)
    scaler, step = torch.amp.GradScaler, torch.amp.GradScaler.step

    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse()
        return step(self, *args, **kwargs)

    scaler.step = refused  # type: ignore[method-assign]
    try:
        yield
    finally:
        scaler.step = step  # type: ignore[method-assign]
        handle.remove()


def loss_of(result: Any) -> Tensor | None:
    """Return the scalar loss in what a model or a step returns, or None."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif isinstance(result, (tuple, list)):
        result = result[0] if result else None
    elif not isinstance(result, Tensor):
        result = getattr(result, "loss", None)
    return result if isinstance(result, Tensor) and result.numel() == 1 else None


def step_of_batch(model: Module, batch: Any) -> Callable[[], Tensor]:
    """Return a step that runs forward and backward of a batch and returns the loss."""

    def step() -> Tensor:
        if isinstance(batch, Mapping):
            result = model(**batch)
        elif isinstance(batch, (tuple, list)):
            result = model(*batch)
        else:
            result = model(batch)
        loss = loss_of(result)
        if loss is None:
            raise ValueError(
                f"gradckpt: {type(model).__name__} returned {type(result).__name__} without a scalar loss; "
                "put labels into the batch, or pass a function that runs forward and backward"
            )
        del result
        if not loss.requires_grad:
            raise ValueError("gradckpt: the loss does not require grad; compute it without detach() and no_grad()")
        with _without_autocast(loss.device.type):
            loss.backward()
        return loss.detach()

    return step


def _without_autocast(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context for a backward, which training loops run outside of their autocast."""
    if autocast_on(kind) is None:
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def autocast_on(kind: str) -> torch.dtype | None:
    """Return the dtype to which autocast casts on a kind of device, None without autocast."""
    if not torch.amp.is_autocast_available(kind):  # as on meta
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def step_of_function(model: Module, function: Callable[[], Any]) -> Callable[[], Tensor | None]:
    """Return the step that a function of the user is."""

    def step() -> Tensor | None:
        result = function()
        loss = loss_of(result)
        if all(p.grad is None for p in model.parameters()):
            if loss is None or not loss.requires_grad:
                raise ValueError(
                    "gradckpt: the step left no gradients; let it call loss.backward(), or return the loss"
                )
            with _without_autocast(loss.device.type):
                loss.backward()
        if loss is not None:
            return loss.detach()
        return torch.tensor(result) if isinstance(result, (int, float)) else None

    return step


def tensors_of_batch(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, also those in its containers."""
    leaves = private.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return [x for x in leaves if isinstance(x, Tensor)]


def halves_of(batch: Any) -> tuple[str, tuple[Any, Any]] | str:
    """Return what is halved and both halves of a batch, or why that is not possible."""
    tensors = [x for x in tensors_of_batch(batch) if x.dim()]
    for dim, what, found in (
        (0, SAMPLES, tensors),
        (1, TOKENS, [x for x in tensors if x.dim() in (2, 3) and x.size(0) == 1]),
    ):
        common = Counter(x.size(dim) for x in found).most_common(1)
        if common and common[0][0] > 1:
            return what, (_part(batch, dim, common[0][0], False), _part(batch, dim, common[0][0], True))
    return "the batch has one sample and one token"


def _part(batch: Any, dim: int, size: int, second: bool) -> Any:
    def cut(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() <= dim or x.size(dim) != size or (dim == 1 and x.size(0) != 1):
            return x
        return x.narrow(dim, size // 2, size - size // 2) if second else x.narrow(dim, 0, size // 2)

    return private.tree_map(cut, dict(batch) if isinstance(batch, Mapping) else batch)
