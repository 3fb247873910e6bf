"""What lowers a part of a peak, in words: :data:`IN_PYTHON`, :func:`as_flags`, :func:`advice`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gradckpt._planning.step_trace import GRADIENTS, KEPT, KINDS, LOSS, WORKING, Peak
from gradckpt._stats import format_bytes

__all__ = [
    "IN_PYTHON",
    "LESS",
    "TILES",
    "Hints",
    "advice",
    "as_flags",
    "is_smallest",
    "with_a_smaller_budget",
    "with_tiles",
]

#: Part of a peak -> what lowers it.
Hints = Mapping[str, tuple[str, ...]]

#: Of the bytes of a step: how much less another way must need to be shown or named.
LESS = 0.01

#: So many tiles are tried, and what is said if they help: in Python, and of the command.
TILES = 16
_IN_TILES = f"let MLPs run in tiles (tiles={TILES})", f"let MLPs run in tiles (--tiles {TILES})"

#: For ``gradckpt.plan``.
IN_PYTHON: Hints = {
    "loss": ("compute the loss in chunks, or smaller ones, as TRL, Liger or torch's linear_cross_entropy do",),
    "kept": ("train on a smaller batch",),
    "working": ("checkpoint smaller modules (modules=)", "train on a smaller batch"),
    "trained": ("train adapters alone", "shard the model"),
    "weights": ("freeze the weights in 4 bits and train adapters", "shard the model"),
    "other": ("they are of this process: pass optimizer= if they are its states, delete other models",),
}

#: Part -> flags of the command, each with what it does.
_FLAGS = {
    "loss": {"--loss": "compute it in chunks (--loss trl, liger or torch)"},
    "kept": {},
    "working": {},
    "trained": {
        "--lora": "train adapters (--lora r=16)",
        "--shard": "shard (--gpus 8 --shard fsdp)",
        "--optimizer": "take an optimizer with smaller states (--optimizer adamw-8bit)",
    },
    "weights": {
        "--weights": "freeze the weights in 4 bits (--lora r=16 --weights nf4)",
        "--shard": "shard (--gpus 8 --shard fsdp)",
    },
}


def as_flags(given: Collection[str], takes: str) -> Hints:
    """Return the hints of the command, without the flags that it was given."""
    less = "train on fewer tokens" if takes == "tokens" else "train on a smaller batch"
    return {
        part: tuple(hint for flag, hint in flags.items() if flag not in given) or (less,)
        for part, flags in _FLAGS.items()
    }


def is_smallest(least: int, size: int) -> bool:
    """Return whether a step of so many bytes is about the least one."""
    return least >= (1 - LESS) * size


def with_a_smaller_budget(hints: Hints) -> Hints:
    """Return the hints of a plan that is not the smallest."""
    return _where_layers_bind(hints, "a smaller budget has a plan, which takes longer")


def with_tiles(hints: Hints) -> Hints:
    """Return the hints where tiles help."""
    return _where_layers_bind(hints, _IN_TILES[hints is not IN_PYTHON])


def _where_layers_bind(hints: Hints, hint: str) -> Hints:
    """Return the hints with this one where what layers keep, or their working set, binds."""
    return {**hints, "kept": (hint,), "working": (hint,)}


def advice(peak: Peak, fixed: Mapping[str, int], hints: Hints, fixed_alone: bool = False) -> str:
    """Say what the largest part of a peak is, and what would lower it.

    ``fixed``: bytes that are there during the whole step; ``fixed_alone``: they alone count.
    """
    parts = fixed if fixed_alone else {**fixed, **peak.parts}
    name, size = max(parts.items(), key=lambda part: part[1])
    where = f"{peak.position.capitalize()} binds" if name in peak.parts else "What binds is there all the time"
    is_loss = peak.position == "loss" and name in (KINDS[LOSS], KINDS[WORKING])
    causes = {
        KINDS[KEPT]: "kept",
        KINDS[LOSS]: "loss",
        KINDS[WORKING]: "working",
        KINDS[GRADIENTS]: "trained",
        "other tensors": "other",
    }
    cause = "loss" if is_loss else "trained" if "states" in name else causes.get(name, "weights")
    hint = ", or ".join(hints[cause])
    return f"{where}: {name}, {format_bytes(size)}; {hint}."
