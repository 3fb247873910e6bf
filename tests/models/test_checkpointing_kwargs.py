"""The keys of the kwargs dict of an enabled model, in both of transformers' conventions;
offload among them."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from model_families import equal
from small_models import config_of
from test_huggingface import (
    ADAPTER,
    HAS_EVERY_AND_OFFLOAD,
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
from gradckpt._engine.places import offload_of, place_of
from gradckpt._models import keywords as keys
from gradckpt._models.inactivity_hooks import is_on

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
        ("given", "own", "count"),
        [(2, {}, 2), (None, {"every_n_layers": 2}, 2), (2, {"every_n_layers": 4}, 2), (1, {}, LAYERS)],
        ids=["in the dict", "keyword", "the dict wins", "over enable, too"],
    )
    def test_every_n_layers(self, name, given, own, count):
        model = build()
        handle = gradckpt.enable(model, every_n_layers=2 if given == 1 else 1)
        turn_on(model, name, {} if given is None else {"every_n_layers": given}, **own)
        assert len(handle.modules) == count
        assert step(model) == count
        on(model)
        assert len(handle.modules) == (2 if given == 1 else LAYERS), "what enable said holds when others turn it on"

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
        before = dict(given)
        turn_on(model, name, given)
        assert given == before
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
        (function,) = functions(model)
        assert function.keywords.items() >= {key: value for key, value in given.items() if value is not None}.items()

    @pytest.mark.parametrize("compress", ["int8", None])
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"compres": "int8"}, r"unknown key 'compres' .* did you mean 'compress'\?$"),
            ({"spam": 3}, "unknown key 'spam' among the checkpointing kwargs; the keys are: compress,"),
            ({"compress": "int8", "min_numel": -1}, "min_numel counts values and cannot be -1"),
            ({"compress": None, "min_numel": "many"}, "min_numel is an int, not 'many'"),
            ({"compress": "int8", "fake_quantize": "yes"}, "fake_quantize is True or False, not 'yes'"),
            ({"every_n_layers": 0}, "every_n_layers is 1 or more, not 0"),
            ({"every_n_layers": True}, "every_n_layers is an int, not True"),
            ({"offload": 1}, "offload is True, False, 'cpu', 'disk' or a gradckpt.Offload, not 1"),
            ({"preserve_rng_state": "no"}, "preserve_rng_state is True or False, not 'no'"),
            ({"determinism_check": "all"}, 'determinism_check is "default", "warn" or "none", not \'all\''),
            ({"context_fn": "mine"}, "context_fn is a function that returns two context managers, not 'mine'"),
            ({"compress": "int8", "use_reentrant": True}, "compress='int8' needs use_reentrant=False"),
            ({"policy": "save_attention", "use_reentrant": True}, "needs use_reentrant=False"),
            ({"offload": True, "use_reentrant": True}, "needs use_reentrant=False"),
            ({"policy": "save_attention", "context_fn": print}, "policy= and context_fn= exclude each other"),
        ],
        ids=lambda given: str(given) if isinstance(given, dict) else "",
    )
    def test_wrong(self, compress, given, message):
        """Other spellings: test_messages.py, test_trainer_flag_scope.py."""
        model = build()
        handle = gradckpt.enable(model, compress=compress)
        before = functions(model)
        with pytest.raises((ValueError, TypeError), match=f"^gradckpt: .*{message}"):
            turn_on(model, SPELLINGS[0], given)
        assert functions(model) == before, "a refused call changes nothing"
        assert len(handle.modules) == LAYERS
        assert step(model) == (LAYERS if compress else 0)

    def test_nothing_to_compress(self):
        model = build()
        gradckpt.enable(model, compress=None)
        with pytest.raises(ValueError, match='min_numel=5 has no effect without compress; add "compress": "int8"'):
            turn_on(model, SPELLINGS[0], {"min_numel": 5})
        turn_on(model, SPELLINGS[0], {"min_numel": 5, "compress": None})
        assert step(model) == 0

    def test_in_torchs_place(self, monkeypatch):
        """transformers may have imported what stands in torch's place:
        gradckpt.compat.checkpoint."""
        model = build()
        gradckpt.enable(model)
        monkeypatch.setattr(transformers.modeling_utils, "checkpoint", gradckpt.compat.checkpoint)
        on(model)
        assert step(model) == LAYERS


# ---- offload


def grads(model):
    torch.manual_seed(3)
    step(model)
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture
def place(tmp_path):
    made = {"place": "disk", "directory": str(tmp_path), "min_bytes": "1KiB", "host_budget": "256KiB"}
    try:
        place_of(made)
    except ValueError as error:
        pytest.skip(f"the temporary folder's file system serves no store: {error}")
    return made


def puts(place):
    return place_of(place).figures()["puts"]


WAYS = {
    "enable": lambda model, place: gradckpt.enable(model, offload=place),
    "in the dict": lambda model, place: (gradckpt.enable(model), turn_on(model, SPELLINGS[0], {"offload": place})),
    "enable, on again": lambda model, place: (gradckpt.enable(model, offload=place), on(model)),
    "keyword": lambda model, place: (gradckpt.enable(model), on(model, offload=place)),
    "keyword, exact": lambda model, place: (gradckpt.enable(model, None), on(model, offload=place)),
    "the dict wins": lambda model, place: (
        gradckpt.enable(model),
        turn_on(model, SPELLINGS[0], {"offload": place}, offload=True),
    ),
}


@needs_layers
class TestOffload:
    @pytest.mark.parametrize("way", WAYS)
    def test_payloads_go_there(self, way, place):
        if way in ("keyword", "keyword, exact", "the dict wins") and not HAS_EVERY_AND_OFFLOAD:
            pytest.skip("this transformers has no offload=")
        plain, model = build(), build()
        gradckpt.enable(plain, None if way == "keyword, exact" else "int8")
        WAYS[way](model, place)
        assert equal(grads(model), grads(plain))
        assert puts(place) == LAYERS
        gradckpt.disable(model)
        assert vars(model).get(ADAPTER) is None

    @with_every_and_offload
    def test_none_keeps_transformers_own(self, monkeypatch):
        own = torch.autograd.graph.save_on_cpu
        monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", lambda **_: own())  # pinning needs a device
        model, stock = build(), build()
        gradckpt.enable(model, compress=None)
        on(model, {"use_reentrant": False}, offload=True)
        (function,) = functions(model)
        assert "checkpointing_enable.<locals>" in function.func.__qualname__
        on(stock, {"use_reentrant": False}, offload=True)
        assert equal(grads(model), grads(stock))

    @with_every_and_offload
    def test_the_keyword_of_transformers(self):
        """It means host memory, where these tensors are."""
        plain, model = build(), build()
        gradckpt.enable(plain)
        gradckpt.enable(model)
        on(model, offload=True)
        (function,) = functions(model)
        assert offload_of(function.keywords["offload"]) == gradckpt.Offload("cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gradckpt.GradckptInactiveWarning)  # once in a process
            assert equal(grads(model), grads(plain))

    @pytest.mark.parametrize("own", [{"policy": "save_matmuls"}, {"compress": {"fake_quantize": True}}], ids=str)
    def test_with_other_keys(self, own, place):
        plain, model = build(), build()
        gradckpt.enable(plain, **own)
        gradckpt.enable(model, offload=place, **own)
        assert equal(grads(model), grads(plain))
        assert puts(place) == LAYERS

    @pytest.mark.parametrize("way", ["pickle", "deepcopy"])
    def test_copies(self, way, place):
        model = build()
        gradckpt.enable(model, offload=place)
        model = pickle.loads(pickle.dumps(model)) if way == "pickle" else copy.deepcopy(model)
        assert step(model) == LAYERS
        assert puts(place) == LAYERS

    def test_remove(self, place):
        model = build()
        with gradckpt.enable(model, offload=place):
            on(model)
        step(model)
        assert is_stock(model)
        assert puts(place) == 0
        off = build()
        gradckpt.enable(off, offload=place).remove()
        assert is_stock(off)
        assert not is_on(off)

    def test_turned_off_in_the_dict(self, place):
        model = build()
        gradckpt.enable(model, offload=place)
        turn_on(model, SPELLINGS[0], {"offload": False})
        step(model)
        assert puts(place) == 0
