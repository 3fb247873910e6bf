"""The ways of training one model that bench_frontier.py compares: peers' and gradckpt's."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import gradckpt
from gradckpt import selectors

try:
    import torch_remat as remat
except ImportError:
    remat = None

NONE, PLAIN = "none", "no checkpointing"
GROUPS = {
    "torch": "torch.utils.checkpoint, around each block",
    "sac": "torch's selective checkpoint",
    "remat": "torch_remat",
    "compile": "torch.compile",
    "boundaries": "gradckpt: block inputs",
    "selective": "gradckpt: block inputs, and outputs of operators",
    "saved": "gradckpt: nothing recomputed",
    "mixed": "gradckpt: some blocks recomputed, the others not",
    "compiled": "gradckpt under torch.compile",
}
OURS = {"boundaries", "selective", "saved", "mixed", "compiled"}
COMPILED = {"compile", "compiled"}

TurnOn = Callable[[Any], None]


class Way(NamedTuple):
    name: str
    group: str
    turn_on: TurnOn
    recomputes: bool = True
    budget: float = 1.0  # of torch.compile's partitioner

    @property
    def ours(self) -> bool:
        return self.group in OURS

    @property
    def formats(self) -> list[str]:
        """The lossy codecs that it uses."""
        return re.findall("int8|int6|int4|fp8|bf16", self.name) if self.ours else []

    @property
    def compiled(self) -> bool:
        return self.group in COMPILED


def nothing(model: Any) -> None:
    pass


# ---- peers


def operators(*names: str) -> list[Any]:
    """The overloads of these names that this torch has."""
    return [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]


ATTENTION = operators(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
SAC = {
    "mm": operators("mm"),
    "mm, addmm": operators("mm", "addmm"),
    "mm, addmm, sdpa": [*operators("mm", "addmm"), *ATTENTION],
}


def by_torch(ops: list[Any] | None) -> TurnOn:
    contexts = {} if ops is None else {"context_fn": functools.partial(torch_contexts, ops)}
    function = functools.partial(torch_checkpoint, use_reentrant=False, **contexts)
    return lambda model: model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)


def kept(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A region of torch_remat that does not run again; the sum after it, which does, reads its
    output.
    """
    region = remat.region(function, name, recompute=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = region(*args, **kwargs)
        remat.recompute_needs_tensor(found[0] if isinstance(found, tuple) else found)
        return found

    return call


def by_remat(*parts: str) -> TurnOn:
    def turn_on(model: Any) -> None:
        for number, layer in enumerate(model.model.layers):
            for part in parts:
                module = getattr(layer, part)
                module.forward = kept(module.forward, part)
            layer.forward = remat.checkpoint(region_name=f"layers.{number}")(layer.forward)

    return turn_on


def peers() -> list[Way]:
    attention, mlp = "self_attn", "mlp"
    found = [Way("checkpoint", "torch", by_torch(None))]
    found += [Way(f"SAC {{{name}}}", "sac", by_torch(ops)) for name, ops in SAC.items()]
    if remat is not None:
        found += [
            Way("remat", "remat", by_remat()),
            Way("remat, attention saved", "remat", by_remat(attention)),
            Way("remat, mlp saved", "remat", by_remat(mlp)),
            Way("remat, both saved", "remat", by_remat(attention, mlp)),
        ]
    found.append(Way("compiled", "compile", nothing, recomputes=False))
    found.append(Way("compiled, checkpoint", "compile", by_torch(None)))
    found += [Way(f"compiled, budget {budget}", "compile", nothing, budget=budget) for budget in (0.75, 0.5, 0.25)]
    return found


# ---- gradckpt


def by_us(*args: Any, **keywords: Any) -> TurnOn:
    return lambda model: (gradckpt.enable(model, *args, **keywords), None)[1]


def some_saved(saved: Any, recomputed: Any, every: int, **keywords: Any) -> TurnOn:
    """Every so many blocks are not recomputed; their saved activations have one codec, the inputs
    of the other blocks another.
    """
    modules = {
        selectors.every(every, LlamaDecoderLayer): {"compress": saved, "recompute": False},
        LlamaDecoderLayer: {"compress": recomputed, **keywords},
    }
    return by_us(None, modules=modules)


#: Formats of what single operators save.
BY_OPERATOR = {
    "int8, attention fp8": {"codec": "int8", "operators": {"attention": "fp8"}},
    "bf16, linear int8": {"codec": "bf16", "operators": {"linear": "int8"}},
}
SAVES = {
    "attention": "save_attention",
    "every other matmul": "every_other_matmul",
    "matmuls": "save_matmuls",
    "attention, matmuls": "save_attention|save_matmuls",
}


def ours() -> list[Way]:
    codecs = (None, "int8", "int6", "int4", "lossless")
    found = [Way(f"{codec}", "boundaries", by_us(codec)) for codec in codecs]
    for keeps, policy in SAVES.items():
        exact = by_us(None, policy=policy)
        found.append(Way(f"None, {keeps} saved", "selective", exact))
        if "attention" not in policy:  # it runs again beside restored inputs
            found.append(Way(f"int8, {keeps} int8", "selective", by_us("int8", policy=f"{policy}:int8")))
    for codec in codecs[1:]:
        found.append(Way(f"saved {codec}", "saved", by_us(codec, recompute=False), recomputes=False))
    for name, config in BY_OPERATOR.items():
        found.append(Way(f"saved {name}", "saved", by_us(config, recompute=False), recomputes=False))
    found += [
        Way("1 of 2 saved int8, others int8", "mixed", some_saved("int8", "int8", 2)),
        Way("1 of 3 saved int8, others int8", "mixed", some_saved("int8", "int8", 3)),
        Way(
            "1 of 2 saved int8, others matmuls int8",
            "mixed",
            some_saved("int8", "int8", 2, policy="save_matmuls:int8"),
        ),
    ]
    found += [Way(f"compiled {codec}", "compiled", by_us(codec)) for codec in (None, "int8")]
    for words, form in (("saved", ""), ("int8", ":int8")):
        policy = SAVES["matmuls"] + form
        found.append(Way(f"compiled int8, matmuls {words}", "compiled", by_us("int8", policy=policy)))
    return found


def all_ways() -> list[Way]:
    return [Way(PLAIN, NONE, nothing, recomputes=False), *peers(), *ours()]


# ---- a model for each way


def twin(model: Any) -> Any:
    """A copy that shares its parameters, and so their gradients."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def step_of(way: Way, model: Any, ids: torch.Tensor, autocast: bool) -> Callable[..., None]:
    """Turn the way on in a copy of the model; return its step: forward and backward. A compiled
    one is compiled here.
    """
    mine = twin(model)
    way.turn_on(mine)

    def loss_of(batch: torch.Tensor) -> Any:
        return mine(input_ids=batch, labels=batch).loss

    if way.compiled:
        # torch.compile finds graphs by a function's code; with the same code, ways would share one.
        loss_of.__code__ = loss_of.__code__.replace(co_name=way.name)
        loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False)

    def step(batch: torch.Tensor = ids, autocast: bool = autocast) -> None:
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=autocast):
            loss = loss_of(batch)
        loss.backward()

    with torch._functorch.config.patch(activation_memory_budget=way.budget):
        step()
    return step
