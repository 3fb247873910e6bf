"""gradckpt.apply: which modules a rule chooses, what a chosen module does, and that it can be undone."""

import collections
import copy
import gc
import inspect
import io
import os
import pickle
import re
import weakref

import pytest
import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

import gradckpt  # noqa: E402
from gradckpt.caches import WithCaches  # noqa: E402
from gradckpt.kinds import KINDS, MEGATRON, Tree  # noqa: E402

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


# ---- kinds ----

#: What apply(model, kind) finds: the kind's classes, and how many modules.
FOUND = {
    "llama": {"layer": "LlamaDecoderLayer 2", "attention": "LlamaAttention 2", "mlp": "LlamaMLP 2"},
    "qwen3": {"layer": "Qwen3DecoderLayer 2", "attention": "Qwen3Attention 2", "mlp": "Qwen3MLP 2"},
    "mistral": {"layer": "MistralDecoderLayer 2", "attention": "MistralAttention 2", "mlp": "MistralMLP 2"},
    "gemma2": {"layer": "Gemma2DecoderLayer 2", "attention": "Gemma2Attention 2", "mlp": "Gemma2MLP 2"},
    "gpt2": {"layer": "GPT2Block 2", "attention": "GPT2Attention 2", "mlp": "GPT2MLP 2"},
    "opt": {"layer": "OPTDecoderLayer 2", "attention": "OPTAttention 2"},
    "bert": {"layer": "BertLayer 2", "attention": "BertSelfAttention 2"},
    "t5": {"layer": "T5Block 4", "attention": "T5Attention 6", "mlp": "T5DenseActDense 4"},
    "vit": {"layer": "ViTLayer 2", "attention": "ViTAttention 2", "mlp": "ViTMLP 2"},
    "clip": {"layer": "CLIPEncoderLayer 4", "attention": "CLIPAttention 4", "mlp": "CLIPMLP 4"},
    "whisper": {"layer": "WhisperDecoderLayer WhisperEncoderLayer 4", "attention": "WhisperAttention 6"},
    "mixtral": {
        "layer": "MixtralDecoderLayer 2",
        "attention": "MixtralAttention 2",
        "moe": "MixtralSparseMoeBlock 2",
        "moe_act": "SiLUActivation 2",
    },
    "qwen2_moe": {
        "layer": "Qwen2MoeDecoderLayer 2",
        "attention": "Qwen2MoeAttention 2",
        "moe": "Qwen2MoeSparseMoeBlock 2",
        "moe_act": "SiLUActivation 2",
        "shared_experts": "Qwen2MoeMLP 2",
    },
    "deepseek_v3": {
        "layer": "DeepseekV3DecoderLayer 2",
        "attention": "DeepseekV3Attention 2",
        "mlp": "DeepseekV3MLP 1",
        "moe": "DeepseekV3MoE 1",
        "moe_act": "SiLUActivation 1",
        "shared_experts": "DeepseekV3MLP 1",
        "mla_up_proj": "Linear 4",
    },
    "mamba": {"layer": "MambaBlock 2"},
    "gpt_oss": {"layer": "GptOssDecoderLayer 2", "attention": "GptOssAttention 2", "moe": "GptOssMLP 2"},
    "torch": {"layer": "TransformerEncoderLayer 2", "attention": "MultiheadAttention 2"},
}

#: Norms: outside attention, MLPs and mixtures of experts, final ones included.
NORMS = {"gemma2": 9, "mamba": 3, "t5": 12, "clip": 11, "whisper": 12, "torch": 4}


@pytest.mark.parametrize("name", MODELS)
def test_kinds(name):
    model = build(name)
    tree = Tree(model)
    modules = dict(tree.names)
    found = {}
    for kind in dict.fromkeys([*KINDS, *MEGATRON]):
        names = tree.of_kind(kind)
        classes = sorted({type(modules[each]).__name__ for each in names})
        if names:
            found[kind] = " ".join([*classes, str(len(names))])
    assert found.pop("core_attn", None) == found.get("attention")
    assert found.pop("layernorm") == found["norm"]
    apart = [kind for kind in KINDS if kind != "layer" and kind in found]
    assert len(names_of(model, apart)) == sum(len(tree.of_kind(kind)) for kind in apart)  # and none inside another
    assert found.pop("norm").split()[-1] == str(NORMS.get(name, 5))
    assert found == FOUND[name]


class Attention(nn.Module):  # as in timm
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)


class Gated(nn.Module):  # known by its parts alone
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList([Mlp(), Mlp()])


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(8), Attention(), nn.LayerNorm(8), mlp


class MyBlock(Block):
    pass


class Mine(MyBlock):  # its name says nothing, its base does
    pass


class ResidualMLP(nn.Module):  # the MLP is the module inside
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Mlp()


class FusedMoE(nn.Module):  # known by its name alone
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 16)


class Odd(nn.Module):  # the parts of an MLP, and an attention
    def __init__(self):
        super().__init__()
        self.attn, self.fc1, self.fc2 = Attention(), nn.Linear(8, 16), nn.Linear(16, 8)


class LayerNormLinear(nn.Module):  # of Transformer Engine
    def __init__(self):
        super().__init__()
        self.layer_norm_weight, self.weight = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8, 8))


class PreLayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(8), nn.Linear(8, 8)


def test_what_is_no_norm_and_no_layer():
    attention, norm = Attention(), nn.LayerNorm(8)
    attention.norm = norm
    pair = type("PairBlock", (nn.Sequential,), {})(Block(Mlp()), Block(Mlp()))
    tree = Tree(nn.Sequential(LayerNormLinear(), PreLayerNorm(), attention, norm, pair))
    assert tree.of_kind("norm") == ["1.norm", *(f"4.{i}.norm{j}" for i in range(2) for j in (1, 2))]
    assert tree.of_kind("layer") == ["4"]


def test_kinds_of_modules_like_timm_and_own_ones():
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model = nn.Sequential(Block(Mlp()), MyBlock(Gated()), Mine(Mixture()), plain, ResidualMLP(), FusedMoE(), Odd())
    tree = Tree(model)
    assert tree.of_kind("layer") == ["0", "1", "2"]
    assert tree.of_kind("attention") == ["0.attn", "1.attn", "2.attn", "6.attn"]
    assert tree.of_kind("mlp") == ["0.mlp", "1.mlp", "4.mlp"]  # the experts belong to the mixture
    assert tree.of_kind("moe") == ["2.mlp", "5"]
    assert tree.of_kind("norm") == [*(f"{i}.norm{j}" for i in range(3) for j in (1, 2)), "4.norm"]


# ---- gradients ----


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral", "torch"])
@pytest.mark.parametrize("rules", ["layer", ["attention", "norm"], "mlp or moe"])
def test_uncompressed_gradients_are_those_of_no_checkpointing(name, rules, monkeypatch):
    model = build(name)
    kinds = dict(Tree(model).counts())
    if rules == "mlp or moe":
        rules = next((kind for kind in ("mlp", "moe") if kind in kinds), "norm")
    expected = gradients(model)
    handle = gradckpt.apply(model, rules)
    assert len(handle.modules) == sum(kinds[kind] for kind in ([rules] if isinstance(rules, str) else rules))

    runs = collections.Counter()
    for module in (model.get_submodule(each) for each in handle.modules):
        if type(module) not in runs:
            count_runs(type(module), runs, monkeypatch)
    assert_same(gradients(model), expected)
    for kind, count in runs.items():
        applied = sum(type(model.get_submodule(each)) is kind for each in handle.modules)
        assert count == 2 * applied, kind


def count_runs(kind, runs, monkeypatch):
    forward = kind.forward
    runs[kind] = 0

    def counted(self, *args, **kwargs):
        runs[kind] += 1
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", counted)


def test_compressed_inputs():
    model = build("llama")
    expected_loss, expected = gradients(model)
    gradckpt.reset_stats()
    gradckpt.apply(model, {"attention": {"codec": "int8", "min_numel": 0}, "mlp": "raw"})
    loss, found = gradients(model)
    assert gradckpt.stats()["compressed"] == 4
    assert loss == expected_loss  # exact mode
    for name, gradient in found.items():
        cosine = nn.functional.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
        assert cosine > 0.999, name


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("rules", ["layer", "attention"])
def test_a_cache_is_filled_once(name, rules):
    """The forward writes to the cache; the recompute, in which the keys would be there twice, to a copy."""
    model = build(name)

    def cache_of():
        torch.manual_seed(1)
        ids = torch.randint(3, VOCAB, (2, LENGTH))
        out = model(input_ids=ids, labels=ids, use_cache=True)
        return out, out.past_key_values

    model.zero_grad()
    out, _ = cache_of()
    out.loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    gradckpt.apply(model, rules)
    model.zero_grad()
    out, cache = cache_of()
    assert cache.get_seq_length() == LENGTH
    out.loss.backward(retain_graph=True)
    assert cache.get_seq_length() == LENGTH
    assert_same(
        (out.loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}),
        (out.loss, expected),
    )
    out.loss.backward()  # each recompute gets a copy of its own


@pytest.mark.parametrize("rules", ["layer", "moe", ["moe_act", "norm"]])
def test_what_transformers_records_inside(rules):
    """The load-balancing loss is of router logits that a hook takes out of the mixtures."""
    model = build("mixtral")
    model.config.output_router_logits = True
    expected = gradients(model)
    gradckpt.apply(model, rules)
    assert_same(gradients(model), expected)


def test_a_cache_with_a_prefix_keeps_it():
    model = build("llama")
    torch.manual_seed(1)
    prefix, ids = torch.randint(3, VOCAB, (2, 4)), torch.randint(3, VOCAB, (2, LENGTH))
    found = []
    for rules in (None, "layer"):
        with torch.no_grad():
            cache = model(input_ids=prefix, use_cache=True).past_key_values
        if rules:
            gradckpt.apply(model, rules)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, past_key_values=cache).loss
        loss.backward()
        found.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    assert_same(found[1], found[0])


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
    with gradckpt.apply(model, rules, **options) as handle:
        return list(handle.modules)


def regions_of(model, x=None):
    """The number of regions in one forward and backward."""
    gradckpt.reset_stats()
    out = model(torch.randn(2, 8) if x is None else x)
    if out.requires_grad:
        out.sum().backward()
    return gradckpt.stats()["regions"]


def test_only_training_with_grad_is_checkpointed(monkeypatch):
    model = Net()
    gradckpt.apply(model, "layers.*.0")
    assert regions_of(model) == 4
    model.eval()
    model.layers[0].train()
    assert regions_of(model) == 1
    monkeypatch.setattr(gradckpt, "checkpoint", None)
    with torch.no_grad():
        model(torch.randn(2, 8))
    model.eval()(torch.randn(2, 8)).sum().backward()


def test_hooks_of_the_module_run_once_and_those_inside_twice():
    model = Net(1)
    calls = []
    model.layers[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model.layers[0].register_forward_hook(lambda *_: calls.append("after"))
    model.layers[0][0].register_forward_hook(lambda *_: calls.append("inside"))
    gradckpt.apply(model, "layers.0")
    model(torch.randn(2, 8)).sum().backward()
    assert calls == ["before", "inside", "after", "inside"]


def test_state_dict_parameters_and_types_are_unchanged():
    model = build("llama")
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    gradckpt.apply(model, ["layer"])
    assert list(model.state_dict()) == keys
    assert dict(model.named_parameters()) == parameters
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    model.load_state_dict(model.state_dict())
    assert next(model.to(torch.float64).parameters()).dtype == torch.float64
    loss_of(model).backward()


def test_a_copy_runs_its_own_forward():
    model = Net()
    gradckpt.apply(model, "layers.*.0")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    x = torch.randn(2, 8)
    assert not twin(x).any()
    assert model(x).any()
    assert regions_of(twin) == 4
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
    gradckpt.unapply(twin)
    assert (regions_of(twin), regions_of(model)) == (0, 4)
    with pytest.raises(ValueError, match="no module of this Net is checkpointed"):
        gradckpt.unapply(twin)


def test_a_copy_of_one_layer_runs_its_own_forward():
    model = Net()
    gradckpt.apply(model, "layers.*.0")
    layer = copy.deepcopy(model.layers[0][0])
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    assert not layer(torch.randn(2, 8)).any()


@pytest.mark.parametrize("save", ["pickle", "torch"])
def test_pickle(save):
    model = Net()
    gradckpt.apply(model, {"layers.*.0": "int8"}, preserve_rng_state=False)
    if save == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        twin = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    del model
    gc.collect()
    assert regions_of(twin) == 4
    assert all(p.grad is not None for p in twin.parameters())


def test_a_replica_of_dataparallel_runs_its_own_forward():
    model = nn.Linear(8, 8)
    handle = gradckpt.apply(model, model)
    first = model._replicate_for_data_parallel()
    first.mark = "first"
    replica = first._replicate_for_data_parallel()
    assert replica.mark == "first"
    replica.weight, replica.bias = torch.zeros(8, 8, requires_grad=True), torch.zeros(8, requires_grad=True)
    assert regions_of(replica) == 1
    assert replica.weight.grad is not None
    assert model.weight.grad is None
    handle.remove()
    assert model._replicate_for_data_parallel().forward.__self__ is not model


def test_parametrized_modules():
    torch.manual_seed(0)
    model = Net()
    before = nn.utils.parametrizations.weight_norm(model.layers[0][0])
    handle = gradckpt.apply(model, nn.Linear)
    nn.utils.parametrizations.weight_norm(model.layers[1][0])
    assert list(handle.modules) == [f"layers.{i}.0" for i in range(4)]
    assert regions_of(model) == 4
    assert before.parametrizations.weight.original0.grad is not None
    assert regions_of(copy.deepcopy(model)) == 4
    nn.utils.parametrize.remove_parametrizations(model.layers[0][0], "weight")
    assert regions_of(model) == 4


def test_running_statistics_are_updated_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    handle = gradckpt.apply(model, nn.BatchNorm1d)
    regions_of(model)
    assert model[1].num_batches_tracked == 1
    handle.remove()
    gradckpt.apply(model, nn.BatchNorm1d, buffers="torch")
    regions_of(model)
    assert model[1].num_batches_tracked == 3


def test_a_cache_does_not_hide_the_module_from_the_buffers():
    """Without running statistics nothing is watched: no hook on every module call."""
    assert gradckpt.buffers.enter(WithCaches(nn.Linear(8, 8).forward)) is None


class Words(nn.Module):
    """Keywords that checkpoint has too."""

    def forward(self, x, *, compress=1.0, function=1.0, buffers=None):
        return x * compress * function + buffers


def test_keywords_of_the_modules_own():
    model = nn.ModuleList([Words()])
    gradckpt.apply(model, Words)
    x = torch.randn(8, requires_grad=True)
    scale = torch.full((), 3.0, requires_grad=True)
    out = model[0](x, compress=scale, function=2.0, buffers=1.0)
    out.sum().backward()
    assert torch.equal(out, x * 6 + 1)
    assert torch.equal(x.grad, torch.full((8,), 6.0))
    assert scale.grad is not None
    assert list(inspect.signature(model[0].forward).parameters) == ["x", "compress", "function", "buffers"]


def test_options_reach_checkpoint():
    entered = []

    class Note:
        def __init__(self, what):
            self.what = what

        def __enter__(self):
            entered.append(self.what)

        def __exit__(self, *_):
            pass

    model = Net(2)
    options = {"context_fn": lambda: (Note("forward"), Note("recompute")), "early_stop": False}
    handle = gradckpt.apply(
        model, {"layers.0.0": options, "layers.1.0": None}, compress="int8", determinism_check="none"
    )
    first, second = handle.modules.values()
    assert (first["compress"].codec, first["early_stop"], first["determinism_check"]) == ("int8", False, "none")
    assert second == {"compress": None, "determinism_check": "none"}
    regions_of(model)
    assert entered == ["forward", "recompute"]


def test_remove_leaves_everything_as_it_was():
    model = Net()
    inner = model.layers[1].forward
    model.layers[1].forward = own = lambda x: inner(x) * 2  # on the instance, as accelerate's hooks do
    x = torch.randn(2, 8)
    expected = model(x)
    before = [dict(vars(module)) for module in model.modules()]
    handle = gradckpt.apply(model, ["layers.?"])
    assert regions_of(model) == 4
    assert model.layers[1].forward is not own
    assert torch.equal(model(x), expected)
    handle.remove()
    handle.remove()
    after = [dict(vars(module)) for module in model.modules()]
    assert [list(each) for each in after] == [list(each) for each in before]
    assert all(new[key] is old[key] for new, old in zip(after, before, strict=True) for key in old)
    assert handle.modules == {}
    assert repr(handle) == "<gradckpt apply: removed from Net>"
    with gradckpt.apply(model, ["layers.?"]) as handle:
        assert regions_of(model) == 4
    assert regions_of(model) == 0


def test_remove_below_a_later_wrapper():
    model = Net(1)
    handle = gradckpt.apply(model, "layers.0")
    ours = model.layers[0].forward
    model.layers[0].forward = theirs = lambda x: ours(x)
    assert regions_of(model) == 1
    handle.remove()
    assert model.layers[0].forward is theirs
    assert regions_of(model) == 0


def test_neither_handle_nor_region_keeps_the_model_alive():
    model = Net()
    handle = gradckpt.apply(model, "layers.?")
    forward, seen = model.layers[0].forward, weakref.ref(model.layers[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert seen() is None  # without the garbage collector: there is no cycle
    finally:
        gc.enable()
    handle.remove()
    with pytest.raises(ReferenceError, match="Sequential of this checkpointed forward is gone"):
        forward(torch.randn(2, 8))


def test_repr_is_a_table():
    model = build("llama")
    handle = gradckpt.apply(model, {"attention": {"codec": "int4", "replay": True}, "mlp": {"early_stop": False}})
    assert repr(handle).splitlines() == [
        "<gradckpt apply: 4 modules of LlamaForCausalLM",
        "  model.layers.*.self_attn     2 x LlamaAttention  int4, replay=True",
        "  model.layers.*.mlp           2 x LlamaMLP        uncompressed, early_stop=False>",
    ]
    assert (
        repr(model.model.layers[0].mlp.forward) == "<checkpointed forward of LlamaMLP: uncompressed, early_stop=False>"
    )


def test_inside_torch_compile():
    torch.manual_seed(0)
    model, x = Net(2), torch.randn(2, 8)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    gradckpt.apply(model, "layers.?")
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


# ---- selectors ----


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (nn.Linear, "0.0 1.0 2.0 3.0 4.0 5.0"),
        ((nn.Linear, nn.Tanh), "0.0 0.1 1.0 1.1 2.0 2.1 3.0 3.1 4.0 4.1 5.0 5.1"),
        ("layers.?", "0 1 2 3 4 5"),
        ("*.[12].1", "1.1 2.1"),
        (re.compile(r"layers\.[0-4]\.0"), "0.0 1.0 2.0 3.0 4.0"),
        (lambda name, module: name.endswith("5"), "5"),
        (["layers.1", "layers.0"], "0 1"),
        (gradckpt.every(2, "layers.?"), "0 2 4"),
        (gradckpt.every(3, nn.Linear, offset=1), "1.0 4.0"),
        (gradckpt.m_of_n(2, 3, "layers.?"), "0 1 3 4"),
        (gradckpt.m_of_n(1, 2, gradckpt.every(2, "layers.?")), "0 4"),
        ({"layers.0": "skip", "layers.?": "int8"}, "1 2 3 4 5"),
        ({gradckpt.every(2, "layers.?"): "int8", "layers.?": None}, "0 1 2 3 4 5"),
    ],
)
def test_selectors(rules, expected):
    assert names_of(Net(6), rules) == [f"layers.{place}" for place in expected.split()]


def test_the_first_rule_wins():
    rules = {"layers.0": "int4", gradckpt.every(2, "layers.?"): "fp8", "layers.?": True}
    found = gradckpt.apply(Net(), rules).modules
    assert [settings["compress"].codec for settings in found.values()] == ["int4", "int8", "fp8_e4m3", "int8"]


def test_a_module_and_the_model_itself():
    model = Net(2)
    assert names_of(model, model.layers[1]) == ["layers.1"]
    assert names_of(model.layers[1], "") == [""]
    assert names_of(model.layers[1], nn.Sequential) == [""]
    assert names_of(model.layers[1], "*") == ["0", "1"]
    assert names_of(model, "*.0.*") == ["layers.0.0", "layers.0.1"]


def test_skip_is_for_the_module_and_not_for_those_inside():
    assert names_of(Net(2), {"layers.0": "skip", nn.Linear: None}) == ["layers.0.0", "layers.1.0"]


def test_megatron_names_on_a_mixture_of_experts():
    model = build("deepseek_v3")
    names = names_of(model, ["core_attn", "mlp", "shared_experts", "moe_act", "layernorm"])
    assert "model.layers.1.mlp.shared_experts" in names
    assert "model.layers.0.mlp" in names
    expected = gradients(model)
    with gradckpt.apply(model, ["mla_up_proj", "moe"]):
        assert_same(gradients(model), expected)


# ---- shared modules ----


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first
        self.third = nn.Linear(8, 8)

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def test_a_shared_module_is_wrapped_once():
    model = Twice()
    handle = gradckpt.apply(model, nn.Linear)
    assert list(handle.modules) == ["first", "third"]
    assert regions_of(model) == 3
    handle.remove()
    assert list(gradckpt.apply(model, "second").modules) == ["second"]


def test_places_count_a_shared_module_once():
    assert names_of(Twice(), gradckpt.every(2, nn.Linear, offset=1)) == ["third"]


def test_nested_regions_when_they_are_asked_for():
    torch.manual_seed(0)
    model, x = Net(2), torch.randn(2, 8)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    gradckpt.apply(model, ["layers.?", nn.Linear], nested=True)
    assert regions_of(model, x) == 4 + 2  # the inner ones again in the recompute of the outer
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


# ---- errors ----


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ("attention", ValueError, "no module matches 'attention'; kinds in this Net: none; names: 'layers',"),
        ("nothing.*", ValueError, r"no module matches 'nothing\.\*'; .*names: 'layers', 'layers\.0', 'layers\.0\.0'"),
        ("?.0", ValueError, r"a pattern is for the whole name, so write '\*\.\?\.0'"),
        (nn.Conv2d, ValueError, "no module matches Conv2d"),
        (re.compile("layer"), ValueError, r"no module matches re\.compile\('layer'\)"),
        (gradckpt.every(2, "layers.?", offset=9), ValueError, r"every\(2, 'layers\.\?', offset=9\).* matches 4"),
        ("moe_act", ValueError, "'moe_act'; its experts have no activation module"),
        ("shared_experts", ValueError, "no mixture of experts with shared experts"),
        ({}, ValueError, "given no rules"),
        ([], ValueError, "given no rules"),
        ({"layers.0": "skip"}, ValueError, 'every rule says "skip"'),
        ({"layers.?": "int8", "layers.0": "skip"}, ValueError, r"every module that 'layers\.0' matches is taken"),
        ({"layers.?": "int9"}, ValueError, "unknown codec 'int9'; choose one of"),
        ({"layers.?": {"compres": "int8"}}, ValueError, "unknown option 'compres'; the options are: compress, "),
        ({"layers.?": {"early_stop": True, "replay": True}}, ValueError, r"belongs into compress={\"replay\": \.\.\.}"),
        ({"layers.?": {"use_reentrant": True}}, ValueError, "unknown option 'use_reentrant'"),
        ({"layers.?": {"early_stop": 1}}, TypeError, "early_stop is True or False, not 1"),
        ({"layers.?": {"buffers": "twice"}}, ValueError, "buffers is one of once, torch; not 'twice'"),
        ({"layers.?": {"determinism_check": "some"}}, ValueError, "determinism_check is one of default, none"),
        ({"layers.?": {"context_fn": 1}}, TypeError, "context_fn is a function"),
        ({"layers.?": 8}, TypeError, "compress= takes"),
        ({3: "int8"}, TypeError, "modules are selected by .* not by 3"),
        (("layers.?", "layers.0"), TypeError, "write several selectors as a list"),
        (dict, TypeError, "must be one of modules"),
        (nn.ModuleList, ValueError, r"'layers' \(ModuleList\) has no forward.*select what it holds: 'layers\.\*'"),
        (
            ["layers.0", nn.Linear],
            ValueError,
            r"'layers\.0\.0' \(Linear\) is inside 'layers\.0' \(Sequential\), and bo",
        ),
    ],
    ids=str,
)
def test_errors_leave_the_model_as_it_was(rules, error, message):
    model = Net()
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(error, match=message):
        gradckpt.apply(model, rules)
    assert [dict(vars(module)) for module in model.modules()] == before


def test_errors_of_arguments():
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not list"):
        gradckpt.apply([Net()], "layers.?")
    with pytest.raises(ValueError, match="unknown option 'codec'"):
        gradckpt.apply(Net(), "layers.?", codec="int8")
    with pytest.raises(ValueError, match="k is 1 or more"):
        gradckpt.every(0, "layer")
    with pytest.raises(ValueError, match="offset is 0 or more"):
        gradckpt.every(1, "layer", offset=-1)
    with pytest.raises(TypeError, match="k is an int"):
        gradckpt.every(1.5, "layer")
    with pytest.raises(ValueError, match="3 is more than 2"):
        gradckpt.m_of_n(3, 2, "layer")


def test_a_kind_that_has_no_module_says_where_it_is():
    with pytest.raises(ValueError, match=r'feed-forward has no module of its own.*"layer" \(2\), "attention" \(2\)'):
        gradckpt.apply(build("bert"), "mlp")


def test_twice_is_refused():
    model = Net()
    handle = gradckpt.apply(model, "layers.0")
    with pytest.raises(ValueError, match=r"'layers\.0' \(Sequential\) is checkpointed .*handle\.remove\(\) first"):
        gradckpt.apply(model, "layers.1")
    handle.remove()
    gradckpt.apply(model, "layers.1")


def test_two_settings_for_a_shared_module_are_refused():
    for rules in ({"first": "int8", "second": "int4"}, {"first": "skip", nn.Linear: None}):
        with pytest.raises(ValueError, match="'first' and 'second' are one Linear, and the rules give it different"):
            gradckpt.apply(Twice(), rules)
    assert names_of(Twice(), {"first": "int8", "second": "int8"}) == ["first"]


@pytest.mark.parametrize("rules", ["layer", "attention", "*.layers.0.mlp"])
def test_a_model_that_is_enabled_is_refused(rules):
    model = build("llama")
    enabled = gradckpt.enable(model)
    with pytest.raises(ValueError, match=r"gradient_checkpointing is on .*gradckpt\.disable\(model\)"):
        gradckpt.apply(model, rules)
    enabled.remove()
    gradckpt.apply(model, rules)


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    @gradckpt.checkpoint(compress="int8")
    def forward(self, x):
        return self.inner(x)


def test_what_is_checkpointed_otherwise_is_refused():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    with pytest.raises(ValueError, match=r"'0' \(Decorated\) is checkpointed already: its forward is decorated"):
        gradckpt.apply(nn.Sequential(Decorated()), Decorated)
    with pytest.raises(ValueError, match=r"'0\.inner' \(Linear\) is inside '0' \(Decorated\), and '0' .*nested=True"):
        gradckpt.apply(nn.Sequential(Decorated()), nn.Linear)
    with pytest.raises(ValueError, match=r"'0' \(Decorated\) is inside the model itself \(Sequential\), and '0'"):
        gradckpt.apply(nn.Sequential(Decorated()), "")
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match="torch's CheckpointWrapper; leave it out"):
        gradckpt.apply(wrapped, nn.Linear)
    assert names_of(nn.Sequential(Decorated()), nn.Linear, nested=True) == ["0.inner"]


def test_models_with_a_flag_of_their_own():
    """timm's and diffusers' flags lie on the module that checkpoints what is inside it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.grad_checkpointing = True
    with pytest.raises(ValueError, match=r"^gradckpt: '1' .* inside .*model\.set_grad_checkpointing\(False\); or pass"):
        gradckpt.apply(model, "1")
    gradckpt.apply(model, "1", nested=True).remove()
    model.grad_checkpointing = False
    model.gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"\(diffusers\) model\.disable_gradient_checkpointing\(\)"):
        gradckpt.apply(model, "1")
