"""A simulated step and a trial step leave no trace in models of transformers and diffusers: their
next steps are those of a model that was never planned."""

import inspect
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from small_models import measured_briefly

pytest.importorskip("diffusers")

import transformers
from test_diffusers import FAMILIES
from test_diffusers import build as diffuser
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import gradckpt
from gradckpt import _settings, _trial_process
from gradckpt._planning import comparison, profile

#: Fields of configs, of which each takes those that it has.
TINY = {
    **dict.fromkeys(("vocab_size",), 96),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "n_inner"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **{"num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 16, "d_kv": 16, "rotary_dim": 8},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}

CAUSAL = [
    "arcee",
    "bloom",
    "codegen",
    "cohere",
    "cohere2",
    "ctrl",
    "deepseek_v2",
    "deepseek_v3",
    "diffllama",
    "doge",
    "ernie4_5",
    "exaone4",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt_bigcode",
    "gpt_neox",
    "gptj",
    "granite",
    "granitemoe",
    "helium",
    "lfm2",
    "llama",
    "mamba",
    "minimax",
    "mistral",
    "mixtral",
    "mpt",
    "nemotron",
    "olmo2",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "stablelm",
    "starcoder2",
]
MASKED = [
    "albert",
    "bert",
    "big_bird",
    "deberta",
    "distilbert",
    "electra",
    "fnet",
    "longformer",
    "modernbert",
    "mobilebert",
    "roformer",
]
SEQ2SEQ = ["bart", "pegasus_x"]

MODELS = [*((key, "causal") for key in CAUSAL), *((key, "masked") for key in MASKED)]
MODELS += [*((key, "seq2seq") for key in SEQ2SEQ), *((family, "diffusers") for family in FAMILIES)]
EACH = pytest.mark.parametrize(("key", "kind"), MODELS, ids=[f"{key}-{kind}" for key, kind in MODELS])

_CLASSES = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}


def build(key, kind):
    """A model, and the function of its loss."""
    if kind == "diffusers":
        model, inputs = diffuser(key)
        return model, lambda: model(**inputs).sample.float().square().mean()
    config = getattr(transformers, CONFIG_MAPPING_NAMES[key])
    known = inspect.signature(config.__init__).parameters
    torch.manual_seed(0)
    made = getattr(transformers, _CLASSES[kind][key])(config(**{k: v for k, v in TINY.items() if k in known})).train()
    ids = torch.randint(3, 90, (2, 48), generator=torch.Generator().manual_seed(1))
    return made, lambda: made(input_ids=ids, labels=ids).loss


#: The regions of models that do not checkpoint themselves, or have several kinds of blocks.
MODULES = {
    "ctrl": ("EncoderLayer",),
    "albert": ("AlbertLayer",),
    "Flux": ("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    "AutoencoderKL": ("ResnetBlock2D",),
}

#: They ask for values, so no budget can be planned.
ASKS = {"longformer"}

#: What each does with a model, a step, and regions.
WAYS = {
    "plan": lambda model, step, regions: gradckpt.plan(model, step, modules=regions),
    "plan with a budget": lambda model, step, regions: gradckpt.plan(model, step, budget="1GiB", modules=regions),
    "enable with a budget": lambda model, step, regions: gradckpt.enable(model, budget="1GiB", modules=regions),
    "gradient_error": lambda model, step, regions: gradckpt.gradient_error(model, step, "lossless", modules=regions),
}


def steps(key, kind, way=None):
    """The losses and gradients of two steps of a new model."""
    model, loss_of = build(key, kind)
    if way is not None:
        regions = [part for part in model.modules() if type(part).__name__ in MODULES.get(key, ())]
        WAYS[way](model, lambda: loss_of().backward(), regions or None)
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        loss = loss_of()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()
    return found


def check(key, kind, way):
    if key in ASKS and "budget" in way:
        with pytest.raises(ValueError, match="cannot be simulated"):
            steps(key, kind, way)
        return
    for found, fresh in zip(steps(key, kind, way), steps(key, kind), strict=True):
        for a, b in zip(found, fresh, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


@pytest.fixture(autouse=True)
def _briefly(monkeypatch):
    measured_briefly(monkeypatch)
    monkeypatch.setattr(profile, "_MOST", 2)
    monkeypatch.setattr(comparison, "READY", _settings.READY[:3:2])


@EACH
def test_next_steps_are_a_fresh_models(key, kind, monkeypatch):
    """Each model in one way, in turn, in a child or here."""
    number = MODELS.index((key, kind))
    monkeypatch.setattr(_trial_process, "can_fork", lambda: number // len(WAYS) % 2 == 0)
    check(key, kind, list(WAYS)[number % len(WAYS)])


@pytest.mark.soak
@EACH
@pytest.mark.parametrize("forks", [True, False], ids=["apart", "here"])
def test_next_steps_are_a_fresh_models_in_every_way(key, kind, forks, monkeypatch):
    monkeypatch.setattr(_trial_process, "can_fork", lambda: forks)
    for way in WAYS:
        check(key, kind, way)
