"""``deepspeed.checkpointing`` with compressed checkpoints, name for name.

    from gradckpt.integrations import deepspeed as checkpointing

in the place of ``from deepspeed import checkpointing`` is all that code for it needs. :func:`checkpoint` has the
signature and the results of DeepSpeed's, and gradckpt's engine. It is never reentrant: its inputs need not require
grad, ``torch.autograd.grad`` works, and buffers are updated once.

The tracker of random states is DeepSpeed's own, and what :func:`checkpoint` recomputes finds it as the forward did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing as theirs
from deepspeed.runtime.activation_checkpointing.checkpointing import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
)
from deepspeed.runtime.config import DeepSpeedConfig

import gradckpt
from gradckpt.apply import parse_options
from gradckpt.arguments import own_keywords
from gradckpt.integrations.kwargs import check_bool
from gradckpt.integrations.offload import offloaded

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

#: The block of DeepSpeed's configuration, and the argument of configure() that each of its keys is.
_BLOCK = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
    "compress": "compress",
    "policy": "policy",
}

#: What gradckpt has not, and the way out.
_REFUSED = {
    "partition_activations": "every rank keeps its checkpoints whole, compressed; leave it out",
    "contiguous_checkpointing": "payloads are allocated one by one, at a fraction of the size; leave it out",
    "synchronize": "it slows every region down; use torch.profiler to see where time goes",
    "profile": "use torch.profiler; gradckpt.stats() counts regions and bytes",
}


@dataclasses.dataclass(frozen=True)
class _Settings:
    options: Mapping[str, Any]  # keywords of gradckpt.checkpoint
    offload: bool = False
    configured: bool = False


_settings = _Settings(parse_options({"compress": "int8"}, {}))


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``function(*args, **kwargs)`` and recomputes it in the backward, as :func:`configure` said: with int8
    where nobody did.

    Returns:
        What ``function`` returned; as with DeepSpeed, of a list a tuple, and of one thing in either that thing.
    """
    settings = _settings
    states = get_cuda_rng_tracker().get_states()
    function = own_keywords(function, kwargs)
    if states:
        function = _Tracked(function, states)
    run = offloaded if settings.offload else gradckpt.checkpoint
    found = run(function, *args, **settings.options, **kwargs)
    if isinstance(found, (tuple, list)):
        return found[0] if len(found) == 1 else tuple(found)
    return found


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """:func:`checkpoint`, which is not reentrant either."""
    return checkpoint(function, *args)


class _Tracked:
    """A region's function when DeepSpeed's tracker has states: its recompute begins with those of its forward, and
    leaves the tracker as it found it."""

    __slots__ = ("function", "ran", "states")

    def __init__(self, function: Callable[..., Any], states: dict[str, Any]) -> None:
        self.function = function
        self.states = states
        self.ran = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not self.ran:
            self.ran = True
            return self.function(*args, **kwargs)
        tracker = get_cuda_rng_tracker()
        now = tracker.get_states()
        tracker.set_states(dict(self.states))  # forks write to it, and there may be another recompute
        try:
            return self.function(*args, **kwargs)
        finally:
            tracker.set_states(now)

    @property
    def __gradckpt_functions__(self) -> tuple[Any, ...]:
        """For gradckpt.buffers."""
        return (self.function,)


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
    **options: Any,
) -> None:
    """What :func:`checkpoint` does from now on, in DeepSpeed's words and a few more.

    Args:
        mpu_: For :func:`model_parallel_cuda_manual_seed`, as in DeepSpeed; or None.
        deepspeed_config: DeepSpeed's configuration: a path, a dict. Of its block ``activation_checkpointing`` the
            keys below are read, and ``compress`` and ``policy``, which DeepSpeed passes over. Arguments win over it.
        checkpoint_in_cpu: Keep the compressed inputs in host memory (``cpu_checkpointing`` in the block).
        partition_activations, contiguous_checkpointing, synchronize, profile: An error when true.
        num_checkpoints: As in DeepSpeed it says something to contiguous checkpointing only.
        **options: ``compress`` (int8 without it), ``policy`` or ``context_fn``, ``preserve_rng_state``, ``early_stop``,
            ``determinism_check``, ``debug`` and ``buffers``, as for :func:`gradckpt.checkpoint`.

    Raises:
        ValueError: what gradckpt cannot do, with the way out; an unknown codec, policy or option.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    asked = {key: value for key, value in given.items() if value is not None}
    if deepspeed_config is not None:
        block = DeepSpeedConfig(deepspeed_config, mpu=mpu_)._param_dict.get("activation_checkpointing") or {}
        for key in block:
            if key not in _BLOCK:
                raise ValueError(
                    f"gradckpt: unknown key {key!r} in the block activation_checkpointing; the keys are: "
                    f"{', '.join(_BLOCK)}"
                )
        said = {_BLOCK[key]: value for key, value in block.items()}
        chosen: dict[str, Any] = {key: said.pop(key) for key in ("compress", "policy") if key in said}
        asked, options = {**said, **asked}, {**chosen, **options}
    for key, why in _REFUSED.items():
        if asked.get(key):
            raise ValueError(f"gradckpt: {key} of DeepSpeed's checkpointing is not supported: {why}")
    offload = check_bool("checkpoint_in_cpu", asked.get("checkpoint_in_cpu", False))
    settings = _Settings(parse_options({"compress": "int8", **options}, {}), offload, configured=True)
    if mpu_ is not None:
        theirs.configure(mpu_)
    _use(settings)


def _use(settings: _Settings) -> None:
    global _settings
    _settings = settings


def is_configured() -> bool:
    """:func:`configure` was called."""
    return _settings.configured


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """``ValueError`` for True: see :func:`configure`."""
    if partition_activation:
        raise ValueError(
            "gradckpt: partition_activations of DeepSpeed's checkpointing is not supported: "
            + _REFUSED["partition_activations"]
        )


def set_num_layers(nlayers: int) -> None:
    """As in DeepSpeed it says something to contiguous checkpointing only, which :func:`configure` refuses."""


def reset() -> None:
    """Frees what forwards without a backward have left behind: nothing here, a checkpoint dies with its graph."""
