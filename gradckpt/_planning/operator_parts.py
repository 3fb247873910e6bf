"""Operators that only call others, which then run one by one: :class:`Again`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gradckpt import _C
from gradckpt._engine import torch_private as private

__all__ = ["Again", "composite_key", "has_rules"]

aten = torch.ops.aten

#: Operators that only call others, which then run one by one: what these allocate counts, and a
#: region that keeps discrete results sees theirs. Other composite kernels may read memory.
_PARTS = {
    aten._safe_softmax.default,
    aten.logsumexp.default,
    aten.constant_pad_nd.default,
    aten.repeat.default,
}


class Again:
    """Enter a mode from inside its handler, for the operators that an operator calls.

    The key on which a region catches discrete operators is off within modes.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._key = _C.selective_key() if _C.replays_discrete() else None

    def __enter__(self) -> None:
        private.push_dispatch_mode(self._mode)
        if self._key is not None:
            self._included = private.is_included(self._key)
            self._excluded = private.is_excluded(self._key)
            private.set_excluded(self._key, False)
            private.set_included(self._key, True)

    def __exit__(self, *_: object) -> None:
        if self._key is not None:
            private.set_included(self._key, self._included)
            private.set_excluded(self._key, self._excluded)
        private.pop_dispatch_mode(None)


def has_rules(kind: type[torch.Tensor]) -> bool:
    """Return whether operators on tensors of this class run as the class says, as while something
    is traced.
    """
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


@functools.cache
def composite_key(func: Any) -> Any:
    """Return where the kernel lies that only calls other operators; below autograd, a mode gets the
    operators that autograd would have taken apart.
    """
    if func.namespace == "fsdp":  # its operators call others, with one kernel for all devices or one for each
        on_cpu = private.has_kernel_for_key(func.name(), "CPU")  # torch crashes where the named key has none
        return private.DispatchKey.CPU if on_cpu else private.DispatchKey.CompositeExplicitAutograd
    implicit = private.has_kernel_for_key(func.name(), "CompositeImplicitAutograd")
    if implicit and not private.has_kernel_for_key(func.name(), "CPU"):
        return private.DispatchKey.CompositeImplicitAutograd
    return private.DispatchKey.CompositeExplicitAutograd if func in _PARTS else None
