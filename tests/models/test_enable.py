"""gradckpt.enable: what it chooses, how its keywords meet, what it does when called again, copies
of its handle; policy= in it, with and without modules=, and in the kwargs of transformers."""

import contextlib
import copy
import functools
import inspect
import itertools
import logging
import pickle
import re
from pathlib import Path

import model_families
import pytest
import torch
from small_models import config_of
from test_huggingface import ADAPTER, IDS, LAYERS, on, step
from test_huggingface import build as llama
from tiny_models import regions_of
from torch import nn

import gradckpt
from gradckpt._engine.selective import ForwardContext
from gradckpt._models.inactivity_hooks import is_on

DOC = Path(__file__).parents[2] / "docs" / "apply.md"


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Other(Block):
    pass


class WithParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.second(self.first(x))


def net(*kinds):
    return nn.Sequential(nn.Linear(64, 64), nn.Sequential(*(kind() for kind in kinds or 4 * [Block])))


def compressed(model):
    before = gradckpt.stats()["compressed"]
    model(torch.randn(32, 64)).sum().backward()
    return gradckpt.stats()["compressed"] - before


# ---- what is chosen ----


def test_the_repeated_block_is_chosen_and_logged(caplog):
    caplog.set_level(logging.INFO, "gradckpt")
    model = net()
    handle = gradckpt.enable(model)
    assert list(handle.modules) == [f"1.{i}" for i in range(4)]
    assert compressed(model) == 4
    (record,) = (each for each in caplog.records if "handle" in each.getMessage())
    assert record.levelname == "INFO"
    assert "*.*     4 x Block  int8" in record.getMessage()


class OfDiffusers(nn.Module):
    def __init__(self):
        super().__init__()
        self.double, self.single = nn.ModuleList([Block(), Block()]), nn.ModuleList([Other(), Other()])

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=None):
        pass

    def enable_gradient_checkpointing(self, gradient_checkpointing_func=None):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: net(Block, Block, Other, Other),
            r"Sequential repeats several blocks; name .*modules=\[Block, Other\]\): Block \(2\), Other \(2\)$",
        ),
        (
            lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
            "Sequential has no repeated block of layers; .* one of its classes: Linear, ReLU$",
        ),
        (lambda: nn.Linear(8, 8), "Linear holds no modules, so no block repeats; use gradckpt.checkpoint"),
        (
            OfDiffusers,
            r"OfDiffusers is a model of diffusers; call model\.enable_gradient_checkpointing\("
            r'gradient_checkpointing_func=functools\.partial\(gradckpt\.checkpoint, compress="int8"\)\)$',
        ),
    ],
    ids=["two blocks", "none", "no modules", "diffusers"],
)
def test_where_nothing_can_be_chosen(make, message):
    model = make()
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match=f"^gradckpt: {message}"):
        gradckpt.enable(model)
    assert [dict(vars(module)) for module in model.modules()] == before


# ---- what is written wrongly: spellings are test_messages.py's ----

CALLS = [
    (("layer",), {}, ValueError, "'layer' selects modules; pass modules='layer'"),
    ((Block,), {}, TypeError, "Block selects modules; pass modules=Block"),
    (({"layer": "int8", Block: None},), {}, ValueError, r"{'layer': 'int8', Block: None} selects modules"),
    (({"codecs": "int8"},), {}, ValueError, "unknown field 'codecs'"),
    ((8,), {}, TypeError, "compress= takes None, True, a codec name"),
    (
        (),
        {"fake_quantize": True},
        ValueError,
        r"'fake_quantize' is a field of compress=; pass compress={\"fake_quantize\": True}",
    ),
    ((), {"zip": 2}, ValueError, "unknown option 'zip'; choose one of: compress, .*modules"),
    ((), {"every_n_layers": 0}, ValueError, "every_n_layers is 1 or more"),
    ((), {"every_n_layers": 1.5}, TypeError, "every_n_layers is an int"),
    ((), {"debug": 1}, TypeError, "debug is True or False"),
]


@pytest.mark.parametrize(("args", "keywords", "error", "message"), CALLS, ids=lambda each: str(each)[:24])
def test_calls_that_are_wrong(args, keywords, error, message):
    model = net()
    with pytest.raises(error, match=f"^gradckpt: {message}"):
        gradckpt.enable(model, *args, **keywords)
    assert regions_of(model, torch.randn(2, 64)) == 0


# ---- keywords ----

VALUES = {
    "compress": "int4",
    "modules": None,  # of each model its own
    "every_n_layers": 2,
    "policy": "save_matmuls",
    "recompute": False,
    "offload": True,
    "parts": "sequential",
    "tiles": 4,
    "context_fn": lambda: (contextlib.nullcontext(), contextlib.nullcontext()),
    "preserve_rng_state": False,
    "determinism_check": "none",
    "debug": True,
    "early_stop": False,
    "respect_saved_tensors_hooks": True,
    "buffers": "torch",
    "budget": "8GiB",
    "plan": "plan.json",
    "optimizer": None,  # of each model its own
}


#: What the settings of a region show as it was given.
OF_A_REGION = {"preserve_rng_state", "determinism_check", "debug", "early_stop", "buffers"}
OF_A_REGION |= {"offload", "recompute", "parts", "tiles"}


def documented():
    """Of the table in docs/apply.md: pairs of keywords, and what is said of each."""
    section = DOC.read_text().split("## Keywords together")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| `")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    names = [(re.findall(r"`(\w+)`", pair), said) for pair, said in cells]
    return {frozenset((first, other)): said for (first, *others), said in names for other in others}


def test_the_values_are_of_all_keywords():
    named = set(inspect.signature(gradckpt.enable).parameters) - {"model", "keywords"}
    listed = re.search(r"\*\*keywords: (.*?), as for", gradckpt.enable.__doc__, re.DOTALL)[1]
    assert VALUES.keys() == named | {*re.findall(r"``(\w+)``", listed)}


@pytest.mark.filterwarnings("ignore:gradckpt. offload='cpu' leaves payloads where they are")
@pytest.mark.parametrize("entry_point", ["own", "transformers"])
def test_every_pair_of_keywords(entry_point):
    """Works, or is refused in one sentence: where the docs say so, and nowhere else."""
    refused = {pair for pair, said in documented().items() if said.startswith("`ValueError`")}
    make, modules = (functools.partial(net, *4 * [WithParts]), WithParts) if entry_point == "own" else (llama, "layer")
    for pair in map(frozenset, itertools.combinations(VALUES, 2)):
        model = make()
        keywords = {key: modules if key == "modules" else VALUES[key] for key in pair}
        if "optimizer" in pair:
            keywords["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        if "optimizer" in pair and not {"budget", "plan"} & pair:
            with pytest.raises(ValueError, match=r"^gradckpt: optimizer= needs budget=; "):
                gradckpt.enable(model, **keywords)
            continue
        if pair in refused:
            with pytest.raises(ValueError, match=r"^gradckpt: [^.]*exclude each other[^.]*$"):
                gradckpt.enable(model, **keywords)
            continue
        handle = gradckpt.enable(model, **keywords)
        if "budget" in pair:  # its plans are tested in test_budget.py
            assert len(handle.modules) == 4, pair
            continue
        (model(torch.randn(32, 64)).sum() if entry_point == "own" else model(input_ids=IDS, labels=IDS).loss).backward()
        assert all(parameter.grad is not None for parameter in model.parameters()), pair
        count = 1 if "recompute" in pair and "modules" not in pair else 2 if "every_n_layers" in pair else 4
        assert len(handle.modules) == count, pair
        config = config_of(handle)
        exact = {"policy", "context_fn"} & pair and "compress" not in pair
        assert (config and config.codec) == (None if exact else VALUES["compress"] if "compress" in pair else "int8")
        for settings in handle.modules.values():
            for key in pair & OF_A_REGION:
                assert settings[key] == (gradckpt.Offload() if key == "offload" else VALUES[key]), pair
            assert ("context_fn" in settings) == bool({"policy", "context_fn"} & pair), pair


# ---- again ----


ENTRY_POINTS = {"transformers": {}, "own": {"modules": "layer"}, "other modules": {"modules": "mlp"}}


@pytest.mark.parametrize("options", [{}, {"policy": "save_matmuls:int8"}, {"debug": True}, {"offload": True}], ids=str)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_equal_arguments_do_nothing(entry_point, options):
    model = llama()
    gradckpt.enable(model, **ENTRY_POINTS[entry_point], **options)
    before = [dict(vars(module)) for module in model.modules()]
    handle = gradckpt.enable(model, **ENTRY_POINTS[entry_point], **options)
    after = [dict(vars(module)) for module in model.modules()]
    assert all(new.keys() == old.keys() for new, old in zip(after, before, strict=True))
    assert all(new[key] is old[key] for new, old in zip(after, before, strict=True) for key in old)
    assert len(handle.modules) == LAYERS


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(ENTRY_POINTS, 2)))
def test_other_modules_take_the_place_of_the_first(first, second):
    model = llama()
    handle = gradckpt.enable(model, **ENTRY_POINTS[first])
    gradckpt.enable(model, "int4", **ENTRY_POINTS[second])
    names = "model.layers.{}.mlp" if second == "other modules" else "model.layers.{}"
    assert list(handle.modules) == [names.format(i) for i in range(LAYERS)]
    assert config_of(handle).codec == "int4"
    assert step(model) == LAYERS
    assert is_on(model) == (second == "transformers")
    handle.remove()
    assert step(model) == 0
    assert ADAPTER not in vars(model)


@pytest.mark.parametrize(
    "options", [{"compress": "int4"}, {"policy": "save_matmuls"}, {"debug": True}, {"every_n_layers": 2}], ids=str
)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_other_arguments_change_what_was_done(entry_point, options):
    model = llama()
    handle = gradckpt.enable(model, **ENTRY_POINTS[entry_point])
    gradckpt.enable(model, **{**ENTRY_POINTS[entry_point], **options})
    fresh = llama()
    expected = gradckpt.enable(fresh, **{**ENTRY_POINTS[entry_point], **options})
    assert handle.modules.keys() == expected.modules.keys()
    assert config_of(handle) == config_of(expected)
    assert repr(handle) == repr(expected)
    gradckpt.disable(model)
    assert handle.modules == {}


def test_the_whole_takes_the_place_of_a_part():
    model = llama()
    part = gradckpt.enable(model.model, "int4")
    whole = gradckpt.enable(model)
    assert config_of(whole).codec == config_of(part.__class__(model)).codec == "int8"
    assert part.modules == {}
    part.remove()
    assert step(model) == LAYERS
    own = net()
    part = gradckpt.enable(own[1], "int4", modules=Block)
    whole = gradckpt.enable(own)
    assert config_of(part) == config_of(whole) == gradckpt.CompressionConfig("int8")


@pytest.mark.parametrize("wrapper", [nn.DataParallel, torch.compile], ids=["parallel", "compile"])
def test_again_through_wrappers(wrapper):
    model = llama()
    gradckpt.enable(model)
    layers = vars(model)[ADAPTER]
    gradckpt.enable(wrapper(model))
    assert vars(model)[ADAPTER] is layers
    gradckpt.disable(wrapper(model))
    assert ADAPTER not in vars(model)


def test_what_others_changed_since_is_changed_back():
    model = llama()
    handle = gradckpt.enable(model)
    on(model, {"compress": "int4"})
    assert config_of(handle).codec == "int4"
    gradckpt.enable(model)
    assert config_of(handle).codec == "int8"
    model_families.turn_off(model)
    assert handle.modules == {}
    assert "checkpoints nothing now" in repr(handle)
    gradckpt.enable(model)
    assert len(handle.modules) == LAYERS


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_failed_call_leaves_what_there_was(entry_point, monkeypatch):
    model = llama()
    handle = gradckpt.enable(model, **ENTRY_POINTS[entry_point])
    if entry_point == "transformers":
        on(model, {"compress": "int4"})
    before, modules = [dict(vars(module)) for module in model.modules()], handle.modules
    hooks = [(dict(module._forward_hooks), dict(module._forward_pre_hooks)) for module in model.modules()]
    for keywords in ({"modules": "nothing"}, {"modules": nn.ModuleList}, {"compress": "zip"}):
        with pytest.raises(ValueError):
            gradckpt.enable(model, **keywords)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), ADAPTER, lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gradckpt.enable(model, "int6")
    assert [dict(vars(module)) for module in model.modules()] == before
    assert [(dict(module._forward_hooks), dict(module._forward_pre_hooks)) for module in model.modules()] == hooks
    assert handle.modules == modules
    assert step(model) == LAYERS
    handle.remove()
    assert step(model) == 0


# ---- copies ----


@pytest.mark.parametrize("entry_point", ["own", "transformers"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_of_a_model_with_its_handle(entry_point, way):
    model = net() if entry_point == "own" else llama()
    model.handle = gradckpt.enable(model)
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert twin.handle.modules.keys() == model.handle.modules.keys()
    assert config_of(twin.handle) == config_of(model.handle)
    model.handle.remove()
    assert len(twin.handle.modules) == 4
    run = compressed if entry_point == "own" else step
    assert (run(model), run(twin)) == (0, 4)
    gradckpt.enable(twin, "int4")
    assert config_of(twin.handle).codec == "int4"
    twin.handle.remove()
    assert run(twin) == 0


@pytest.mark.parametrize("entry_point", ["own", "transformers"])
def test_copies_of_a_handle(entry_point):
    model = net() if entry_point == "own" else llama()
    handle = gradckpt.enable(model)
    assert copy.copy(handle).modules == handle.modules, "of the same model"
    both = copy.deepcopy((model, handle))
    assert both[1].modules == handle.modules
    both[1].remove()
    assert len(handle.modules) == 4
    orphan = pickle.loads(pickle.dumps(handle))
    assert orphan.modules == {}, "a handle keeps no model alive"
    orphan.remove()
    del model
    assert pickle.loads(pickle.dumps(handle)).modules == {}
    shallow = copy.copy(handle)
    shallow.remove()
    assert "is not enabled" in repr(shallow)


def test_a_shallow_copy_of_a_model_is_undone_with_it():
    """Its modules are those of the original."""
    model = net()
    handle = gradckpt.enable(model)
    twin = copy.copy(model)
    assert compressed(twin) == 4
    gradckpt.disable(twin)
    assert handle.modules == {}
    assert compressed(model) == 0


# ---- policies ----


aten = torch.ops.aten


def losses_and_gradients(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


def assert_equal(got, want):
    assert got[0] == want[0]
    assert all(map(torch.equal, got[1], want[1]))


@pytest.fixture
def kept(monkeypatch):
    """What the regions of a losses_and_gradients have kept when their forwards end."""
    storages = []
    leave = ForwardContext.__exit__
    monkeypatch.setattr(
        ForwardContext, "__exit__", lambda self, *error: (storages.append(dict(self.storage)), leave(self, *error))[1]
    )
    return storages


@pytest.mark.parametrize("policy", ["save_attention|save_matmuls", [aten.mm.default]], ids=str)
def test_a_policy(policy, kept):
    """All forms: test_checkpoint_policy.py."""
    want = losses_and_gradients(llama())
    model = llama()
    with gradckpt.enable(model, compress=None, policy=policy):
        assert_equal(losses_and_gradients(model), want)
        assert len(kept) == LAYERS
        assert all(storage for storage in kept)
    kept.clear()
    assert_equal(losses_and_gradients(model), want)
    assert not kept


def test_compressed_saves_and_inputs():
    want, model = losses_and_gradients(llama()), llama()
    gradckpt.stats.reset()
    with gradckpt.enable(model, compress={"codec": "int8", "min_numel": 1}, policy={aten.mm.default: "int8"}):
        loss, grads = losses_and_gradients(model)
    assert loss == want[0]
    assert gradckpt.stats()["compressed"] == LAYERS * (1 + 7)  # inputs and products
    for a, b in zip(grads, want[1], strict=True):
        assert 0 < (a - b).norm() < 0.05 * b.norm() or torch.equal(a, b)


def test_kwargs_of_transformers(kept):
    want, model = losses_and_gradients(llama()), llama()
    gradckpt.enable(model, compress=None, policy="save_attention")
    model_families.turn_on(model, {"policy": "save_matmuls"})
    assert_equal(losses_and_gradients(model), want)
    assert all(aten.mm.default in storage for storage in kept)
    kept.clear()
    model_families.turn_on(model, {"policy": None})
    assert_equal(losses_and_gradients(model), want)
    assert not kept


def test_policies_of_modules(kept):
    want, model = losses_and_gradients(llama()), llama()
    with gradckpt.enable(
        model, None, modules={"mlp": {"policy": "save_matmuls"}, "attention": {"policy": None}}, policy="discrete"
    ):
        assert_equal(losses_and_gradients(model), want)
        assert [list(storage) for storage in kept if aten.mm.default in storage] == [[aten.mm.default]] * LAYERS


def test_wrong_policies():
    model = llama()
    with pytest.raises(TypeError, match=r"a policy is .*; not int"):
        gradckpt.enable(model, policy=3)
    with pytest.raises(ValueError, match=r"aten\.mm\.default"):
        gradckpt.enable(model, policy=[aten.mm])
    assert "_set_gradient_checkpointing" not in vars(model)
    gradckpt.enable(model, compress=None, policy="save_matmuls")
    for kwargs, said in (
        ({"context_fn": lambda: None}, "exclude each other"),
        ({"use_reentrant": True}, "policy= needs"),
    ):
        with pytest.raises(ValueError, match=said):
            model_families.turn_on(model, kwargs)
    with pytest.raises(ValueError, match="exclude each other"):
        gradckpt.enable(llama(), None, modules={"mlp": {"policy": "save_matmuls", "context_fn": lambda: None}})
