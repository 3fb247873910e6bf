"""The families of transformers models at tiny shapes, with padded batches: for tests and
benchmarks/bench_gradient_error.py.

Built from a config, with nothing downloaded. Dropout is on wherever a family has it: in its
residual stream or, as in Llama, in attention only. Shapes are the least that keep what is
particular to a family: grouped heads, soft caps, sliding windows that are shorter than the
sequence, cross attention, routing."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
import transformers
import transformers.modeling_utils
import worlds
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint as early
from torch.utils.checkpoint import checkpoint_sequential

import gradckpt

VOCAB, WIDTH, LENGTH, BATCH = 96, 64, 32, 4
IMAGE, PATCH = 16, 4
DROPOUT = 0.1
ATTENTIONS = ("eager", "sdpa")

# A parameter whose exact gradient is below this share of the whole gradient's norm is rounding
# noise (a key's bias: softmax does not see it), so its direction means nothing.
NOISE = 1e-5

_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": DROPOUT,
}
_ENCODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_WINDOW = {"sliding_window": 8}
_HEAD = {"head_dim": 16}


# ---- models: the attention's implementation, and fields of the config that a test wants otherwise


def llama(attention: str, **fields: Any) -> Any:
    config = transformers.LlamaConfig(**{**_DECODER, "attn_implementation": attention, **fields})
    return transformers.LlamaForCausalLM(config)


def qwen3(attention: str, **fields: Any) -> Any:
    config = transformers.Qwen3Config(**{**_DECODER, **_HEAD, "attn_implementation": attention, **fields})
    return transformers.Qwen3ForCausalLM(config)


def mistral(attention: str, **fields: Any) -> Any:
    config = transformers.MistralConfig(**{**_DECODER, **_HEAD, **_WINDOW, "attn_implementation": attention, **fields})
    return transformers.MistralForCausalLM(config)


def gemma2(attention: str, **fields: Any) -> Any:
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}
    given = {**_DECODER, **_HEAD, **_WINDOW, **caps, "attn_implementation": attention, **fields}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**given))


def gemma3(attention: str, **fields: Any) -> Any:
    given = {**_DECODER, **_HEAD, **_WINDOW, "attn_implementation": attention, **fields}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**given, sliding_window_pattern=2))


def gpt2(attention: str, **fields: Any) -> Any:
    shape = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=VOCAB, **{**shape, "attn_implementation": attention, **fields})
    return transformers.GPT2LMHeadModel(config)


def opt(attention: str, **fields: Any) -> Any:
    shape = {"ffn_dim": 96, "max_position_embeddings": LENGTH, "word_embed_proj_dim": WIDTH, "pad_token_id": 0}
    given = {**_ENCODER, **shape, "dropout": DROPOUT, "attention_dropout": DROPOUT, "attn_implementation": attention}
    del given["intermediate_size"]
    return transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=VOCAB, **{**given, **fields}))


def bert(attention: str, **fields: Any) -> Any:
    given = {**_ENCODER, "max_position_embeddings": LENGTH, "attn_implementation": attention, **fields}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCAB, **given))


def t5(attention: str, **fields: Any) -> Any:
    shape = {"d_model": WIDTH, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0}
    given = {**shape, **tokens, "feed_forward_proj": "gated-gelu", "attn_implementation": attention, **fields}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCAB, **given))


def vit(attention: str, **fields: Any) -> Any:
    drop = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
    given = {**_ENCODER, **drop, "image_size": IMAGE, "patch_size": PATCH, "attn_implementation": attention, **fields}
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=10, **given))


def clip(attention: str, **fields: Any) -> Any:
    shared = {**_ENCODER, "num_hidden_layers": 2, "attention_dropout": DROPOUT, **fields}
    text = {**shared, "vocab_size": VOCAB, "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 1}
    vision = {**shared, "image_size": IMAGE, "patch_size": PATCH}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)
    config._attn_implementation = attention
    return transformers.CLIPModel(config)


def whisper(attention: str, **fields: Any) -> Any:
    shape = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 16, "max_source_positions": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    given = {**shape, **heads, **dict.fromkeys(names, 0), "max_target_positions": LENGTH, "suppress_tokens": None}
    drop = {"dropout": DROPOUT, "attention_dropout": DROPOUT, "attn_implementation": attention}
    config = transformers.WhisperConfig(vocab_size=VOCAB, **{**given, **drop, **fields})
    return transformers.WhisperForConditionalGeneration(config)


def mixtral(attention: str, **fields: Any) -> Any:
    routing = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    given = {**_DECODER, **_HEAD, **routing, "attn_implementation": attention, **fields}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**given))


def qwen3_moe(attention: str, **fields: Any) -> Any:
    routing = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "output_router_logits": True}
    given = {**_DECODER, **_HEAD, **routing, "attn_implementation": attention, **fields}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**given))


# ---- batches: the same each time; rows of four lengths


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def text(first: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(first, VOCAB, (BATCH, LENGTH), generator=_generator())
    mask = torch.ones_like(ids)
    for row, length in enumerate((LENGTH, 20, 9, 27)):
        mask[row, length:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def translation() -> dict[str, torch.Tensor]:
    source = text()
    return {**source, "decoder_attention_mask": source["attention_mask"].flip(0), "labels": source["labels"].flip(0)}


def images() -> dict[str, torch.Tensor]:
    pixels = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=_generator())
    return {"pixel_values": pixels, "labels": torch.arange(BATCH)}


def captions() -> dict[str, Any]:
    words = text(first=2)
    words.pop("labels")
    words["input_ids"][:, 5] = 1  # the end of the text, where CLIP takes its embedding
    return {**words, "pixel_values": images()["pixel_values"], "return_loss": True}


def speech() -> dict[str, torch.Tensor]:
    features = torch.randn(BATCH, 16, 2 * LENGTH, generator=_generator())
    words = text()
    return {"input_features": features, "decoder_attention_mask": words["attention_mask"], "labels": words["labels"]}


class Family(NamedTuple):
    model: Callable[..., Any]
    batch: Callable[[], dict[str, Any]]
    layers: int  # that checkpoint
    error: float  # of the gradients under int8, relative L2: no higher
    cosine: float  # of the worst parameter under int8: no lower
    inputs: int = 0  # of those layers, that a codec takes; 0: one each


#: OPT has the ReLU of the first T5, which turns small changes of its input into large ones of the
#: gradient at random weights: with GELU in its place the error is 0.4 %, and bf16 autocast costs
#: OPT 5 %.
FAMILIES = {
    "llama": Family(llama, text, 3, 0.01, 0.9995),
    "qwen3": Family(qwen3, text, 3, 0.02, 0.999),
    "mistral": Family(mistral, text, 3, 0.01, 0.9995),
    "gemma2": Family(gemma2, text, 3, 0.025, 0.999),
    "gemma3": Family(gemma3, text, 3, 0.025, 0.999),
    "gpt2": Family(gpt2, text, 3, 0.01, 0.9995),
    "opt": Family(opt, text, 3, 0.1, 0.97),
    "bert": Family(bert, text, 3, 0.005, 0.9995),
    # With the encoder's states, and the biases of position that all layers but the first are given.
    "t5": Family(t5, translation, 4, 0.04, 0.999, inputs=8),  # and a leaf, zeros that transformers makes
    "vit": Family(vit, images, 3, 0.04, 0.997),
    "clip": Family(clip, captions, 4, 0.02, 0.998),
    "whisper": Family(whisper, speech, 4, 0.01, 0.9995, inputs=6),
    "mixtral": Family(mixtral, text, 3, 0.01, 0.9995),
    "qwen3_moe": Family(qwen3_moe, text, 3, 0.02, 0.999),
}
#: Mixtures of experts, whose gradients are those of the routes taken.
MIXTURES = ("mixtral", "qwen3_moe")


def missing(family: str, attention: str) -> str | None:
    """Why this transformers cannot make that pair: a reason to skip; None: it can."""
    try:
        model = FAMILIES[family].model(attention)
    except AttributeError as error:
        if "module transformers has no attribute" in str(error):
            return f"this transformers has no {family}"
        raise
    except ValueError as error:
        if "does not support an attention implementation" in str(error):
            return f"this transformers has no {attention} attention for {family}"
        raise
    # Some older ones take eager attention in its place, and say nothing.
    used = {
        each.config._attn_implementation for each in model.modules() if isinstance(each, transformers.PreTrainedModel)
    }
    return None if used == {attention} else f"this transformers has no {attention} attention for {family}"


def build(family: str, attention: str, **fields: Any) -> Any:
    """In training mode; the same weights each time."""
    torch.manual_seed(0)
    return FAMILIES[family].model(attention, **fields).train()


def stock(model: Any, **more: Any) -> Any:
    """The same model with torch's checkpointing."""
    turn_on(model, {"use_reentrant": False}, **more)
    return model


def gradients(family: str, model: Any, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Loss, gradients and the RNG state that a training step leaves behind;
    ``more`` goes to the model."""
    torch.manual_seed(2)
    model.zero_grad()
    loss = model(**FAMILIES[family].batch(), **more).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, torch.get_rng_state()


def assert_same(ours: Any, theirs: Any) -> None:
    """Loss, every gradient and the RNG state afterwards, where there is one, to the last bit."""
    assert torch.equal(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    assert [name for name in ours[1] if not torch.equal(ours[1][name], theirs[1][name])] == []
    assert all(map(torch.equal, ours[2:], theirs[2:]))


def nonzero(grads: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, g in grads.items() if g.any()}


class Errors(NamedTuple):
    relative: float  # L2 over all parameters
    cosine: float  # of the worst parameter
    parameter: str  # which that is


def errors(grads: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> Errors:
    """A gradient that is not there counts as zero."""
    pairs = {
        name: (
            grads[name].flatten().double() if name in grads else torch.zeros(g.numel()).double(),
            g.flatten().double(),
        )
        for name, g in exact.items()
    }
    norm = torch.cat([g for _, g in pairs.values()]).norm()
    gap = torch.cat([ours - g for ours, g in pairs.values()]).norm()
    cosines = {
        name: torch.cosine_similarity(ours, g, dim=0).item()
        for name, (ours, g) in pairs.items()
        if g.norm() > NOISE * norm
    }
    worst = min(cosines, key=lambda name: cosines[name])
    return Errors((gap / norm).item(), cosines[worst], worst)


# ---- How transformers names checkpointing: in 5.23 and later "activation", before "gradient".

NEW = hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable")
NAME = "activation_checkpointing" if NEW else "gradient_checkpointing"


def turn_on(model, *given, **named):
    """``given``: the dict of the call; ``named``: keywords of transformers."""
    getattr(model, f"{NAME}_enable")(*given, **named)


def turn_off(model):
    getattr(model, f"{NAME}_disable")()


def is_on(model):
    return getattr(model, f"is_{NAME}")


def flag(kwargs=None, name=NAME):
    """The arguments of a Trainer."""
    return {name: True, f"{name}_kwargs": kwargs}


# ---- Callers of checkpoint, early and late, and the check that patched() left nothing behind.

CALL_WIDTH = 64


early_partial = functools.partial(early, use_reentrant=False)


def default_argument(layer, x, function=early, **keywords):
    return function(layer, x, **keywords)


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(CALL_WIDTH, CALL_WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    )


def call_gradients(layers, call, **keywords):
    """Of one step through the layers, each of them a region."""
    torch.manual_seed(1)
    x = torch.randn(32, CALL_WIDTH, requires_grad=True) * 1
    for layer in layers:
        x = call(layer, x, **keywords)
    return torch.autograd.grad(x.square().sum(), list(layers.parameters()))


def compressed(function, *args, **keywords):
    """What the function returns, and how many tensors it compressed."""
    before = gradckpt.stats()["compressed"]
    result = function(*args, **keywords)
    return result, gradckpt.stats()["compressed"] - before


def equal(a, b):
    """Whether gradients, by name or in order, are equal; one that is missing is so in both."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and equal(a.values(), [b[name] for name in a])
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def error(a, b):
    """Of all gradients together, by name or in order."""
    if isinstance(b, dict):
        assert a.keys() == b.keys()
        a, b = [a[name] for name in b], b.values()
    a, b = (torch.cat([x.flatten().double() for x in tensors]) for tensors in (a, b))
    return ((a - b).norm() / b.norm()).item()


def torchs_functions():
    """torch's functions as a user can look at them."""
    found = []
    for function in (early, checkpoint_sequential):
        inner = inspect.unwrap(function)
        own = {key: value for key, value in vars(inner).items() if key != "__dynamo_disable"}
        found += [function, inner, inner.__code__, inner.__defaults__, inner.__kwdefaults__, own]
        found += [
            inner.__globals__,
            inner.__closure__,
            inner.__module__,
            inner.__qualname__,
            inspect.signature(function),
        ]
    hooks = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    return [*found, torch.utils.checkpoint.checkpoint, *(list(h) for h in hooks)]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    gradckpt.stats.reset()  # graphs that an earlier test compiled may be running, as far as patched() knows
    before = torchs_functions()
    yield
    after = torchs_functions()
    assert all(a is b or a == b for a, b in zip(before, after, strict=True))


def alone(script):
    """Standard output of a program of its own."""
    return worlds.call("-c", textwrap.dedent(script)).stdout
