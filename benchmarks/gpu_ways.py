"""The ways of training that gpu_story.py compares: each a context in which a model trains so."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gpu_llama
import torch
from gpu_job import Job, Skip
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradckpt

#: Of what the layers' activations need without checkpointing, for torch.compile's partitioner.
BUDGET = 0.5


class Setting(NamedTuple):
    """What a way may need to know."""

    job: Job
    model: gpu_llama.Llama
    ids: torch.Tensor
    #: Bytes, of the ways that were measured before.
    peaks: dict[str, int]


class Way(NamedTuple):
    name: str
    active: Callable[[Setting], contextlib.AbstractContextManager[Any]]
    codec: str | None = None  # of block inputs, whose bytes arithmetic tells
    lossy: bool = False
    lengths: bool = True  # can it train another length at once?


@contextlib.contextmanager
def plainly(setting: Setting) -> Iterator[None]:
    yield


@contextlib.contextmanager
def forwards(setting: Setting, changed: Callable[[Any, int], Any]) -> Iterator[None]:
    """Each layer's forward is what ``changed`` makes of it and its number."""
    layers = setting.model.layers
    for number, layer in enumerate(layers):
        layer.forward = changed(layer.forward, number)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def by_torch(setting: Setting) -> contextlib.AbstractContextManager[None]:
    return forwards(setting, lambda forward, _: lambda *args: torch_checkpoint(forward, *args, use_reentrant=False))


@contextlib.contextmanager
def by_compile(setting: Setting) -> Iterator[None]:
    """Each layer compiled, with torch's activation_memory_budget; without inductor where a device
    has none: the partitioner alone."""
    if setting.job.device.is_cuda and importlib.util.find_spec("triton") is None:
        raise Skip("Triton is not installed, which inductor needs on a card")
    backend = "inductor" if setting.job.device.is_cuda else "aot_eager_decomp_partition"
    torch._dynamo.reset()
    try:
        with (
            torch._functorch.config.patch(activation_memory_budget=BUDGET),
            forwards(setting, lambda forward, _: torch.compile(forward, backend=backend, dynamic=False)),
        ):
            yield
    finally:
        torch._dynamo.reset()


def by_remat(setting: Setting) -> contextlib.AbstractContextManager[None]:
    try:
        remat: Any = importlib.import_module("torch_remat")
    except ImportError as error:
        raise Skip(f"torch_remat is not installed ({error})") from None
    return forwards(setting, lambda forward, number: remat.checkpoint(region_name=f"layers.{number}")(forward))


def by_us(codec: str | None, **keywords: Any) -> Callable[[Setting], contextlib.AbstractContextManager[Any]]:
    return lambda setting: gradckpt.enable(setting.model, codec, modules=gpu_llama.Layer, **keywords)


@contextlib.contextmanager
def by_plan(setting: Setting) -> Iterator[None]:
    """Within torch's peak and a tenth of the way from there to none's; int8 is permitted."""
    if not {TORCH, NONE} <= setting.peaks.keys():
        raise Skip("its budget is between two peaks that were not measured")
    torchs, none = setting.peaks[TORCH], setting.peaks[NONE]
    budget = torchs + (none - torchs) // 10
    words = f"activations:{budget}" if setting.job.device.kind == "cpu" else budget
    setting.model.zero_grad()
    plan = gradckpt.plan(setting.model, (setting.ids,), modules=gpu_llama.Layer, budget=words, compress="int8")
    options: dict[str, int] = {}
    for region in plan.regions:
        options[str(region.option)] = options.get(str(region.option), 0) + 1
    setting.job.note(f"{setting.model.sizes.title}: the plan for {budget:,} bytes: {options}")
    setting.peaks[PERMITTED] = budget
    if setting.job.device.kind != "cpu":  # where plan.peak also counts what was there before
        setting.job.check(plan.peak <= budget, f"the plan's peak {plan.peak:,} is above its budget {budget:,}")
    handle = plan.apply(setting.model)
    try:
        yield
    finally:
        handle.remove()


#: Of ``peaks``: the budget of the plan.
PERMITTED = "budget of the plan"
NONE, TORCH, COMPILED, PLAN = "none", "torch checkpoint", f"torch.compile, budget {BUDGET:g}", "gradckpt plan"
#: The most valuable first: a stage that runs out of time leaves out the last.
WAYS = (
    Way(NONE, plainly),
    Way(TORCH, by_torch),
    Way("gradckpt int8", by_us("int8"), "int8", lossy=True),
    Way("gradckpt int4", by_us("int4"), "int4", lossy=True),
    Way("gradckpt lossless", by_us("lossless"), "lossless"),
    Way("gradckpt saves int8", by_us("int8", recompute=False), lossy=True),
    Way(PLAN, by_plan, lossy=True, lengths=False),
    Way("torch_remat", by_remat),
    Way(COMPILED, by_compile, lengths=False),
)
