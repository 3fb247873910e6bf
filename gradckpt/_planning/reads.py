"""Methods that read a tensor's memory without an operator: :func:`refuse_reads`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradckpt._planning.paper import PaperMode
from gradckpt._planning.values import NotOnPaper

__all__ = ["refuse_reads"]

_READING = ("numpy", "tolist", "__dlpack__")  # numpy.asarray(x) calls the first


@contextlib.contextmanager
def refuse_reads(mode: PaperMode) -> Iterator[None]:
    """Raise :class:`NotOnPaper` where such a method is called on a tensor without values."""
    own = {name: vars(torch.Tensor)[name] for name in _READING if name in vars(torch.Tensor)}
    for name in _READING:
        setattr(torch.Tensor, name, _refusing(mode, name))
    try:
        yield
    finally:
        for name in _READING:
            if name in own:
                setattr(torch.Tensor, name, own[name])
            else:
                delattr(torch.Tensor, name)  # TensorBase has torch's own


def _refusing(mode: PaperMode, name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.layout is torch.strided and self.device.type == "cpu" and not mode.has_values(self):
            reason = f"Tensor.{name}() reads values"
            raise NotOnPaper(reason)
        return method(self, *args, **kwargs)

    return read
