"""What a wrong spelling is answered with, at every entry point that takes a codec or a policy: the
same sentence at each. And unknown keywords, and modules that are chosen in a way that chooses none.
Errors show neither private names nor a chain of internal ones, nor the values of tensors.

Other calls that are wrong: of ``enable`` in test_enable.py, of the command line in test_main.py and
test_run.py, of the kwargs of transformers in test_checkpointing_kwargs.py."""

import pickle
import re
import sys
import traceback

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import gradckpt
import gradckpt.run
from gradckpt import policies
from gradckpt._models.keywords import check_alone
from gradckpt._planning.region_plan import NoPlan
from gradckpt._planning.simulated_tensors import NotSimulated
from gradckpt._training_step import StepWrites


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))


def hidden():
    return torch.ones(2, 8, requires_grad=True) * 1


def run(capsys, *options):
    """The sentence of the command line, raised as the others are."""
    with pytest.raises(SystemExit):
        gradckpt.run.main([*options, __file__])
    raise ValueError("gradckpt: " + capsys.readouterr().err.splitlines()[-1].partition("error: ")[2])


CODEC_ENTRY_POINTS = {
    "enable": lambda codec: gradckpt.enable(layers(), codec),
    "enable, modules": lambda codec: gradckpt.enable(layers(), modules={"1": codec}),
    "checkpoint": lambda codec: gradckpt.checkpoint(torch.sin, hidden(), compress=codec),
    "the decorator": lambda codec: gradckpt.checkpoint(compress=codec)(torch.sin)(hidden()),
    "checkpoint_sequential": lambda codec: gradckpt.checkpoint_sequential(layers(), 2, hidden(), compress=codec),
    "SelectiveRecompute": lambda codec: gradckpt.SelectiveRecompute.apply(torch.sin, None, hidden(), compress=codec),
    "compress_saved": gradckpt.compress_saved,
    "patched": gradckpt.patched,
    "CompressionConfig": gradckpt.CompressionConfig,
    "checkpoint_wrapper": lambda codec: gradckpt.compat.checkpoint_wrapper(nn.Linear(8, 8), codec),
    "the kwargs of transformers": lambda codec: check_alone({"compress": codec}),
    "policies.save": policies.save,
    "a policy's name": lambda codec: policies.by_name(f"save_matmuls:{codec}"),
    "policy= of checkpoint": lambda codec: gradckpt.checkpoint(torch.sin, hidden(), policy=f"save_matmuls:{codec}"),
}

LIST = (
    "choose one of: raw, fp8_e4m3, fp8_e5m2, int8, int8_plain, int6, int4, bf16, fp16, lossless, sparse, "
    "sparse_int8, fp8"
)

NEAREST = {
    "INT8": "int8",
    "8bit": "int8",
    "int-8": "int8",
    "int9": "int8",
    "int-4": "int4",
    "fp4": "int4",
    "nf4": "int4",
    "FP8": "fp8",
    "float8": "fp8",
    "bfloat16": "bf16",
    "loseless": "lossless",
}

SPELLINGS = {
    **{text: f"unknown codec {text!r}; did you mean {near!r}? {LIST}" for text, near in NEAREST.items()},
    "zip": f"unknown codec 'zip'; {LIST}",
    "off": "'off' is no codec; to compress nothing pass compress=None",
    "mask": "codec 'mask' holds booleans, not activations; choose one of: raw, fp8_e4m3, fp8_e5m2, int8, int8_plain, "
    "int6, int4, bf16, fp16, lossless, sparse, sparse_int8",
}


def refuses(call, message):
    with pytest.raises(ValueError) as said:
        call()
    assert str(said.value) == f"gradckpt: {message}"


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("entry_point", CODEC_ENTRY_POINTS)
def test_a_codec_of_another_spelling(entry_point, spelling):
    refuses(lambda: CODEC_ENTRY_POINTS[entry_point](spelling), SPELLINGS[spelling])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_codec_of_another_spelling_on_the_command_line(spelling, capsys):
    refuses(lambda: run(capsys, "--compress", spelling), SPELLINGS[spelling])


POLICY_ENTRY_POINTS = {
    "enable": lambda policy: gradckpt.enable(layers(), policy=policy),
    "enable, modules": lambda policy: gradckpt.enable(layers(), modules={"1": {"policy": policy}}),
    "checkpoint": lambda policy: gradckpt.checkpoint(torch.sin, hidden(), policy=policy),
    "checkpoint_sequential": lambda policy: gradckpt.checkpoint_sequential(layers(), 2, hidden(), policy=policy),
    "SelectiveRecompute": lambda policy: gradckpt.SelectiveRecompute.apply(torch.sin, policy, hidden()),
    "patched": lambda policy: gradckpt.patched(policy=policy),
    "the kwargs of transformers": lambda policy: check_alone({"compress": None, "policy": policy}),
    "contexts": gradckpt.compat.create_selective_checkpoint_contexts,
    "by_name": policies.by_name,
}

POLICIES = {
    "save_matmul": "unknown policy 'save_matmul'; did you mean 'save_matmuls'?",
    "save-attention": "unknown policy 'save-attention'; did you mean 'save_attention'?",
    "int8": "unknown policy 'int8'; it is a codec: pass compress='int8', or a policy with it, 'save_matmuls:int8'",
    "zip": "unknown policy 'zip'; choose one of: save_matmuls, save_attention, every_other_matmul, discrete",
}


@pytest.mark.parametrize("spelling", POLICIES)
@pytest.mark.parametrize("entry_point", POLICY_ENTRY_POINTS)
def test_a_policy_of_another_spelling(entry_point, spelling):
    refuses(lambda: POLICY_ENTRY_POINTS[entry_point](spelling), POLICIES[spelling])


@pytest.mark.parametrize("spelling", POLICIES)
def test_a_policy_of_another_spelling_on_the_command_line(spelling, capsys):
    refuses(lambda: run(capsys, "--policy", spelling), POLICIES[spelling])


@pytest.mark.parametrize("entry_point", CODEC_ENTRY_POINTS)
def test_no_compression_has_one_form(entry_point):
    refuses(
        lambda: CODEC_ENTRY_POINTS[entry_point]("none"), "'none' is no codec; to compress nothing pass compress=None"
    )


@pytest.mark.parametrize("entry_point", ["enable", "enable, modules", "checkpoint", "patched"])
def test_no_codec_is_no_field(entry_point):
    with pytest.raises(TypeError, match="a codec is named by a string, not None; to compress nothing pass compress=No"):
        CODEC_ENTRY_POINTS[entry_point]({"codec": None})


# ---- keywords ----

ENABLE = "help(gradckpt.enable) lists all"
FIELDS = "help(gradckpt.CompressionConfig) lists all"

KEYWORDS = [
    *(
        (lambda key=key, value=value: gradckpt.enable(layers(), **{key: value}), f"unknown option {key!r}; {said}")
        for key, value, said in [
            ("layers", "*", f"did you mean 'modules'? {ENABLE}"),
            ("blocks", "*", f"did you mean 'modules'? {ENABLE}"),
            ("bits", 8, f"did you mean compress='int8'? {ENABLE}"),
            ("bits", 4, f"did you mean compress='int4'? {ENABLE}"),
            ("bits", 3, f"did you mean 'compress'? {ENABLE}"),
            ("every", 2, f"did you mean 'every_n_layers'? {ENABLE}"),
            ("every_n", 2, f"did you mean 'every_n_layers'? {ENABLE}"),
            ("codec", "int8", f"did you mean compress='int8'? {ENABLE}"),
            ("dtype", torch.int8, f"did you mean 'compress'? {ENABLE}"),
            ("minnumel", 2, f'did you mean compress={{"min_numel": 2}}? {ENABLE}'),
            ("min_size", 2, f'did you mean compress={{"min_numel": 2}}? {ENABLE}'),
        ]
    ),
    (lambda: gradckpt.enable(layers(), {"bits": 8}), f"did you mean codec='int8'? {FIELDS}"),
    (lambda: gradckpt.enable(layers(), {"codec": "int8", "min_size": 8}), f"did you mean 'min_numel'? {FIELDS}"),
    (
        lambda: gradckpt.CompressionConfig("int8", minnumel=8),
        f"CompressionConfig() has no keyword 'minnumel'; did you mean 'min_numel'? {FIELDS}",
    ),
    (
        lambda: gradckpt.CompressionConfig(spam=8),
        "CompressionConfig() has no keyword 'spam'; choose one of: codec, fake_quantize, min_numel, include, "
        "replay_discrete, stochastic, seed",
    ),
    (
        lambda: gradckpt.patched(bits=8),
        "patched() has no keyword 'bits'; did you mean compress='int8'? help(gradckpt.patched) lists all",
    ),
    (
        lambda: gradckpt.patched("int8", min_numel=8),
        """patched() has no keyword 'min_numel'; did you mean compress={"min_numel": 8}? """
        "help(gradckpt.patched) lists all",
    ),
    (lambda: gradckpt.compress_saved(codec="fp8"), "did you mean compress='fp8'?"),
    (lambda: check_alone({"compres": 8}), "unknown key 'compres' among the checkpointing kwargs; did you mean"),
]


@pytest.mark.parametrize(("call", "said"), KEYWORDS)
def test_an_unknown_keyword_is_answered_with_the_one_that_was_meant(call, said):
    with pytest.raises((ValueError, TypeError), match=f"^gradckpt: .*{re.escape(said)}") as raised:
        call()
    assert len(str(raised.value).split()) <= 25


def test_explained_classes_keep_their_signatures():
    config = gradckpt.CompressionConfig("int4", min_numel=2)
    assert pickle.loads(pickle.dumps(config)) == config
    assert "min_numel" in str(gradckpt.CompressionConfig.__init__.__wrapped__.__annotations__)
    with pytest.raises(TypeError, match="positional"):
        gradckpt.patched("int8", "save_matmuls")


def scale(x, *, factor=2):
    return x * factor


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [("codec", "int8", "compress='int8'"), ("bits", 4, "compress='int4'"), ("polcy", None, "'policy'")],
)
def test_a_keyword_that_the_function_of_a_region_rejects_has_a_note(key, value, instead):
    """The error is the function's own, as in torch, which passes keywords on as well."""
    for call in (
        lambda: gradckpt.checkpoint(scale, hidden(), **{key: value}),
        lambda: gradckpt.checkpoint(**{key: value})(scale)(hidden()),
        lambda: gradckpt.checkpoint(scale, hidden(), compress="int8", **{key: value}),
    ):
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value) == f"scale() got an unexpected keyword argument {key!r}"
        assert raised.value.__notes__ == [
            f"gradckpt: checkpoint() passed {key!r} on to the function; did you mean {instead}? "
            "help(gradckpt.checkpoint) lists all"
        ]


def test_a_note_of_a_region_in_a_region_stands_once():
    with pytest.raises(TypeError) as raised:
        gradckpt.checkpoint(lambda x, bits: gradckpt.checkpoint(scale, x, bits=bits), hidden(), bits=4)
    assert len(raised.value.__notes__) == 1


def test_an_error_that_cannot_be_read_stays_what_it_is(monkeypatch):
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    class Unreadable(TypeError):
        def __str__(self):
            raise RuntimeError("unreadable")

    def fails(x, bits):
        raise Unreadable

    with pytest.raises(Unreadable):
        gradckpt.checkpoint(fails, hidden(), bits=4)
    assert not lost


def test_other_errors_have_no_note():
    for call in (
        lambda: gradckpt.checkpoint(scale, hidden(), zzz=1),
        lambda: gradckpt.checkpoint(lambda x, codec: scale(x, bits=3), hidden(), codec="int8"),
        lambda: gradckpt.compat.checkpoint(scale, hidden(), codec="int8", use_reentrant=False),
    ):
        with pytest.raises(TypeError) as raised:
            call()
        assert not hasattr(raised.value, "__notes__")


# ---- modules ----


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.part = nn.LayerNorm(64), Block()

    def forward(self, x):
        return self.part(self.norm(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        self.stages = nn.Sequential(Block(), Block(), Block())

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.stages(x)


@pytest.mark.parametrize(
    ("choose", "names"),
    [
        (lambda model: model.blocks, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (lambda model: model.blocks[::2], ["blocks.0", "blocks.2"]),
        (lambda model: [model.blocks[:1], model.embed], ["embed", "blocks.0"]),
        (lambda model: {model.blocks[1:]: "int4"}, ["blocks.1", "blocks.2", "blocks.3"]),
        (lambda model: gradckpt.selectors.every(2, model.blocks), ["blocks.0", "blocks.2"]),
        (lambda model: nn.ModuleDict({"a": model.blocks[3]}), ["blocks.3"]),
        (lambda model: model.stages[1:], ["stages.1", "stages.2"]),
        (lambda model: model.stages, ["stages"]),
        (lambda model: list(model.blocks)[:2], ["blocks.0", "blocks.1"]),
    ],
)
def test_a_list_of_modules_selects_what_is_in_it(choose, names):
    model = GPT()
    handle = gradckpt.enable(model, modules=choose(model))
    assert list(handle.modules) == names


class Dense(nn.ModuleDict):
    def forward(self, x):
        for each in self.values():
            x = each(x)
        return x


def test_a_list_of_modules_with_a_forward_selects_itself():
    """As the dense blocks of torchvision."""
    model = nn.Sequential(nn.Linear(8, 8), Dense({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}))
    assert list(gradckpt.enable(model, modules=model[1]).modules) == ["1"]


MODULES = [
    (lambda: gradckpt.enable(GPT), r"enable\(\) takes a model, not its class GPT; make one first: model = GPT\(...\)"),
    (lambda: gradckpt.disable(GPT), r"disable\(\) takes a model, not its class GPT"),
    (lambda: gradckpt.disable("GPT"), r"disable\(\) takes a torch.nn.Module, not str"),
    (
        lambda: gradckpt.enable(model := GPT(), modules=nn.ModuleList([model.blocks[0], Layer()])),
        "the ModuleList in modules= has a Layer that is not in this GPT; leave it out",
    ),
    (
        lambda: gradckpt.enable(GPT(), modules="Layer"),
        "it is the name of a class: pass the class itself, modules=Layer",
    ),
    (
        lambda: gradckpt.enable(GPT(), modules="block"),
        "it is the name of a class: pass the class itself, modules=Block",
    ),
    (lambda: gradckpt.enable(GPT(), modules=GPT().blocks[::2]), "pass modules of this GPT, or a class, one of Block, "),
    (lambda: gradckpt.enable(GPT(), modules=Layer()), "pass modules of this GPT, or a class, one of Block, "),
    *(
        (
            lambda choose=choose: gradckpt.enable(GPT(), choose(GPT())),
            r"the second argument is compress, and this selects modules; name it: enable\(model, modules=...\)$",
        )
        for choose in (
            lambda model: model.blocks,
            lambda model: model.blocks[::2],
            lambda model: list(model.blocks),
            lambda model: model.embed,
            lambda model: {model.embed: "int8"},
        )
    ),
]


@pytest.mark.parametrize(("call", "said"), MODULES)
def test_modules_that_are_chosen_wrongly(call, said):
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    assert re.match(f"gradckpt: .*{said}", str(raised.value))
    assert len(str(raised.value).split()) <= 25


@pytest.mark.parametrize(
    ("modules", "line", "names"),
    [
        ("blocks.*", "Layer", [f"blocks.{i}" for i in range(4)]),
        ([Layer, nn.Linear], r"re.compile(r'embed|blocks\.\d+|stages\.\d+\.up|stages\.\d+\.down')", None),
        ("blocks.[01]*", "['blocks.0', 'blocks.1']", ["blocks.0", "blocks.1"]),
        ({Layer: "int8", Block: "int4"}, r"re.compile(r'blocks\.\d+|stages\.\d+')", None),
    ],
)
def test_the_advice_for_modules_inside_each_other_works(modules, line, names):
    model = GPT()
    with pytest.raises(ValueError, match=r"is inside .* both are chosen") as raised:
        gradckpt.enable(model, modules=modules)
    said = str(raised.value)
    assert said.endswith(f"so it would run three times; choose the outer ones alone: modules={line}")
    chosen = gradckpt.enable(model, modules=eval(line)).modules
    assert names is None or list(chosen) == names
    assert not any(name != other and name.startswith(f"{other}.") for name in chosen for other in chosen)


def test_disable_is_idempotent():
    model = GPT()
    before = [dict(vars(module)) for module in model.modules()]
    gradckpt.disable(model)
    gradckpt.enable(model, modules=Layer)
    gradckpt.disable(model)
    gradckpt.disable(model)
    assert [dict(vars(module)) for module in model.modules()] == before


# ---- policies ----


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        (policies.save_matmuls, "save_matmuls"),
        (policies.by_name("save_attention|save_matmuls:int8"), "save_attention|save_matmuls:int8"),
        (policies.save_attention | policies.save_matmuls.compressed("fp8"), "save_attention|save_matmuls:fp8_e4m3"),
        (policies.save_matmuls.compressed("int8").compressed(None), "save_matmuls"),
        (policies.save_matmuls.compressed({"codec": "int8", "min_numel": 2}), "save_matmuls:int8(min_numel=2)"),
        (policies.save_named("q", "k") | policies.discrete, "save_named('q', 'k')|discrete"),
        (policies.every_other_matmul, "every_other_matmul"),
        (policies.as_policy([torch.ops.aten.mm.default]), "aten.mm.default"),
        (policies.as_policy([torch.ops.aten.mm.default]) | policies.discrete.compressed("int8"), None),
    ],
)
def test_a_policy_shows_the_names_that_it_was_made_of(policy, shown):
    for each in (policy, pickle.loads(pickle.dumps(policy))):
        if shown is None:
            assert repr(each).startswith("<gradckpt policy: aten.mm.default, ")
        else:
            assert repr(each) == f"<gradckpt policy: {shown}>"
        assert all(isinstance(op, torch._ops.OpOverload | torch._ops.HigherOrderOperator) for op in each.rules)


def test_a_config_that_was_pickled_with_a_field_of_then_still_compresses_a_policy():
    config = gradckpt.CompressionConfig("int4")
    vars(config)["leaves"] = False  # what unpickling does
    assert repr(policies.save_matmuls.compressed(config)) == "<gradckpt policy: save_matmuls:int4>"


@pytest.mark.parametrize("entry_point", ["checkpoint", "compress_saved", "patched"])
def test_float64_is_named(entry_point):
    """Beside ``enable``'s, in test_enable.py."""
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True) * 1
    gradckpt.stats.reset()
    if entry_point == "checkpoint":
        gradckpt.checkpoint(torch.sin, x, compress="int8").sum().backward()
    elif entry_point == "compress_saved":
        with gradckpt.compress_saved("int8"):
            (x * x.sin()).sum().backward()
    else:
        with pytest.warns(gradckpt.GradckptInactiveWarning, match="float64, which"), gradckpt.patched("int8"):
            torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert "float64, which no codec takes" in gradckpt.stats()["uncompressed"]
    assert "not compressed: float64, which no codec takes" in str(gradckpt.stats())


# ---- private names, chains, values ----


class Net(nn.Module):
    def __init__(self, reads=False):
        super().__init__()
        self.layers, self.reads = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)), reads

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean() * (2 if self.reads and x.sum().item() > 0 else 1)


def batch():
    return torch.randn(32, 64)


def trained_within(budget, reads=False):
    model = Net(reads)
    gradckpt.enable(model, budget=budget)
    model(batch())


def optimizing(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        model(batch()).backward()
        optimizer.step()

    return step


def tracked_twice():
    with gradckpt.track_memory(), gradckpt.track_memory():
        pass


MODEL = Net()
PARAMETERS = list(MODEL.parameters())

CALLS = {
    "enable, parameters": lambda: gradckpt.enable(MODEL, modules=PARAMETERS),
    "enable, a parameter": lambda: gradckpt.enable(MODEL, modules={PARAMETERS[0]: "int8"}),
    "enable, a tensor as budget": lambda: gradckpt.enable(MODEL, budget=PARAMETERS[0]),
    "enable, a tensor as place": lambda: gradckpt.enable(MODEL, offload=PARAMETERS[0]),
    "enable, a tensor as number": lambda: gradckpt.enable(MODEL, every_n_layers=PARAMETERS[0]),
    "enable, a tensor as switch": lambda: gradckpt.enable(MODEL, recompute=PARAMETERS[0]),
    "enable, a keyword": lambda: gradckpt.enable(MODEL, compres="int8"),
    "enable, no file": lambda: gradckpt.enable(MODEL, plan="missing.json"),
    "budget, too small": lambda: trained_within("activations:2KiB"),
    "budget, values": lambda: trained_within("1GiB", reads=True),
    "plan, too small": lambda: gradckpt.plan(MODEL, batch(), budget="activations:2KiB"),
    "plan, values": lambda: gradckpt.plan(Net(reads=True), batch(), budget="1GiB"),
    "plan, memory": lambda: gradckpt.plan(MODEL, batch(), memory="much"),
    "checkpoint": lambda: gradckpt.checkpoint(torch.sin, batch(), compress=PARAMETERS[0]),
    "gradient_error": lambda: gradckpt.gradient_error(MODEL, batch(), [{"compres": "int8"}]),
    "gradient_error, a step": lambda: gradckpt.gradient_error(MODEL, optimizing(MODEL)),
    "compress_saved": lambda: gradckpt.compress_saved({"linears": "int8"}),
    "track_memory": tracked_twice,
    "Offload": lambda: gradckpt.Offload("disk", min_bytes="much"),
    "CompressionConfig": lambda: gradckpt.CompressionConfig(min_numel=PARAMETERS[0]),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_private_names_no_chain_no_values(call):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        CALLS[call]()
    error = raised.value
    said = "".join(traceback.format_exception_only(error))
    assert said.startswith(("ValueError: gradckpt: ", "TypeError: gradckpt: ", "RuntimeError: gradckpt: ")), said
    assert "gradckpt._" not in said
    assert "tensor([" not in said
    shown = "".join(traceback.format_exception(error))
    assert "During handling of the above" not in shown
    assert "direct cause" not in shown


@pytest.mark.parametrize("error", [NoPlan("gradckpt: no plan", 5), StepWrites(), NotSimulated("aten::item")])
def test_classes_that_only_gradckpt_catches_have_the_name_of_their_base(error):
    assert type(error).__name__ in ("ValueError", "RuntimeError")
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))
