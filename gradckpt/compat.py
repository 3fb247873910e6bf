"""torch's exact functions, for putting in torch's place: its defaults, warnings and errors, no guard of ours.

``torch.utils.checkpoint.checkpoint = gradckpt.compat.checkpoint`` changes nothing but host time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradckpt._C import compat_checkpoint as checkpoint
from gradckpt.selective import create_selective_checkpoint_contexts
from gradckpt.sequential import torch_checkpoint_sequential as checkpoint_sequential

if TYPE_CHECKING:
    from gradckpt.integrations.wrapper import apply_activation_checkpointing, checkpoint_wrapper

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
        """Load the names that need torch.distributed when they are first asked for."""
        if name not in ("apply_activation_checkpointing", "checkpoint_wrapper"):
            raise AttributeError(f"module 'gradckpt.compat' has no attribute {name!r}")
        from gradckpt.integrations import wrapper

        return getattr(wrapper, name)


@dataclass(frozen=True)
class Difference:
    """Where ``gradckpt.checkpoint`` means to differ from torch's."""

    name: str
    torch: str
    ours: str
    why: str


#: All of them. The tests read this list; docs/equivalence.md says more.
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
)
