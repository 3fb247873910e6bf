"""What a trial step changes besides its result, so that it can be taken back:
:class:`TrainingState`.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import types
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch.nn import Module

from gradckpt._compression import get_rounding_state, set_rounding_state
from gradckpt._reachable import Reachable

_CACHE: Any = type(functools.lru_cache(lambda: None))

#: Containers in containers that are looked through.
_DEPTH = 10


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


# ---- random numbers on the host ----


def host_random() -> Callable[[], None]:
    """Return a function that puts the default generators of torch's CPU, of Python and, if it is
    imported, of numpy back to where they are now.
    """
    cpu, python = torch.get_rng_state(), random.getstate()
    numpy: Any = sys.modules.get("numpy.random")
    state = numpy.get_state(legacy=False) if numpy is not None else None

    def put_back() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(state)

    return put_back


# ---- who holds an object, in words ----


def holder_of(x: Any, known: Container[int]) -> str | None:
    """Return what a message calls the place where an object is, None if nothing but frames of
    functions leads there.

    ``known``: the ids of objects that are there for longer than such frames, as globals and classes
    are.
    """
    names: dict[int, str | None] = {id(x): None}
    level = [x]
    for _ in range(_DEPTH):
        above: list[Any] = []
        for each in level:
            for holder in gc.get_referrers(each):
                if id(holder) in names or _is_passing(holder) or holder is level or holder is above:
                    continue
                names[id(holder)] = name = names[id(each)] or _named(each, holder)
                if name is not None and (id(holder) in known or _is_lasting(holder)):
                    return name
                above.append(holder)
        level = above
    return None


def _is_lasting(holder: Any) -> bool:
    return isinstance(holder, (_CACHE, type)) or (isinstance(holder, dict) and "__builtins__" in holder)


def _is_passing(holder: Any) -> bool:
    """Return whether it holds an object only while a function runs, as this search itself."""
    return isinstance(holder, types.FrameType) or type(holder).__module__.startswith("gradckpt")


def _named(x: Any, holder: Any) -> str | None:
    if isinstance(holder, _CACHE):
        return f"the cache of {holder.__wrapped__.__qualname__}()"
    if isinstance(holder, dict):
        key = _key_of(x, holder)
        if "__name__" in holder and "__builtins__" in holder:
            return f"{holder['__name__']}.{key}"
        owner = next((each for each in gc.get_referrers(holder) if getattr(each, "__dict__", None) is holder), None)
        return None if owner is None else f"{type(owner).__qualname__}.{key}"
    if isinstance(holder, type):
        return f"{holder.__qualname__}.{_key_of(x, vars(holder))}"
    if key := _key_of(x, getattr(holder, "__dict__", {})):
        return f"{type(holder).__qualname__}.{key}"
    return None


def _key_of(x: Any, place: Mapping[Any, Any]) -> str | None:
    return next((str(key) for key, value in place.items() if value is x), None)
