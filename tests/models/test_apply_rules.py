"""enable(model, modules=...): which modules a selector chooses, and what is refused; the kinds of
modules in models of transformers and others, gradients, caches."""

import collections
import functools
import re

import model_families
import pytest
import torch
from model_families import FAMILIES, LENGTH, VOCAB, assert_same
from tiny_models import MODELS, Net, build, gradients, names_of, regions_of
from torch import nn

import gradckpt
from gradckpt._models.kinds import KINDS, Tree, repeated_blocks

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
        (gradckpt.selectors.every(2, "layers.?"), "0 2 4"),
        (gradckpt.selectors.every(3, nn.Linear, offset=1), "1.0 4.0"),
        (gradckpt.selectors.m_of_n(2, 3, "layers.?"), "0 1 3 4"),
        (gradckpt.selectors.m_of_n(1, 2, gradckpt.selectors.every(2, "layers.?")), "0 4"),
        ({"layers.0": "skip", "layers.?": "int8"}, "1 2 3 4 5"),
        ({gradckpt.selectors.every(2, "layers.?"): "int8", "layers.?": None}, "0 1 2 3 4 5"),
    ],
)
def test_selectors(rules, expected):
    assert names_of(Net(6), rules) == [f"layers.{place}" for place in expected.split()]


def test_the_first_rule_wins():
    rules = {"layers.0": "int4", gradckpt.selectors.every(2, "layers.?"): "fp8", "layers.?": True}
    model = Net()
    found = gradckpt.enable(model, None, modules=rules).modules
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
    handle = gradckpt.enable(model, None, modules=nn.Linear)
    assert list(handle.modules) == ["first", "third"]
    assert regions_of(model) == 3
    handle.remove()
    assert list(gradckpt.enable(model, None, modules="second").modules) == ["first"]
    assert names_of(Twice(), gradckpt.selectors.every(2, nn.Linear, offset=1)) == ["third"]


# ---- errors ----


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ("attention", ValueError, "'attention'; kinds in this Net: none; choose by class instead, one of "),
        ("int8", ValueError, "no module matches 'int8'; it is a codec: pass compress='int8'"),
        ("nothing.*", ValueError, r"no module matches 'nothing\.\*'; .*names: 'layers', 'layers\.0', 'layers\.0\.0'"),
        ("?.0", ValueError, r"a pattern is for the whole name, so write '\*\.\?\.0'"),
        (re.compile("layer"), ValueError, r"no module matches re\.compile\('layer'\)"),
        (
            gradckpt.selectors.every(2, "layers.?", offset=9),
            ValueError,
            r"every\(2, 'layers\.\?', offset=9\).* matches 4",
        ),
        ("moe", ValueError, "no module matches 'moe'; it has no mixture of experts"),
        ({}, ValueError, "modules= is empty"),
        ({"layers.0": "skip"}, ValueError, 'every rule says "skip"'),
        ({"layers.?": "int8", "layers.0": "skip"}, ValueError, r"every module that 'layers\.0' matches is taken"),
        ({"layers.?": {"compres": "int8"}}, ValueError, r"unknown option 'compres'; did you mean 'compress'\?"),
        (
            {"layers.?": {"early_stop": True, "fake_quantize": True}},
            ValueError,
            "'fake_quantize' is a field of compress=",
        ),
        ({"layers.?": {"use_reentrant": True}}, ValueError, "unknown option 'use_reentrant'"),
        ({"layers.?": {"early_stop": 1}}, TypeError, "early_stop is True or False, not 1"),
        ({"layers.?": {"buffers": "twice"}}, ValueError, 'buffers is "once" or "torch", not \'twice\''),
        ({"layers.?": {"determinism_check": "some"}}, ValueError, 'determinism_check is "default", "warn" or "none"'),
        ({"layers.?": {"context_fn": 1}}, TypeError, "context_fn is a function"),
        ({3: "int8"}, TypeError, "modules are selected by .* not by 3"),
        (("layers.?", "layers.0"), TypeError, "or a list of selectors"),
        (dict, TypeError, "pass a subclass of torch.nn.Module"),
        (
            nn.ModuleList,
            ValueError,
            r"'layers' \(ModuleList\) has no forward.*select the modules in it by class, modules=",
        ),
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
        gradckpt.enable(model, None, modules=rules)
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda each: gradckpt.enable([Net()], modules="layers.?"), TypeError, r"takes a torch\.nn\.Module, not list"),
        (lambda each: each.every(0, "layer"), ValueError, "k is 1 or more"),
        (lambda each: each.every(1, "layer", offset=-1), ValueError, "offset is 0 or more"),
        (lambda each: each.every(1.5, "layer"), TypeError, "k is an int"),
        (lambda each: each.m_of_n(3, 2, "layer"), ValueError, "3 is more than 2"),
    ],
)
def test_errors_of_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(gradckpt.selectors)


def test_a_kind_that_has_no_module_says_where_it_is():
    with pytest.raises(ValueError, match=r'feed-forward has no module of its own.*"layer" \(3\), "attention" \(3\)'):
        gradckpt.enable(build("bert"), None, modules="mlp")


def test_two_settings_for_a_shared_module_are_refused():
    for rules in ({"first": "int8", "second": "int4"}, {"first": "skip", nn.Linear: None}):
        with pytest.raises(ValueError, match="'first' and 'second' are one Linear, and the rules give it different"):
            gradckpt.enable(Twice(), None, modules=rules)
    assert names_of(Twice(), {"first": "int8", "second": "int8"}) == ["first"]


@pytest.mark.parametrize("rules", ["layer", "attention", "*.layers.0.mlp"])
def test_a_model_that_is_enabled_gets_other_modules(rules):
    model = build("llama")
    handle = gradckpt.enable(model)
    layers = list(handle.modules)
    gradckpt.enable(model, modules=rules)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    with pytest.raises(ValueError, match="no module matches"):
        gradckpt.enable(model, modules="nothing")
    assert handle.modules
    gradckpt.enable(model)
    assert list(handle.modules) == layers
    model_families.turn_off(model)
    model_families.turn_on(model)
    gradckpt.disable(model)
    with pytest.raises(ValueError, match=r"gradient_checkpointing is on; .*activation_checkpointing_disable\(\)"):
        gradckpt.enable(model, modules=rules)


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
        gradckpt.enable(nn.Sequential(Decorated()), None, modules=Decorated)
    with pytest.raises(ValueError, match=r"'0\.inner' \(Linear\) is inside '0' \(Decorated\), and '0' .*decorated"):
        gradckpt.enable(nn.Sequential(Decorated()), None, modules=nn.Linear)
    with pytest.raises(ValueError, match=r"'0' \(Decorated\) is inside the model itself \(Sequential\), and '0'"):
        gradckpt.enable(nn.Sequential(Decorated()), None, modules="")
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match="torch's CheckpointWrapper; leave out apply_activation"):
        gradckpt.enable(wrapped, None, modules=nn.Linear)


def test_models_with_a_flag_of_their_own():
    """timm's and diffusers' flags lie on the module that checkpoints what is inside it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.grad_checkpointing = True
    with pytest.raises(ValueError, match=r"^gradckpt: '1' .* inside .*model\.set_grad_checkpointing\(False\)"):
        gradckpt.enable(model, None, modules="1")
    model.grad_checkpointing = False
    model.gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"in diffusers, model\.disable_gradient_checkpointing\(\)"):
        gradckpt.enable(model, None, modules="1")


PREFIX = "_checkpoint_wrapped_module."  # in names of parameters of a model with wrapped modules

# ---- kinds ----

#: What apply(model, kind) finds: of each kind the classes, and how many modules.
FOUND = {
    "llama": "layer LlamaDecoderLayer 3, attention LlamaAttention 3, mlp LlamaMLP 3",
    "qwen3": "layer Qwen3DecoderLayer 3, attention Qwen3Attention 3, mlp Qwen3MLP 3",
    "mistral": "layer MistralDecoderLayer 3, attention MistralAttention 3, mlp MistralMLP 3",
    "gemma2": "layer Gemma2DecoderLayer 3, attention Gemma2Attention 3, mlp Gemma2MLP 3",
    "gemma3": "layer Gemma3DecoderLayer 3, attention Gemma3Attention 3, mlp Gemma3MLP 3",
    "gpt2": "layer GPT2Block 3, attention GPT2Attention 3, mlp GPT2MLP 3",
    "opt": "layer OPTDecoderLayer 3, attention OPTAttention 3",
    "bert": "layer BertLayer 3, attention BertSelfAttention 3",
    "t5": "layer T5Block 4, attention T5Attention 6, mlp T5DenseGatedActDense 4",
    "vit": "layer ViTLayer 3, attention ViTAttention 3, mlp ViTMLP 3",
    "clip": "layer CLIPEncoderLayer 4, attention CLIPAttention 4, mlp CLIPMLP 4",
    "whisper": "layer WhisperDecoderLayer WhisperEncoderLayer 4, attention WhisperAttention 6",
    "mixtral": "layer MixtralDecoderLayer 3, attention MixtralAttention 3, moe MixtralSparseMoeBlock 3",
    "qwen3_moe": "layer Qwen3MoeDecoderLayer 3, attention Qwen3MoeAttention 3, moe Qwen3MoeSparseMoeBlock 3",
    "qwen2_moe": "layer Qwen2MoeDecoderLayer 2, attention Qwen2MoeAttention 2, moe Qwen2MoeSparseMoeBlock 2",
    "deepseek_v3": "layer DeepseekV3DecoderLayer 2, attention DeepseekV3Attention 2, mlp DeepseekV3MLP 1, "
    "moe DeepseekV3MoE 1",
    "mamba": "layer MambaBlock 2",
    "gpt_oss": "layer GptOssDecoderLayer 2, attention GptOssAttention 2, moe GptOssMLP 2",
    "torch": "layer TransformerEncoderLayer 2, attention MultiheadAttention 2",
}
#: Norms: outside attention, MLPs and mixtures of experts, final ones included. Of the others 7.
NORMS = {"gemma2": 13, "gemma3": 13, "bert": 8, "t5": 12, "clip": 11, "whisper": 12, "qwen2_moe": 5}
NORMS |= {"deepseek_v3": 5, "mamba": 3, "gpt_oss": 5, "torch": 4}


@pytest.mark.parametrize("name", MODELS)
def test_kinds(name):
    model = build(name)
    tree = Tree(model)
    modules, found = dict(tree.names), []
    names = {kind: tree.of_kind(kind) for kind in KINDS if tree.of_kind(kind)}
    for kind in names.keys() - {"norm"}:
        classes = sorted({type(modules[each]).__name__ for each in names[kind]})
        found.append(f"{kind} {' '.join(classes)} {len(names[kind])}")
    assert sorted(found) == sorted(FOUND[name].split(", "))
    assert len(names["norm"]) == NORMS.get(name, 7)
    apart = names.keys() - {"layer"}
    assert len(names_of(model, sorted(apart))) == sum(len(names[kind]) for kind in apart)  # and none inside another


@pytest.mark.parametrize("name", MODELS)
def test_the_repeated_block_is_the_layer(name):
    model = build(name)
    found = repeated_blocks(model)
    assert sorted(each for blocks in found for each in blocks.names) == sorted(Tree(model).of_kind("layer"))
    assert len(found) == (2 if name == "whisper" else 1)


@functools.cache
def kind_of(name, base):
    return type(name, (base,), {})


def made(name, base=nn.Module, **parts):
    """A module of the class with this name, whose parts are these."""
    module = kind_of(name, base)()
    for key, part in parts.items():
        setattr(module, key, part)
    return module


def residual(width):
    return made("Residual", parts=nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))


def blocks_of(model):
    return {blocks.kind.__name__: blocks.names for blocks in repeated_blocks(model)}


def test_repeated_blocks_of_models_in_stages():
    """Of a vision model in stages the blocks in them, a stage with one block or none among them."""
    depths = {"two": 2, "three": 3, "one": 1}
    stages = nn.ModuleDict()
    for name, depth in depths.items():
        blocks = nn.Sequential(*(residual(8) for _ in range(depth)))
        stages[name] = made("Stage", norm=nn.LayerNorm(8), blocks=blocks)
    assert blocks_of(stages) == {"Residual": ["two.blocks.0", "two.blocks.1", *(f"three.blocks.{i}" for i in range(3))]}
    rows = nn.Sequential(*(nn.Sequential(*(residual(8) for _ in range(depth))) for depth in (2, 2, 1, 1)))
    assert blocks_of(rows) == {"Residual": ["0.0", "0.1", "1.0", "1.1"]}


def test_repeated_blocks_are_not_their_own_steps():
    """A block of three convolutions, each with norm and activation, is no stage."""
    norm_act = kind_of("NormAct", nn.Sequential)  # as torchvision's Conv2dNormActivation

    def inverted():
        steps = (norm_act(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(3))
        return made("Inverted", conv=nn.Sequential(*steps))

    model = nn.Sequential(norm_act(nn.Linear(8, 8)), *(inverted() for _ in range(3)), norm_act(nn.Linear(8, 8)))
    assert next(iter(blocks_of(model))) == "Inverted"
    assert blocks_of(model)["Inverted"] == ["1", "2", "3"]


def test_a_class_that_is_also_inside_of_blocks_is_none_to_choose():
    """enable(modules=) would find it there, too."""
    layers = nn.ModuleList(mixture() for _ in range(3))
    more = nn.ModuleList(mlp() for _ in range(4))
    assert list(blocks_of(nn.ModuleDict({"layers": layers, "more": more}))) == ["Mixture"]


def test_repeated_blocks_share_nothing_and_hold_the_experts():
    """Experts belong to their layer; a head beside many layers is no rival; equals are."""
    layers = nn.ModuleList(mixture() for _ in range(3))
    model = nn.ModuleDict({"layers": layers, "head": nn.Sequential(gated(), gated())})
    layers.append(layers[0])
    assert blocks_of(model) == {"Mixture": ["layers.0", "layers.1", "layers.2"], "Gated": ["head.0", "head.1"]}
    wide = nn.ModuleDict(
        {"layers": nn.ModuleList(residual(64) for _ in range(2)), "head": nn.Sequential(gated(), gated())}
    )
    assert blocks_of(wide) == {"Residual": ["layers.0", "layers.1"]}
    assert blocks_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) == {}


def attention():  # as in timm
    return made("Attention", qkv=nn.Linear(8, 24), proj=nn.Linear(8, 8))


def mlp():
    return made("Mlp", fc1=nn.Linear(8, 16), act=nn.GELU(), fc2=nn.Linear(16, 8))


def gated():  # known by its parts alone
    return made("Gated", w1=nn.Linear(8, 16), w2=nn.Linear(16, 8), w3=nn.Linear(8, 16))


def mixture():
    return made("Mixture", router=nn.Linear(8, 2), experts=nn.ModuleList([mlp(), mlp()]))


def block(inner, name="Block", base=nn.Module):
    return made(name, base, norm1=nn.LayerNorm(8), attn=attention(), norm2=nn.LayerNorm(8), mlp=inner)


def test_what_is_no_norm_and_no_layer():
    weights = {"layer_norm_weight": nn.Parameter(torch.ones(8)), "weight": nn.Parameter(torch.ones(8, 8))}
    of_transformer_engine = made("LayerNormLinear", **weights)
    before = made("PreLayerNorm", norm=nn.LayerNorm(8), fn=nn.Linear(8, 8))
    shared, norm = attention(), nn.LayerNorm(8)
    shared.norm = norm
    pair = kind_of("PairBlock", nn.Sequential)(block(mlp()), block(mlp()))
    tree = Tree(nn.Sequential(of_transformer_engine, before, shared, norm, pair))
    assert tree.of_kind("norm") == ["1.norm", *(f"4.{i}.norm{j}" for i in range(2) for j in (1, 2))]
    assert tree.of_kind("layer") == ["4"]


def test_kinds_of_modules_like_timm_and_own_ones():
    my_block = kind_of("MyBlock", kind_of("Block", nn.Module))
    layers = [block(mlp()), block(gated(), "MyBlock", kind_of("Block", nn.Module))]
    layers.append(block(mixture(), "Mine", my_block))  # its name says nothing, its base does
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    around = made("ResidualMLP", norm=nn.LayerNorm(8), mlp=mlp())  # the MLP is the module inside
    fused = made("FusedMoE", proj=nn.Linear(8, 16))  # known by its name alone
    odd = made("Odd", attn=attention(), fc1=nn.Linear(8, 16), fc2=nn.Linear(16, 8))  # an attention, too
    tree = Tree(nn.Sequential(*layers, plain, around, fused, odd))
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
    expected = gradients(name, model)
    handle = gradckpt.enable(model, None, modules=rules)
    assert len(handle.modules) == sum(kinds[kind] for kind in ([rules] if isinstance(rules, str) else rules))

    runs = collections.Counter()
    for module in (model.get_submodule(each) for each in handle.modules):
        if type(module) not in runs:
            count_runs(type(module), runs, monkeypatch)
    assert_same(gradients(name, model), expected)
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


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("rules", ["layer", "attention", "wrapped"])
def test_a_cache_is_filled_once(name, rules):
    """The forward writes to the cache; the recompute, in which the keys would be there twice,
    to a copy."""
    model = build(name)
    expected = gradients(name, model)
    if rules == "wrapped":
        gradckpt.compat.apply_activation_checkpointing(model, "raw")
    else:
        gradckpt.enable(model, None, modules=rules)
    torch.manual_seed(2)
    model.zero_grad()
    out = model(**FAMILIES[name].batch(), use_cache=True)
    for _ in range(2):  # each recompute gets a copy of its own
        assert out.past_key_values.get_seq_length() == LENGTH
        out.loss.backward(retain_graph=True)
        found = {n.replace(PREFIX, ""): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        assert_same((out.loss, found), expected)
        model.zero_grad()


@pytest.mark.parametrize("rules", ["layer", "moe", ["*.experts.act_fn", "norm"]])
def test_what_transformers_records_inside(rules):
    """The load-balancing loss is of router logits that a hook takes out of the mixtures."""
    model = build("mixtral")
    expected = gradients("mixtral", model)
    gradckpt.enable(model, None, modules=rules)
    assert_same(gradients("mixtral", model), expected)


def test_a_cache_with_a_prefix_keeps_it():
    model = build("llama")
    torch.manual_seed(1)
    prefix, ids = torch.randint(3, VOCAB, (2, 4)), torch.randint(3, VOCAB, (2, LENGTH))
    found = []
    for rules in (None, "layer"):
        torch.manual_seed(2)
        with torch.no_grad():
            cache = model(input_ids=prefix, use_cache=True).past_key_values
        if rules:
            gradckpt.enable(model, None, modules=rules)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, past_key_values=cache).loss
        loss.backward()
        found.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    assert_same(found[1], found[0])
