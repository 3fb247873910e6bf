"""Models of one small layer each, from transformers and diffusers, for torch.compile: by name, a
function that returns the model and its inputs."""

import functools

import model_families
import torch
import transformers
from compile_cases import passes

import gradckpt

try:
    import diffusers
except ImportError:
    diffusers = None

BACKENDS = {"aot_eager": "aot_eager", "passes": passes(), "inductor": "inductor"}
SETTINGS = {
    "int8": {"compress": "int8"},
    "lossless": {"compress": "lossless"},
    "save_matmuls:int8": {"policy": "save_matmuls:int8"},
    "recompute=False": {"compress": "int8", "recompute": False},
}

# ---- fields of configs ----

_TEXT = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "embedding_size": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False},
}
_T5 = {
    **{"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4},
    **{"decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False},
}
_IMAGES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"image_size": 16, "patch_size": 4},
}
_WINDOWS = {"image_size": 16, "patch_size": 2, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
_SOUND = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False},
    **{"feat_extract_norm": "layer", "do_stable_layer_norm": True},
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 0, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4, "n_shared_experts": 1},
}

#: One of each kind of layer.
FIELDS = {
    "Llama": _TEXT,
    "Gemma2": {**_TEXT, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "Qwen3Moe": {**_TEXT, **_MOE},
    "DeepseekV3": {**_TEXT, **_MLA},
    "Bloom": {**_TEXT, "n_layer": 1, "n_head": 4},
    "GPT2": {**_TEXT, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64},
    "Mamba": {**_TEXT, "state_size": 8},
    "FNet": _TEXT,
    "DebertaV2": {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    "T5": _T5,
    "ViT": _IMAGES,
    "Swin": _WINDOWS,
    "ConvNext": {"hidden_sizes": [32] * 4, "depths": [1] * 4, "patch_size": 2},
    "Wav2Vec2": _SOUND,
}

# ---- inputs ----


def _drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _ids():
    return torch.randint(3, 96, (2, 32), generator=torch.Generator().manual_seed(1))


def _inputs(name):
    if name == "Wav2Vec2":
        return {"input_values": _drawn(2, 400)}
    if "image_size" in FIELDS[name] or name == "ConvNext":
        return {"pixel_values": _drawn(2, 3, 16, 16)}
    mask = torch.ones(2, 32, dtype=torch.long)
    mask[1, 20:] = 0
    given = {"input_ids": _ids() * mask}
    if name != "FNet":
        given["attention_mask"] = mask
    if "decoder_start_token_id" in FIELDS[name]:
        given["decoder_input_ids"] = _ids()
    return given


def _of_transformers(name):
    config = getattr(transformers, f"{name}Config")(**FIELDS[name])
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):  # Inductor draws other numbers
            setattr(config, key, 0.0)
    return getattr(transformers, f"{name}Model")(config), _inputs(name)


# ---- diffusers ----

_TIMES = torch.tensor([3, 7])
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
_UNET = {
    **{"sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "block_out_channels": (32, 64)},
    **{"attention_head_dim": 8, "norm_num_groups": 8},
}


def _unet_condition(length=8):
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    model = diffusers.UNet2DConditionModel(**_UNET, down_block_types=down, up_block_types=up, cross_attention_dim=32)
    return model, {"sample": _drawn(2, 4, 16, 16), "timestep": _TIMES, "encoder_hidden_states": _drawn(2, length, 32)}


def _dit(layers=1):
    shape = {"in_channels": 4, "num_layers": layers, "sample_size": 16, "norm_num_groups": 1}
    model = diffusers.DiTTransformer2DModel(**_HEADS, **shape)
    inputs = {"hidden_states": _drawn(2, 4, 16, 16), "timestep": _TIMES, "class_labels": torch.tensor([1, 2])}
    return model, inputs


def _pixart(layers=1, length=8):
    shape = {"in_channels": 4, "out_channels": 8, "num_layers": layers, "sample_size": 16, "norm_num_groups": 1}
    condition = {"cross_attention_dim": 64, "caption_channels": 32, "use_additional_conditions": False}
    model = diffusers.PixArtTransformer2DModel(**_HEADS, **shape, **condition)
    added = {"resolution": None, "aspect_ratio": None}
    inputs = {"hidden_states": _drawn(2, 4, 16, 16), "encoder_hidden_states": _drawn(2, length, 32), "timestep": _TIMES}
    return model, {**inputs, "added_cond_kwargs": added}


def _sd3(layers=2, length=8):
    shape = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "patch_size": 1, "num_layers": layers}
    heads = {"num_attention_heads": 4, "attention_head_dim": 8, "joint_attention_dim": 32}
    model = diffusers.SD3Transformer2DModel(**shape, **heads, caption_projection_dim=32, pooled_projection_dim=32)
    inputs = {"hidden_states": _drawn(2, 4, 16, 16), "encoder_hidden_states": _drawn(2, length, 32), "timestep": _TIMES}
    return model, {**inputs, "pooled_projections": _drawn(2, 32)}


def _flux(layers=1, length=8):
    shape = {"in_channels": 16, "num_layers": layers, "num_single_layers": layers, "axes_dims_rope": (4, 4, 8)}
    heads = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32}
    model = diffusers.FluxTransformer2DModel(**shape, **heads, pooled_projection_dim=32)
    inputs = {"hidden_states": _drawn(2, 16, 16), "encoder_hidden_states": _drawn(2, length, 32)}
    places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(length, 3), "timestep": torch.tensor([0.3, 0.7])}
    return model, {**inputs, **places, "pooled_projections": _drawn(2, 32)}


def _vae():
    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    shape = {"block_out_channels": (32, 32), "layers_per_block": 1, "norm_num_groups": 8}
    model = diffusers.AutoencoderKL(**shape, down_block_types=down, up_block_types=up)
    return model, {"sample": _drawn(2, 3, 16, 16)}


def _wan(layers=1, length=8):
    shape = {"patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32}
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "num_layers": layers}
    model = diffusers.WanTransformer3DModel(**shape, **heads)
    inputs = {
        "hidden_states": _drawn(2, 4, 2, 8, 8),
        "encoder_hidden_states": _drawn(2, length, 32),
        "timestep": _TIMES,
    }
    return model, inputs


BLOCKS = {name: functools.partial(_of_transformers, name) for name in FIELDS}
if diffusers is not None:
    BLOCKS |= {
        "UNet2DCondition": _unet_condition,
        "DiT": _dit,
        "PixArt": _pixart,
        "SD3": _sd3,
        "Flux": _flux,
        "AutoencoderKL": _vae,
        "Wan": _wan,
    }

# ---- steps ----


def build(name):
    torch.manual_seed(0)
    model, inputs = BLOCKS[name]()
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():  # initial weights of 0.02 and biases of 0 hide errors
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.02)
            elif parameter.abs().max() < 0.2:
                parameter.normal_(0, 0.1)
    return model, inputs


def turn_on(model, setting):
    options = SETTINGS[setting]
    if hasattr(model, "enable_gradient_checkpointing") and options.get("recompute", True):  # diffusers
        function = functools.partial(gradckpt.checkpoint, use_reentrant=False, **options)
        model.enable_gradient_checkpointing(gradient_checkpointing_func=function)
    elif getattr(model, "supports_gradient_checkpointing", True) or not options.get("recompute", True):
        gradckpt.enable(model, **options)
    else:
        layers = [x for x in model.modules() if type(x).__name__ == "ConvNextLayer"]
        modules = layers or "layer"  # which transformers does not checkpoint
        gradckpt.enable(model, modules=modules, **options)


def turn_torchs_on(model):
    if hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    elif model.supports_gradient_checkpointing:
        model_families.turn_on(model, {"use_reentrant": False})


def _differentiable(output):
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    if isinstance(output, dict):
        output = list(output.values())
    elif hasattr(output, "sample"):
        output = [output.sample]
    return [x for each in output if isinstance(each, (torch.Tensor, tuple, list, dict)) for x in _differentiable(each)]


def gradients(name, turn_on=None, backend=None):
    torch._dynamo.reset()
    model, inputs = build(name)
    if turn_on is not None:
        turn_on(model)
    run = model if backend is None else torch.compile(model, backend=BACKENDS[backend])
    torch.manual_seed(2)
    sum(x.square().mean() + x.sin().mean() for x in _differentiable(run(**inputs))).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(got, want):
    assert got.keys() == want.keys()
    difference = sum(float((got[name].double() - grad.double()).square().sum()) for name, grad in want.items())
    return (difference / sum(float(grad.double().square().sum()) for grad in want.values())) ** 0.5


def errors(name, setting, backend):
    """Return the gradients' errors without the compiler and with it, and the number of payloads in
    graphs.
    """
    turn = functools.partial(turn_on, setting=setting)
    exact = gradients(name)
    uncompiled = error(gradients(name, turn), exact)
    gradckpt.stats.reset()
    return uncompiled, error(gradients(name, turn, backend), exact), gradckpt.stats()["compiled_tensors"]


def is_in_bounds(uncompiled, compiled):
    return compiled <= 1.5 * uncompiled + 1e-4
