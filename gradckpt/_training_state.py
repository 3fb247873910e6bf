"""What a training step changes besides its result, so that it can be taken back:
:class:`TrainingState`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from gradckpt._config import get_rounding_state, set_rounding_state
from gradckpt._host_random import host_random
from gradckpt._models.switch import snapshot

__all__ = ["TrainingState"]


class TrainingState:
    """The state of a model and of generators, except the values of parameters.

    ``inputs``: other tensors, of which those that require grad may get gradients. Buffers are
    copied to host memory. Gradients are kept as they are; only those that lie in others' memory, as
    in buckets of DistributedDataParallel, are copied.
    """

    def __init__(self, model: Module, inputs: Iterable[Tensor] = ()) -> None:
        self._put_back = snapshot(model)
        trained = [x for x in inputs if x.requires_grad]
        self._leaves = [(x, x.grad, x.requires_grad, x._version) for x in (*model.parameters(), *trained) if x.is_leaf]
        self._shared = [(x.grad, x.grad.clone()) for x, *_ in self._leaves if x.grad is not None and x.grad._is_view()]
        self._places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        self._buffers = [
            (buffer, buffer._version, buffer.detach().to("cpu", copy=True))
            for buffer in model.buffers()
            if buffer.device.type != "meta"
        ]
        self._rounding = get_rounding_state()
        self._rewind_host = host_random()
        used = {x.device for x in (*model.parameters(), *model.buffers()) if x.device.type not in ("cpu", "meta")}
        self._devices = [(device, _generators(device).get_rng_state(device)) for device in used]

    def rewind(self) -> None:
        """Restore all but the gradients, which become None."""
        self._put_back()
        for leaf, _, requires_grad, _ in self._leaves:
            leaf.grad = None
            leaf.requires_grad_(requires_grad)
        for place, content in self._places:
            place.clear()
            place.update(content)
        with torch.no_grad():
            for buffer, version, value in self._buffers:
                if buffer._version != version or not torch.equal(buffer.cpu(), value):
                    buffer.copy_(value)
        set_rounding_state(self._rounding)
        self._rewind_host()
        for device, state in self._devices:
            _generators(device).set_rng_state(state, device)

    def restore(self) -> None:
        """Restore all, the gradients too."""
        self.rewind()
        for leaf, gradient, _, _ in self._leaves:
            leaf.grad = gradient
        for gradient, value in self._shared:
            gradient.copy_(value)

    def leaves_changed(self) -> bool:
        """Return whether something has written to a parameter or an input."""
        return any(leaf._version != version for leaf, _, _, version in self._leaves)


def _generators(device: torch.device) -> Any:
    return torch.get_device_module(device.type)
