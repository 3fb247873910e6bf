"""The state of all generators that a call may draw from, for calls that do not run again."""

from __future__ import annotations

from typing import Any

import torch

from gradckpt import _C


def _device_generators() -> tuple[Any, ...]:
    """Return the generators of the devices in use; none while a graph is captured, which advances
    its generators when it is replayed.
    """
    accelerator = torch.accelerator.current_accelerator()
    module = getattr(torch, accelerator.type, None) if accelerator is not None else None
    if module is None or not getattr(module, "_initialized", False):
        return ()
    capturing = getattr(module, "is_current_stream_capturing", None)
    return () if capturing is not None and capturing() else tuple(getattr(module, "default_generators", ()))


def snapshot() -> tuple[torch.Tensor, list[tuple[torch.Generator, torch.Tensor]]]:
    """Return the state of each default generator."""
    return _C.cpu_rng_state(), [(g, g.get_state()) for g in _device_generators()]


def restore(states: tuple[torch.Tensor, list[tuple[torch.Generator, torch.Tensor]]]) -> None:
    cpu, devices = states
    _C.set_cpu_rng_state(cpu)
    for generator, state in devices:
        generator.set_state(state)
