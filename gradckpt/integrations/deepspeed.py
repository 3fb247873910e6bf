"""``deepspeed.checkpointing`` with compressed checkpoints and the same names.

    from gradckpt.integrations import deepspeed as checkpointing

replaces ``from deepspeed import checkpointing``; no other change is needed. :func:`checkpoint` has
the signature and the results of DeepSpeed's, and gradckpt's engine. It is never reentrant: its
inputs need not require grad, ``torch.autograd.grad`` works, and buffers are updated once.

The tracker of random states is DeepSpeed's own; the recompute of :func:`checkpoint` restores its
state in the forward.
"""

from __future__ import annotations

import dataclasses
import functools
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

from gradckpt._engine.arguments import check_bool, own_keywords
from gradckpt._engine.buffers import Calling
from gradckpt._models.offload import region_at
from gradckpt._models.rules import parse_options
from gradckpt._offload import Offload

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

#: DeepSpeed's configuration block: each key, and its argument of configure().
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

#: Unsupported options and alternatives.
_REFUSED = {
    "partition_activations": "every rank keeps its checkpoints whole, compressed; leave it out",
    "contiguous_checkpointing": "payloads are allocated one by one, at a fraction of the size; leave it out",
    "synchronize": "it slows every region down; use torch.profiler to see where time goes",
    "profile": "use torch.profiler; gradckpt.stats() counts regions and bytes",
}


@dataclasses.dataclass(frozen=True)
class _Settings:
    options: Mapping[str, Any]  # keywords of gradckpt.checkpoint
    offload: Offload | None = None
    configured: bool = False

    @functools.cached_property
    def region(self) -> Callable[..., Any]:
        return region_at(self.offload)


_settings = _Settings(parse_options({"compress": "int8"}, {}))


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)`` and recompute it in the backward, as configured.

    Without :func:`configure`, the codec is int8.

    Returns:
        The result of ``function``; as in DeepSpeed, a list becomes a tuple, and a list or tuple of
        one element that element.
    """
    settings = _settings
    states = get_cuda_rng_tracker().get_states()
    function = own_keywords(function, kwargs)
    if states:
        function = _Tracked(function, states)
    found = settings.region(function, *args, **settings.options, **kwargs)
    if isinstance(found, (tuple, list)):
        return found[0] if len(found) == 1 else tuple(found)
    return found


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call :func:`checkpoint`, which is not reentrant either."""
    return checkpoint(function, *args)


@dataclasses.dataclass(slots=True, eq=False)
class _Tracked(Calling):
    """A region's function while DeepSpeed's tracker has states.

    Its recompute begins with the tracker's states in the forward, and restores the current ones
    afterwards.
    """

    states: dict[str, Any]
    ran: bool = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not self.ran:
            self.ran = True
            return self.function(*args, **kwargs)
        tracker = get_cuda_rng_tracker()
        now = tracker.get_states()
        tracker.set_states(dict(self.states))  # forks write to it, and another recompute may follow
        try:
            return self.function(*args, **kwargs)
        finally:
            tracker.set_states(now)


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
    """Configure :func:`checkpoint` from now on, with DeepSpeed's arguments and a few more.

    Args:
        mpu_: Passed to DeepSpeed's ``configure``, or None.
        deepspeed_config: DeepSpeed's configuration: a path or a dict. The keys below are read from
            its block ``activation_checkpointing``, as well as ``compress`` and ``policy``, which
            DeepSpeed ignores. Arguments win over it.
        checkpoint_in_cpu: Keep the compressed inputs in host memory (``cpu_checkpointing`` in the
            block).
        partition_activations, contiguous_checkpointing, synchronize, profile: An error if true.
        num_checkpoints: Has an effect on contiguous checkpointing only, as in DeepSpeed.
        **options: ``compress`` (default int8), ``policy`` or ``context_fn``,
            ``preserve_rng_state``, ``early_stop``, ``determinism_check``, ``debug``,
            ``respect_saved_tensors_hooks`` and ``buffers``, as for :func:`gradckpt.checkpoint`.

    Raises:
        ValueError: gradckpt does not support an option; the message gives an alternative. Or a
            codec, policy or option is unknown.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    passed = {key: value for key, value in given.items() if value is not None}
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
        passed, options = {**said, **passed}, {**chosen, **options}
    for key in _REFUSED:
        if passed.get(key):
            raise _refusal(key)
    offload = check_bool("checkpoint_in_cpu", passed.get("checkpoint_in_cpu", False))
    place = Offload() if offload else None
    settings = _Settings(parse_options({"compress": "int8", **options}, {}), place, configured=True)
    if mpu_ is not None:
        theirs.configure(mpu_)
    global _settings
    _settings = settings


def _refusal(key: str) -> ValueError:
    return ValueError(f"gradckpt: {key} of DeepSpeed's checkpointing is not supported: {_REFUSED[key]}")


def is_configured() -> bool:
    """Return whether :func:`configure` was called."""
    return _settings.configured


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Do nothing for False.

    Raises:
        ValueError: It is True, which gradckpt does not support; see :func:`configure`.
    """
    if partition_activation:
        raise _refusal("partition_activations")


def set_num_layers(nlayers: int) -> None:
    """Do nothing: the number has an effect on contiguous checkpointing only, which is not
    supported.
    """


def reset() -> None:
    """Do nothing: a checkpoint of a forward without a backward is freed with its graph."""
