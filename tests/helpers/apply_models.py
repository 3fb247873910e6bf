"""Models for the tests of chosen modules: small ones of transformers, from their configs,
and a plain one."""

import os

import pytest
import torch
from torch import nn

import gradckpt

os.environ["HF_HUB_OFFLINE"] = "1"


transformers = pytest.importorskip("transformers")


VOCAB, WIDTH, LENGTH = 96, 32, 16


SIZES = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


TEXT = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


GROUPED = {**SIZES, **TEXT, "num_key_value_heads": 2, "head_dim": 8}


IMAGE = {**SIZES, "image_size": 16, "patch_size": 8}


def of_config(model, config, **fields):
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**fields))


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "llama": of_config("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "qwen3": of_config("Qwen3ForCausalLM", "Qwen3Config", **GROUPED),
    "mistral": of_config("MistralForCausalLM", "MistralConfig", **GROUPED),
    "gemma2": of_config("Gemma2ForCausalLM", "Gemma2Config", **GROUPED),
    "gpt2": of_config("GPT2LMHeadModel", "GPT2Config", **TEXT, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=4),
    "opt": of_config("OPTForCausalLM", "OPTConfig", **SIZES, **TEXT, ffn_dim=48, word_embed_proj_dim=WIDTH),
    "bert": of_config("BertModel", "BertConfig", **SIZES, **TEXT),
    "t5": of_config(
        "T5ForConditionalGeneration",
        "T5Config",
        **TEXT,
        d_model=WIDTH,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "vit": of_config("ViTModel", "ViTConfig", **IMAGE),
    "clip": of_config("CLIPModel", "CLIPConfig", text_config={**SIZES, **TEXT}, vision_config=IMAGE),
    "whisper": of_config(
        "WhisperModel",
        "WhisperConfig",
        **TEXT,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        decoder_start_token_id=1,
    ),
    "mixtral": of_config("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4),
    "qwen2_moe": of_config(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        **SIZES,
        **TEXT,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "deepseek_v3": of_config(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **SIZES,
        **TEXT,
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=8,
        qk_nope_head_dim=8,
    ),
    "mamba": of_config("MambaForCausalLM", "MambaConfig", **TEXT, hidden_size=WIDTH, num_hidden_layers=2),
    "gpt_oss": of_config("GptOssForCausalLM", "GptOssConfig", **GROUPED, num_local_experts=4),
    "torch": encoder,
}


def build(name):
    torch.manual_seed(0)
    return MODELS[name]().train()


def loss_of(model):
    """Of one batch; random numbers for dropout start from the same seed each time."""
    torch.manual_seed(1)
    if isinstance(model, nn.TransformerEncoder):
        return model(torch.randn(2, LENGTH, WIDTH)).square().mean()
    ids = torch.randint(3, VOCAB, (2, LENGTH))
    return model(input_ids=ids, labels=ids).loss


def gradients(model):
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs):
    assert torch.equal(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in ours[1].items():
        assert torch.equal(gradient, theirs[1][name]), name


# ---- what a checkpointed module does ----


class Net(nn.Module):
    def __init__(self, n=4, size=8):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(size, size), nn.Tanh()) for _ in range(n)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def names_of(model, rules, **options):
    with gradckpt.enable(model, modules=rules, **options) as handle:
        return list(handle.modules)


def regions_of(model, x=None):
    """The number of regions in one forward and backward."""
    gradckpt.stats.reset()
    out = model(torch.randn(2, 8) if x is None else x)
    if out.requires_grad:
        out.sum().backward()
    return gradckpt.stats()["regions"]
