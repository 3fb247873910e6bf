"""Budgets as people write them: of bytes, :func:`parse_budget`, and of errors,
:func:`parse_error`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from gradckpt._config import written
from gradckpt._host_memory import free_host_memory, total_host_memory
from gradckpt._sizes import parse_bytes

__all__ = [
    "Budget",
    "device_of",
    "free_memory",
    "other_tensors",
    "parse_budget",
    "parse_error",
    "refuse_compiled",
    "size_budget",
]

_ACTIVATIONS = "activations:"
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_NUMBER = re.compile(r"\d+\.\d*|\.\d+|1")

#: What a budget may be, as messages list it.
_FORMS = '"60GiB", "60GB", "90%", "activations:6GiB" or a number of bytes'


@dataclasses.dataclass(frozen=True)
class Budget:
    """``size``: bytes of tensors on the device in a step: all of them, or with ``step_only`` those
    that the step adds. ``text``: as it was written.
    """

    size: int
    step_only: bool
    text: str


def parse_budget(budget: Any, device: torch.device) -> Budget:
    """Return the budget that a value means on a device, as :func:`size_budget`; ``None``: what is
    free now, and what tensors use. ``"90%"`` on the CPU: of what the control group leaves.
    """
    if budget is None:
        return Budget(free_memory(device) + _allocated(device), False, "what is free now")
    return size_budget(budget, lambda: _total(device))


def size_budget(budget: Any, total: Callable[[], int]) -> Budget:
    """Return the budget that a value means; ``total`` returns the bytes of the device.

    ``"60GiB"``, ``"60GB"`` or a number of bytes: the largest sum of tensor bytes that are allocated
    on the device. ``"activations:6GiB"``: what the step adds. ``"90%"``: of the device's memory.

    Raises:
        ValueError: It is no size, or a fraction.
    """
    given = f"budget={written(budget)}"
    fraction = _fraction(budget)
    if fraction is not None and 0 < fraction <= 1:
        raise ValueError(
            f'gradckpt: {given} is a fraction, and of what is unknown; write "{fraction:.0%}" for a part of '
            "the device's memory, or a size as in 60GiB"
        )
    if isinstance(budget, str):
        text = budget.strip()
        if text.lower().startswith(_ACTIVATIONS):
            return Budget(parse_bytes(text[len(_ACTIVATIONS) :], given, _FORMS), True, text)
        if (percent := _PERCENT.fullmatch(text)) is not None:
            share = float(percent[1])
            if not 0 < share <= 100:
                raise ValueError(f"gradckpt: {given} is no part of a device; write 1% to 100%")
            return Budget(int(total() * share / 100), False, text)
        if not text.isdecimal():
            return Budget(parse_bytes(text, given, _FORMS), False, text)
    size = parse_bytes(budget, given, _FORMS)
    return Budget(size, False, f"{size:,} bytes")


def _fraction(budget: Any) -> float | None:
    """Return the number that a value is or is written as, without a unit; None if it is none."""
    if isinstance(budget, str):
        return float(budget) if _NUMBER.fullmatch(budget.strip()) else None
    return budget if isinstance(budget, (int, float)) and not isinstance(budget, bool) else None


def parse_error(error: float | str) -> float:
    """Return the relative error that ``"1%"`` or 0.01 means.

    Raises:
        ValueError: It is neither, or not between 0 and 1.
    """
    parsed: float | None = None
    if isinstance(error, str) and (match := _PERCENT.fullmatch(error.strip())) is not None:
        parsed = float(match[1]) / 100
    elif isinstance(error, (int, float)) and not isinstance(error, bool):
        parsed = float(error)
    if parsed is None or not 0 < parsed < 1:
        raise ValueError(f'gradckpt: error={error!r} is no relative error; write "1%" or 0.01')
    return parsed


def refuse_compiled(model: Module) -> None:
    """Refuse what ``torch.compile`` has returned, or a call that it traces.

    Raises:
        ValueError: It is one.
    """
    if torch.compiler.is_compiling() or _is_compiled(model):
        raise ValueError(
            "gradckpt: a budget cannot be planned in torch.compile; call gradckpt.plan(model, batch, budget=...), "
            "plan.apply(model), and compile then"
        )


def _is_compiled(model: Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def device_of(model: Module) -> torch.device:
    """Return the device of a model's parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def free_memory(device: torch.device) -> int:
    """Return the bytes that new tensors can have on a device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return free_host_memory()


def _total(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return total_host_memory()


def _allocated(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return sum(_storages().values())


def _storages() -> dict[int, int]:
    """Return the bytes of all storages in host memory that Python knows, by their addresses."""
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu" and not each.is_sparse:
            with contextlib.suppress(Exception):  # a tensor without a storage
                storage = each.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def other_tensors(device: torch.device, known: int) -> int:
    """Return the bytes of tensors on the device beside ``known`` ones: of a second model, say.

    Tensors that nothing uses any more do not count.
    """
    gc.collect()
    return max(_allocated(device) - known, 0)
