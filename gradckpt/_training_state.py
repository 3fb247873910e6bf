"""What a trial step changes besides its result, so that it can be taken back:
:class:`TrainingState`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch.nn import Module

from gradckpt._config import get_rounding_state, set_rounding_state
from gradckpt._holders import holder_of
from gradckpt._host_random import host_random
from gradckpt._reachable import Reachable


class TrainingState:
    """What a model and others (a batch, a step's function) lead to, generators, and gradients.

    ``values``: also what buffers and other tensors hold, except parameters. Gradients are kept as
    they are; only those that a step adds to in place, or that lie in others' memory, as in buckets
    of DistributedDataParallel, are copied.
    """

    def __init__(self, model: Module, *others: Any, values: bool = True) -> None:
        self._reachable = Reachable(model, *others, values=values)
        leaves = {id(x): x for x in (*model.parameters(), *self._reachable.leaves) if x.is_leaf}
        self._leaves = [(x, x.grad, x.requires_grad) for x in leaves.values()]
        self._shared = [(x.grad, x.grad.clone()) for x, *_ in self._leaves if x.grad is not None and x.grad._is_view()]
        self._rounding = get_rounding_state()
        self._rewind_host = host_random()
        used = {x.device for x in (*model.parameters(), *model.buffers()) if x.device.type not in ("cpu", "meta")}
        self._devices = [(device, _generators(device).get_rng_state(device)) for device in used]

    @property
    def known(self) -> Container[int]:
        """The ids of objects that were there before."""
        return self._reachable.known

    def rewind(self) -> None:
        """Restore all but the gradients, which become None."""
        self._put_back()
        for leaf, _, _ in self._leaves:
            leaf.grad = None

    def _put_back(self) -> None:
        self._reachable.put_back()
        for leaf, _, requires_grad in self._leaves:
            if leaf.requires_grad != requires_grad:
                leaf.requires_grad_(requires_grad)
        set_rounding_state(self._rounding)
        self._rewind_host()
        for device, state in self._devices:
            _generators(device).set_rng_state(state, device)

    def restore(self, *, failed: bool = False) -> None:
        """Restore all, the gradients too; ``failed``: an error of the step is about to be raised.

        Raises:
            RuntimeError: Something has changed that cannot be put back.
        """
        self._put_back()
        for leaf, gradient, _ in self._leaves:
            if leaf.grad is not gradient:
                leaf.grad = gradient
        for gradient, value in self._shared:
            gradient.copy_(value)
        if (changed := self._reachable.changed()) is not None:
            holder = holder_of(changed, self.known) or f"a {type(changed).__name__}"
            raise RuntimeError(
                f"gradckpt: a trial step has changed {holder}, which cannot be put back; make the model anew after this"
            )


def _generators(device: torch.device) -> Any:
    return torch.get_device_module(device.type)
