"""The keys of the kwargs dict of an enabled model, in both of transformers' conventions;
offload among them."""

import copy
import inspect
import pickle

import pytest
import torch
from handles import config_of
from test_huggingface import (
    ADAPTER,
    IDS,
    LAYERS,
    SPELLINGS,
    build,
    functions,
    is_stock,
    needs_layers,
    on,
    step,
    transformers,
    with_every_and_offload,
)

import gradckpt
from gradckpt._models import keywords as keys
from gradckpt._models import offload
from gradckpt._models.inactivity import is_on

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def turn_on(model, name, given, **own):
    """As transformers is called: the dict by position, its own keywords beside it."""
    getattr(model, f"{name}_enable")(given, **own)


class TestKeys:
    def test_beside_a_budget_or_a_plan(self):
        keys.check_alone({"budget": "1GiB", "offload": "cpu"})
        with pytest.raises(ValueError, match="plan= and offload= exclude each other, since the plan decides"):
            keys.check_alone({"plan": "plan.json", "offload": True})
        for given in ({"budget": "1GiB", "compress": "int8"}, {"plan": "plan.json"}):
            assert keys.plan_keywords({**given, "use_reentrant": False}) == given
            keys.check_alone({**given, "use_reentrant": False})
            for key, value in (("use_reentrant", True), ("policy", "save_attention"), ("every_n_layers", 2)):
                with pytest.raises(ValueError, match=f"and {key}= exclude each other, since the (budget|plan) decides"):
                    keys.check_alone({**given, key: value})
            with pytest.raises(ValueError, match=r"^gradckpt: error= is for gradckpt\.plan\(.*; apply its plan"):
                keys.check_alone({**given, "error": "1%"})

    def test_torchs_are_those_of_this_torch(self):
        signature = inspect.signature(torch.utils.checkpoint.checkpoint).parameters
        assert set(signature) - {"function", "args", "kwargs"} | {
            "preserve_rng_state",
            "respect_saved_tensors_hooks",
        } == set(keys.TORCHS)

    @with_every_and_offload
    @pytest.mark.parametrize("name", SPELLINGS)
    @pytest.mark.parametrize(
        ("given", "own"),
        [({"every_n_layers": 2}, {}), ({}, {"every_n_layers": 2}), ({"every_n_layers": 2}, {"every_n_layers": 4})],
        ids=["in the dict", "keyword", "the dict wins"],
    )
    def test_every_n_layers(self, name, given, own):
        model = build()
        handle = gradckpt.enable(model)
        turn_on(model, name, given, **own)
        assert len(handle.modules) == 2
        assert step(model) == 2

    @with_every_and_offload
    def test_every_n_layers_of_one_in_the_dict_wins_over_enable(self):
        model = build()
        handle = gradckpt.enable(model, every_n_layers=2)
        turn_on(model, SPELLINGS[0], {"every_n_layers": 1})
        assert len(handle.modules) == LAYERS

    @pytest.mark.parametrize("name", SPELLINGS)
    @pytest.mark.parametrize(
        ("given", "config"),
        [
            ({"compress": "fp8"}, gradckpt.CompressionConfig("fp8")),
            ({"compress": True}, gradckpt.CompressionConfig("int6")),
            ({"compress": {"codec": "fp8", "stochastic": True}}, gradckpt.CompressionConfig("fp8", stochastic=True)),
            ({"fake_quantize": True}, gradckpt.CompressionConfig("int6", fake_quantize=True)),
            ({"min_numel": 0}, gradckpt.CompressionConfig("int6", min_numel=0)),
            ({"policy": "save_matmuls"}, gradckpt.CompressionConfig("int6")),
            ({"compress": False}, None),
            ({"compress": None}, None),
        ],
        ids=str,
    )
    def test_of_compression(self, name, given, config):
        model = build()
        handle = gradckpt.enable(model, compress="int6")
        turn_on(model, name, given)
        assert config_of(handle) == config
        assert step(model) == (LAYERS if config else 0)

    @pytest.mark.parametrize(
        "given",
        [
            {"use_reentrant": False},
            {"use_reentrant": None},
            {"preserve_rng_state": False},
            {"context_fn": torch.utils.checkpoint.noop_context_fn},
            {"determinism_check": "none"},
            {"debug": False},
            *([{"early_stop": False}] if "early_stop" in keys.TORCHS else []),
        ],
        ids=lambda given: next(iter(given)),
    )
    def test_of_torch(self, given):
        model = build()
        gradckpt.enable(model)
        turn_on(model, SPELLINGS[0], given)
        assert step(model) == LAYERS

    @pytest.mark.parametrize("compress", ["int8", None])
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"compres": "int8"},
                r"unknown key 'compres' .* did you mean 'compress'\?$",
            ),
            ({"min_numell": 3}, r"did you mean 'min_numel'\?"),
            ({"every_n_layer": 3}, r"did you mean 'every_n_layers'\?"),
            ({"use_reentrent": False}, r"did you mean 'use_reentrant'\?"),
            ({"spam": 3}, "unknown key 'spam' among the checkpointing kwargs; the keys are: compress,"),
            ({"compress": "int7"}, "unknown codec 'int7'"),
            ({"compress": 8}, "compress= takes None, True, a codec name"),
            ({"compress": {"codex": "int8"}}, "unknown field 'codex'"),
            ({"compress": "int8", "min_numel": -1}, "min_numel counts values and cannot be -1"),
            ({"compress": None, "min_numel": "many"}, "min_numel is an int, not 'many'"),
            ({"compress": "int8", "fake_quantize": "yes"}, "fake_quantize is True or False, not 'yes'"),
            ({"compress": "int8", "policy": "save_it"}, "unknown policy 'save_it'"),
            ({"every_n_layers": 0}, "every_n_layers is 1 or more, not 0"),
            ({"every_n_layers": True}, "every_n_layers is an int, not True"),
            ({"offload": 1}, "offload is True, False, 'cpu', 'disk' or a gradckpt.Offload, not 1"),
            ({"preserve_rng_state": "no"}, "preserve_rng_state is True or False, not 'no'"),
            ({"determinism_check": "all"}, 'determinism_check is "default", "warn" or "none", not \'all\''),
            ({"context_fn": "mine"}, "context_fn is a function that returns two context managers, not 'mine'"),
            ({"policy": "save_attention", "use_reentrant": True}, "needs use_reentrant=False"),
            ({"offload": True, "use_reentrant": True}, "needs use_reentrant=False"),
            ({"policy": "save_attention", "context_fn": print}, "policy= and context_fn= exclude each other"),
        ],
        ids=lambda given: str(given) if isinstance(given, dict) else "",
    )
    def test_wrong(self, compress, given, message):
        model = build()
        handle = gradckpt.enable(model, compress=compress)
        before = functions(model)
        with pytest.raises((ValueError, TypeError), match=f"^gradckpt: .*{message}"):
            turn_on(model, SPELLINGS[0], given)
        assert functions(model) == before, "a refused call changes nothing"
        assert len(handle.modules) == LAYERS
        assert step(model) == (LAYERS if compress else 0)

    @with_every_and_offload
    @pytest.mark.parametrize("value", [0, -2])
    def test_wrong_keyword_of_transformers(self, value):
        model = build()
        gradckpt.enable(model)
        with pytest.raises(ValueError, match=f"every_n_layers is 1 or more, not {value}"):
            on(model, every_n_layers=value)

    def test_nothing_to_compress(self):
        model = build()
        gradckpt.enable(model, compress=None)
        with pytest.raises(ValueError, match='min_numel=5 has no effect without compress; add "compress": "int8"'):
            turn_on(model, SPELLINGS[0], {"min_numel": 5})
        turn_on(model, SPELLINGS[0], {"min_numel": 5, "compress": None})
        assert step(model) == 0

    def test_the_dict_is_not_changed(self):
        model = build()
        gradckpt.enable(model)
        given = {"compress": "fp8", "offload": False, "policy": None, "use_reentrant": False}
        before = dict(given)
        turn_on(model, SPELLINGS[0], given)
        assert given == before

    def test_in_torchs_place(self, monkeypatch):
        """transformers may have imported what stands in torch's place:
        gradckpt.compat.checkpoint."""
        model = build()
        gradckpt.enable(model)
        monkeypatch.setattr(transformers.modeling_utils, "checkpoint", gradckpt.compat.checkpoint)
        on(model)
        assert step(model) == LAYERS


# ---- offload


class Counting(torch.autograd.graph.save_on_cpu):
    """Notes what is packed."""

    def __init__(self, *args, **kwargs):
        super().__init__()  # pinned memory needs a device
        pack, self.asked = self.pack_hook, (args, kwargs)

        def noting(tensor):
            if tensor.numel():  # torch before 2.12 saves a dummy with a region's inputs
                packed.append(tensor)
            return pack(tensor)

        self.pack_hook = noting


packed = []


@pytest.fixture
def counted(monkeypatch):
    packed.clear()
    monkeypatch.setattr(offload, "save_on_cpu", Counting)
    monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", Counting, raising=False)  # before 5.17
    yield packed
    packed.clear()


def grads(model):
    torch.manual_seed(3)
    step(model)
    return [p.grad.clone() for p in model.parameters()]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


WAYS = {
    "enable": lambda model: gradckpt.enable(model, offload=True),
    "in the dict": lambda model: (gradckpt.enable(model), turn_on(model, SPELLINGS[0], {"offload": True})),
    "keyword": lambda model: (gradckpt.enable(model), turn_on(model, SPELLINGS[0], {}, offload=True)),
    "enable, on again": lambda model: (gradckpt.enable(model, offload=True), on(model)),
}


@needs_layers  # stacks hand rotary tables over as arguments, which are offloaded, too
class TestOffload:
    @pytest.mark.parametrize(
        "way", [pytest.param(way, marks=[with_every_and_offload] * (way == "keyword")) for way in WAYS]
    )
    def test_payloads_go_to_the_host(self, way, counted):
        plain, model = build(), build()
        gradckpt.enable(plain)
        WAYS[way](model)
        assert equal(grads(model), grads(plain))
        assert [t.dtype for t in counted] == [torch.uint8] * 2 * LAYERS, "codes and scales, and nothing else"
        assert sum(t.numel() for t in counted) < LAYERS * IDS.numel() * 32 * 4 * 0.26
        gradckpt.disable(model)
        assert vars(model).get(ADAPTER) is None

    @with_every_and_offload
    def test_what_transformers_saves_is_what_we_save(self, counted):
        stock, ours = build(), build()
        on(stock, {"use_reentrant": False}, offload=True)
        theirs = grads(stock)
        sizes = [(t.shape, t.dtype) for t in counted]
        counted.clear()
        gradckpt.enable(ours, compress=None, offload=True)
        assert equal(grads(ours), theirs)
        assert [(t.shape, t.dtype) for t in counted] == sizes

    @with_every_and_offload
    def test_none_keeps_transformers_own(self, counted):
        model, stock = build(), build()
        gradckpt.enable(model, compress=None)
        on(model, {"use_reentrant": False}, offload=True)
        (function,) = functions(model)
        assert "checkpointing_enable.<locals>" in function.func.__qualname__
        on(stock, {"use_reentrant": False}, offload=True)
        assert equal(grads(model), grads(stock))

    @pytest.mark.parametrize("own", [{}, {"policy": "save_matmuls"}, {"compress": {"fake_quantize": True}}], ids=str)
    def test_with_other_keys(self, own, counted):
        plain, model = build(), build()
        gradckpt.enable(plain, **own)
        gradckpt.enable(model, offload=True, **own)
        assert equal(grads(model), grads(plain))
        assert len(counted) == LAYERS * (1 if "policy" in own else 2)  # beside a policy boundaries are exact

    @pytest.mark.parametrize("way", ["pickle", "deepcopy"])
    def test_copies(self, way, counted):
        model = build()
        gradckpt.enable(model, offload=True)
        model = pickle.loads(pickle.dumps(model)) if way == "pickle" else copy.deepcopy(model)
        assert step(model) == LAYERS
        assert len(counted) == 2 * LAYERS

    def test_remove(self, counted):
        model = build()
        with gradckpt.enable(model, offload=True):
            on(model)
        step(model)
        assert [t.dtype for t in counted] == [torch.float32] * LAYERS, "offloaded, as was asked, by torch's checkpoint"
        off = build()
        gradckpt.enable(off, offload=True).remove()
        assert is_stock(off)
        assert not is_on(off)

    def test_turned_off_in_the_dict(self, counted):
        model = build()
        gradckpt.enable(model, offload=True)
        turn_on(model, SPELLINGS[0], {"offload": False})
        step(model)
        assert not counted

    def test_pinned_where_there_is_a_device(self, monkeypatch):
        asked = []
        monkeypatch.setattr(offload, "save_on_cpu", lambda **how: asked.append(how))
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        offload.to_place(gradckpt.Offload())
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        offload.to_place(gradckpt.Offload())
        assert asked == [{"pin_memory": True, "device_type": "cuda"}, {}]

    @pytest.mark.parametrize("offload", [1, "tape"])
    def test_wrong(self, offload):
        model = build()
        with pytest.raises((TypeError, ValueError), match=r"^gradckpt: offload(=| is ).*'disk'"):
            gradckpt.enable(model, offload=offload)
        assert ADAPTER not in vars(model)
