"""torch's exact functions, as drop-in replacements: torch's defaults, warnings and errors, and no
checks of ours.

``torch.utils.checkpoint.checkpoint = gradckpt.compat.checkpoint`` changes nothing but host time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradckpt._C import compat_checkpoint as checkpoint
from gradckpt._engine.selective import create_selective_checkpoint_contexts
from gradckpt._engine.sequential import Segment
from gradckpt._engine.torch_errors import for_sequential, warn_torchs

if TYPE_CHECKING:
    from gradckpt.integrations.torch_distributed import apply_activation_checkpointing, checkpoint_wrapper

__all__ = [
    "DIFFERENCES",
    "Difference",
    "apply_activation_checkpointing",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "create_selective_checkpoint_contexts",
]

if not TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name: str) -> Any:
        """Load the names that need torch.distributed at their first use."""
        if name not in ("apply_activation_checkpointing", "checkpoint_wrapper"):
            raise AttributeError(f"module 'gradckpt.compat' has no attribute {name!r}")
        from gradckpt.integrations import torch_distributed

        return getattr(torch_distributed, name)


def checkpoint_sequential(functions: Any, segments: Any, input: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
    """Run torch's ``checkpoint_sequential`` exactly, over this module's checkpoint."""
    if use_reentrant is None:
        warn_torchs("sequential_not_explicit")
        use_reentrant = True
    preserve = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise for_sequential(kwargs)
    if isinstance(functions, torch.nn.Sequential):
        functions = list(functions.children())  # torch, too, calls a module that occurs twice in it only once
    size = len(functions) // segments
    end = 0
    for start in range(0, size * (segments - 1), size):
        end = start + size
        segment = Segment(functions[i] for i in range(start, end))
        input = checkpoint(segment, input, use_reentrant=use_reentrant, preserve_rng_state=preserve)
    return Segment(functions[i] for i in range(end, len(functions)))(input)


@dataclass(frozen=True)
class Difference:
    """One intended difference between ``gradckpt.checkpoint`` and torch's."""

    name: str
    torch: str
    ours: str
    why: str


#: All of them. The tests read this list; docs/equivalence.md explains it.
DIFFERENCES = (
    Difference(
        "use_reentrant",
        "None: a warning, then the reentrant form",
        "False",
        "the form torch recommends; None and True mean what they mean in torch",
    ),
    Difference(
        "buffers",
        "running statistics are updated by the forward and again by the recompute",
        "of the module that the function is or belongs to, updated once a step",
        "BatchNorm must not see every batch twice",
    ),
    Difference(
        "device RNG",
        "states of one device type, of tensors among the positional arguments",
        "states of every device in use, also found in keyword arguments; likewise autocast of every device type "
        "(compat replays that, too)",
        "dropout on a second kind of device must repeat itself",
    ),
    Difference(
        "kept draws",
        "an operator whose output a policy keeps draws nothing in the recompute, so that later draws differ",
        "the generator is left where the operator left it",
        "every mask of the recompute must be the forward's",
    ),
    Difference(
        "compared saves",
        "saved tensors of the two runs are compared by shape, dtype and device",
        "also by strides, and by argument, parameter or operator where both runs know it (compat compares these, too)",
        "two tensors of one shape that changed places give wrong gradients",
    ),
    Difference(
        "kept calls",
        "a recompute takes what is kept of an operator by the number of its call",
        "by operator, operands and place; other calls run, and what cannot be told raises",
        "a call that only one of the two runs makes must not shift the results of the others",
    ),
)
