"""PyTorch's own table of operators with samples of their arguments (OpInfo).

Who reads it does so in a process of its own: torch's test package freezes backend flags, loads a
hypothesis profile and may initialise CUDA when it is imported.
"""

from __future__ import annotations

import itertools
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

SAMPLES = 8
SPREAD = 24
MAX_NUMEL = 100_000  # of the inputs of a sample


class Case(NamedTuple):
    """An operator with one sample of arguments."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def operators() -> list[Any]:
    """torch's table. Its module wants expecttest, for classes that nothing here uses:
    an empty replacement will do."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        replacement: Any = types.ModuleType("expecttest")
        replacement.TestCase = unittest.TestCase
        sys.modules["expecttest"] = replacement
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def cases(op: Any, dtype: torch.dtype, everything: bool) -> Iterator[Case]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)
    chosen = samples if everything else itertools.islice(samples, 0, SPREAD, SPREAD // SAMPLES)
    for sample in chosen:
        args = (sample.input, *sample.args)
        tensors = [t for t in tree_leaves((args, sample.kwargs)) if isinstance(t, torch.Tensor)]
        if sum(t.numel() for t in tensors) <= MAX_NUMEL:
            yield Case(op.formatted_name, op.op, args, sample.kwargs)
