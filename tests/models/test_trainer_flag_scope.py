"""The Trainer's flag acts on models of transformers that were given our keys, for one Trainer,
and on nothing else."""

import functools
import pickle

import pytest
import torch
from model_families import flag
from test_huggingface import (
    ADAPTER,
    LAYERS,
    NAME,
    build,
    compressed_by,
    functions,
    is_stock,
    step,
    train,
    trainer,
    transformers,
)
from test_trainer_flag import trainer_of

import gradckpt
from gradckpt import GradckptInactiveWarning
from gradckpt._engine import op_mixing
from gradckpt._models.keywords import OURS
from gradckpt.integrations.transformers import trainer_callback
from gradckpt.integrations.transformers.trainer_callback import GradckptFlag

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Own(torch.nn.Module):
    """A model of one's own, which may have kwargs of its own."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.given = []

    def forward(self, input_ids=None, labels=None):
        return {"loss": self.linear(input_ids[..., :8] / 64.0).square().mean()}


class OwnWithKwargs(Own):
    def activation_checkpointing_enable(self, kwargs=None, **own):
        self.given.append(kwargs or next(iter(own.values())))

    gradient_checkpointing_enable = activation_checkpointing_enable


class OwnAroundATransformer(OwnWithKwargs):
    """It keeps the kwargs to itself."""

    def __init__(self):
        super().__init__()
        self.backbone = build()


#: Kwargs of others.
UNLIKE_OURS = [
    *({"policy": "nothing_saveable"}, {"policy": print}, {"policy": None}),
    *({"policies": ["save_attention"]}, {"selective": True}),
]
NEAR_OURS = [{"compression": "zstd"}, {"compres": 1}, {"offloading": 3}]
OF_OTHERS = [*UNLIKE_OURS, *NEAR_OURS]


@pytest.mark.filterwarnings("error::gradckpt.GradckptInactiveWarning")
class TestOthers:
    @pytest.mark.parametrize("make", [OwnWithKwargs, OwnAroundATransformer])
    @pytest.mark.parametrize("kwargs", OF_OTHERS, ids=str)
    def test_kwargs_of_a_model_of_ones_own(self, make, kwargs, tmp_path):
        model = make()
        train(model, tmp_path, **flag(kwargs))
        assert model.given == [kwargs]

    @pytest.mark.parametrize(
        "kwargs", [{"compress": "zstd"}, {"compress": True, "level": 3}, {"min_numel": "9"}], ids=str
    )
    def test_our_words_in_a_model_that_keeps_them_to_itself(self, kwargs, tmp_path):
        model = OwnAroundATransformer()
        train(model, tmp_path, **flag(kwargs))
        assert model.given == [kwargs]
        assert ADAPTER not in vars(model.backbone)
        train(model, tmp_path, **{**flag(kwargs), NAME: False})
        assert len(model.given) == 1

    @pytest.mark.parametrize("kwargs", OF_OTHERS, ids=str)
    def test_a_trainer_of_anothers_takes_its_key_out(self, kwargs, tmp_path):
        class Other(transformers.Trainer):
            def train(self):
                taken.append(getattr(self.args, f"{NAME}_kwargs"))
                setattr(self.args, f"{NAME}_kwargs", {"use_reentrant": False})
                return super().train()

        taken, model = [], build()
        made = trainer_of(model, tmp_path, kwargs)
        Other(model=model, args=made.args, train_dataset=made.train_dataset).train()
        assert taken == [kwargs]
        assert ADAPTER not in vars(model)

    @pytest.mark.parametrize("kwargs", [None, {}, {"use_reentrant": False}, *UNLIKE_OURS], ids=str)
    def test_the_model_is_not_even_looked_at(self, kwargs, monkeypatch):
        monkeypatch.setattr(trainer_callback, "ADAPTERS", set())  # no model is enabled
        args = type("Args", (), {NAME: True, f"{NAME}_kwargs": kwargs})()
        callback = GradckptFlag()
        for event in (callback.on_init_end, callback.on_train_begin):
            event(args, None, None, model=object())


MISSPELT = [*((key[:-2] + key[-1], key) for key in OURS if key != "plan"), ("compression", None), ("offloading", None)]


@pytest.mark.parametrize(("wrong", "meant"), MISSPELT)
def test_a_misspelt_key_that_reaches_the_layers(wrong, meant, tmp_path):
    """transformers hands it to torch's checkpoint, and this to the layers, which ignore it."""
    hint = rf"unknown key '{wrong}' among the checkpointing kwargs; did you mean '{meant or '[a-z]+'}'"
    for beside in ({}, {"use_reentrant": False}):
        with pytest.raises(ValueError, match=hint):
            train(build(), tmp_path, **flag({**beside, wrong: True}))
    model = build()
    gradckpt.enable(model, "int8")
    with pytest.raises(ValueError, match=hint):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={wrong: True})


def test_a_key_of_the_layers_is_not_ours(tmp_path, monkeypatch):
    model = build()
    layer = type(model.model.layers[0])
    forward = layer.forward

    def with_key(self, hidden_states, *args, planned=None, **kwargs):
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", with_key)
    train(model, tmp_path, **flag({"use_reentrant": False, "planned": 1}))  # raises nothing


def test_hint_for_a_model_of_ones_own(tmp_path):
    with pytest.warns(
        GradckptInactiveWarning,
        match=rf"{NAME}_kwargs has compress='int8', but Own is not a transformers model; call gradckpt.enable",
    ):
        trainer_of(Own(), tmp_path, {"compress": "int8"})


def test_another_library_is_in_our_place(tmp_path):
    model = build()
    stock = model._set_gradient_checkpointing
    model._set_gradient_checkpointing = functools.partial(stock)
    with pytest.raises(ValueError, match=r"already replaces LlamaForCausalLM\._set_gradient_checkpointing"):
        train(model, tmp_path, **flag({"compress": "int8"}))


PRODUCTS = 2 * 7 * LAYERS  # of two steps


@pytest.mark.parametrize(
    ("policy", "kept", "compressed"),
    [
        ("save_attention", 2 * 2 * LAYERS, 0),  # with its log-sum-exp
        ("save_matmuls:int8", PRODUCTS, PRODUCTS),
        (gradckpt.policies.save_matmuls, PRODUCTS, 0),
    ],
    ids=str,
)
def test_policy_alone_counts_when_its_value_is_ours(policy, kept, compressed, tmp_path):
    """Inputs stay exact."""
    gradckpt.stats.reset()
    assert train(build(), tmp_path, **flag({"policy": policy})) == compressed
    assert gradckpt.stats()["policy_outputs"] == kept
    assert gradckpt.stats()["regions"] == 2 * LAYERS


def test_policy_alone_says_what_it_does_not_keep(tmp_path):
    op_mixing.ran_again.clear()
    gradckpt.stats.reset()
    with pytest.warns(GradckptInactiveWarning, match=r"flash_attention_for_cpu.default runs again"):
        train(build(), tmp_path, **flag({"policy": "save_attention|save_matmuls:int8"}))
    assert gradckpt.stats()["policy_outputs"] == PRODUCTS
    with pytest.raises(ValueError, match="unknown codec 'int7'"):
        trainer_of(build(), tmp_path, {"policy": "save_attention:int7"})


# ---- keys that others take out on the way to the layers


def contexts():
    return gradckpt.compat.create_selective_checkpoint_contexts(lambda ctx, op, *args, **kwargs: False)


def wrap(model):
    """What TRL does for its key ``selective``."""
    stock = getattr(model, f"{NAME}_enable")

    def enable(given=None, **others):
        key = f"{NAME}_kwargs"
        kwargs = {k: v for k, v in (others.pop(key, None) or given or {}).items() if k != "selective"}
        return stock(**{key: {**kwargs, "use_reentrant": False, "context_fn": contexts}}, **others)

    setattr(model, f"{NAME}_enable", enable)
    return model


def test_a_key_that_is_taken_out_passes_and_what_came_in_its_place_holds(tmp_path):
    model = wrap(build())
    assert train(model, tmp_path, **flag({"compress": "int8", "selective": True})) == 2 * LAYERS
    (function,) = functions(model)
    assert function.keywords["context_fn"] is contexts


# ---- one Trainer after another


class TestOneAfterAnother:
    @pytest.mark.parametrize("made", ["before", "after"])
    @pytest.mark.parametrize(
        "flags",
        [{NAME: False}, flag(), flag({"use_reentrant": False}), flag({"use_reentrant": True}), flag({"selective": 1})],
        ids=["off", "on", "non-reentrant", "reentrant", "a key of others"],
    )
    def test_what_the_first_said_is_over(self, flags, made, tmp_path):
        """The second may be made while the first trains."""
        model = wrap(build()) if "selective" in (flags.get(f"{NAME}_kwargs") or {}) else build()
        first = trainer_of(model, tmp_path, {"compress": "int8"})
        second = [trainer(model, tmp_path, **flags)] if made == "before" else []
        assert compressed_by(first.train) == 2 * LAYERS
        second = second or [trainer(model, tmp_path, **flags)]
        assert compressed_by(second[0].train) == 0
        assert ADAPTER not in vars(model)
        assert is_stock(model)
        assert compressed_by(first.train) == 2 * LAYERS

    def test_other_settings(self, tmp_path):
        model = build()
        first = {"compress": "int8", "policy": "save_matmuls"}
        for kwargs in (first, {"compress": "fp8", "context_fn": contexts}, {"compress": "int4"}, first):
            assert train(model, tmp_path, **flag(kwargs)) == 2 * LAYERS
            assert vars(model)[ADAPTER].active.codec == gradckpt.CompressionConfig(kwargs["compress"]).codec
        assert train(model, tmp_path, **flag({"compress": None, "use_reentrant": True})) == 0

    @pytest.mark.parametrize("second", [{"compress": "int8"}, {"compress": "fp8"}, None], ids=str)
    @pytest.mark.parametrize("first", ["part", "whole"])
    def test_a_part_and_the_whole(self, first, second, tmp_path):
        model = build()
        part = Part(model)
        inner, outer = (part, model) if first == "part" else (model, part)
        train(inner, tmp_path, **flag({"compress": "int8"}))
        count = train(outer, tmp_path, **flag(second))
        assert count == (2 * LAYERS if second else 0)
        gradckpt.stats.reset()
        if second:
            gradckpt.disable(model if ADAPTER in vars(model) else model.model)
        assert is_stock(model)

    def test_a_part_of_what_is_enabled_by_hand(self, tmp_path):
        """The enabled model has heard of it, as with its own Trainer."""
        model = build()
        handle = gradckpt.enable(model)
        assert train(Part(model), tmp_path, **flag({"compress": "int6"})) == 2 * LAYERS
        assert {each["compress"].codec for each in handle.modules.values()} == {"int6"}

    def test_a_copy(self, tmp_path):
        model = build()
        train(model, tmp_path, **flag({"compress": "int8"}))
        copy = pickle.loads(pickle.dumps(model))
        assert step(copy) == LAYERS
        assert train(copy, tmp_path, **{NAME: False}) == 0
        assert step(model) == LAYERS, "the other's goes on"

    def test_an_interrupted_training(self, tmp_path):
        class Stop(transformers.TrainerCallback):
            def on_step_end(self, *args, **kwargs):
                raise KeyboardInterrupt

        model = build()
        with pytest.raises(KeyboardInterrupt):
            trainer_of(model, tmp_path, {"compress": "int8"}, callbacks=[Stop()]).train()
        assert train(model, tmp_path, **{NAME: False}) == 0

    def test_enabled_by_hand_stays(self, tmp_path):
        model = build()
        gradckpt.enable(model)
        assert train(model, tmp_path, **{NAME: False}) == 2 * LAYERS
        assert train(model, tmp_path, **flag()) == 2 * LAYERS
        pickle.dumps(model)


class Part(torch.nn.Module):
    """Trains the part of a model by itself."""

    def __init__(self, whole):
        super().__init__()
        self.part = whole.model

    def __getattr__(self, name):
        return getattr(super().__getattr__("part"), name) if name.endswith("_enable") else super().__getattr__(name)

    def forward(self, input_ids=None, labels=None):
        return {"loss": self.part(input_ids=input_ids).last_hidden_state.square().mean()}


# ---- the rest


def test_what_trainers_hold_of_ours_can_be_pickled(tmp_path):
    for kwargs in (None, {"compress": "int8"}):
        callbacks = trainer_of(build(), tmp_path, kwargs).callback_handler.callbacks
        assert [type(each) for each in pickle.loads(pickle.dumps(callbacks))].count(GradckptFlag) == 1


def test_instances_among_the_default_callbacks(monkeypatch):
    """transformers takes them as well as classes."""
    from transformers import trainer

    from gradckpt.integrations.transformers import trainer_flag

    class Mine(transformers.TrainerCallback):
        pass

    instance = Mine()
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [instance])
    trainer_flag._install(trainer)
    trainer_flag._install(trainer)
    assert [instance, GradckptFlag] == trainer.DEFAULT_CALLBACKS
