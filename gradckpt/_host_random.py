"""Generators of random numbers on the host: :func:`host_random`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch


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
