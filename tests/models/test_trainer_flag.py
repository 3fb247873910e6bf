"""The Trainer's flag alone: activation_checkpointing_kwargs={"compress": ...} and
`import gradckpt`, no enable()."""

import os
import pickle

import pytest
import torch
import worlds
from checkout import ROOT
from model_families import flag
from small_models import config_of
from test_huggingface import (
    ADAPTER,
    DATA,
    HAS_EVERY_AND_OFFLOAD,
    IDS,
    LAYERS,
    NAME,
    SPELLINGS,
    build,
    compressed_by,
    functions,
    is_stock,
    needs_layers,
    off,
    on,
    step,
    train,
    trainer,
    transformers,
    with_every_and_offload,
)

import gradckpt
from gradckpt import GradckptInactiveWarning
from gradckpt._engine.places import place_of
from gradckpt._models.inactivity_hooks import is_on

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

#: Kwargs without a key of ours.
NOT_OURS = [None, {"use_reentrant": False}, *[{"every_n_layers": 2}] * HAS_EVERY_AND_OFFLOAD]


def trainer_of(model, tmp_path, kwargs, **others):
    return trainer(model, tmp_path, **{**flag(kwargs), **others})


@pytest.mark.parametrize("reentrant", [{}, {"use_reentrant": False}], ids=["default", "non-reentrant"])
@pytest.mark.parametrize("name", SPELLINGS)
class TestAlone:
    def test_trains_as_enable_does_and_says_the_same(self, name, reentrant, tmp_path, caplog):
        """Also for which models gradients have larger errors."""
        caplog.set_level("INFO", "gradckpt")
        by_flag, by_hand, stock = build(), build(), build()
        assert train(by_flag, tmp_path, **flag({"compress": "int8", **reentrant}, name)) == 2 * LAYERS
        lines = [record.getMessage() for record in caplog.records]
        said = f"gradckpt: the Trainer's flag: compress='int8' on {LAYERS} layers of LlamaForCausalLM"
        assert [line for line in lines if "flag" in line] == [said]
        assert [line for line in lines if "is less than 64, so groups span tokens" in line]
        gradckpt.enable(by_hand, compress="int8")
        train(by_hand, tmp_path, **flag({"use_reentrant": False}, name))
        train(stock, tmp_path, **flag({"use_reentrant": False}, name))
        pairs = list(zip(by_flag.parameters(), by_hand.parameters(), stock.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b, _ in pairs)
        assert not all(torch.equal(a, c) for a, _, c in pairs)
        assert step(by_flag) == LAYERS, "it stays, as checkpointing stays"
        gradckpt.disable(by_flag)
        assert ADAPTER not in vars(by_flag)
        assert is_stock(by_flag)
        assert step(by_flag) == 0

    def test_none_is_stock_to_the_last_bit(self, name, reentrant, tmp_path):
        ours, stock = build(), build()
        gradckpt.stats.reset()
        train(ours, tmp_path, **flag({"compress": None, **reentrant}, name))
        assert gradckpt.stats()["regions"] == 2 * LAYERS
        assert gradckpt.stats()["compressed"] == 0
        train(stock, tmp_path, **flag({"use_reentrant": False}, name))
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), stock.parameters(), strict=True))


NO_RECOMPUTE = {"compress": {"codec": "int8", "min_numel": 2}, "recompute": False}


class TestNoRecompute:
    @pytest.mark.parametrize("name", SPELLINGS)
    def test_trains_as_enable_does(self, name, tmp_path):
        by_flag, by_hand, plain = build(), build(), build()
        gradckpt.enable(by_hand, NO_RECOMPUTE["compress"], recompute=False)
        gradckpt.stats.reset()
        train(by_flag, tmp_path, **flag(NO_RECOMPUTE, name))
        counted = gradckpt.stats()
        assert counted["compressed"] > 2 * LAYERS
        assert counted["regions"] == 0
        assert not is_on(by_flag)
        train(by_hand, tmp_path)
        train(plain, tmp_path)
        pairs = list(zip(by_flag.parameters(), by_hand.parameters(), plain.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b, _ in pairs)
        assert not all(torch.equal(a, c) for a, _, c in pairs)

    def test_the_next_trainers_flag_replaces_it(self, tmp_path):
        model = build()
        handle = gradckpt.config.Handle(model)
        train(model, tmp_path, **flag(NO_RECOMPUTE))
        assert list(handle.modules) == [""], "it stays, as checkpointing stays"
        train(model, tmp_path, **flag({**NO_RECOMPUTE, "compress": "int4"}))
        assert handle.modules[""]["compress"].codec == "int4"
        train(model, tmp_path, **flag({"compress": "int8"}))
        assert len(handle.modules) == LAYERS
        train(model, tmp_path, **flag(NO_RECOMPUTE))
        assert list(handle.modules) == [""]
        train(model, tmp_path)
        assert not handle.modules
        assert "forward" not in vars(model)

    def test_a_model_that_checkpoints_is_told(self, tmp_path):
        model = build()
        gradckpt.enable(model)
        with pytest.raises(ValueError, match="cannot change a model that checkpoints"):
            train(model, tmp_path, **flag({"recompute": False}))


class TestKeys:
    @with_every_and_offload
    def test_all_of_them(self, tmp_path):
        model = build()
        kwargs = {
            "compress": "fp8",
            "fake_quantize": True,
            "min_numel": 2,
            "policy": "save_attention",
            "every_n_layers": 2,
            "offload": True,
            "preserve_rng_state": False,
            "determinism_check": "none",
        }
        with pytest.warns(gradckpt.GradckptInactiveWarning, match="it is in host memory already"):
            assert train(model, tmp_path, **flag(kwargs)) == LAYERS
        adapter = vars(model)[ADAPTER]
        assert adapter.active == gradckpt.CompressionConfig("fp8", fake_quantize=True, min_numel=2)
        assert adapter.settings.every_n_layers == 2
        assert adapter.settings.offload
        assert adapter.function.keywords["preserve_rng_state"] is False
        assert adapter.function.keywords["determinism_check"] == "none"
        off(model)
        on(model)
        assert step(model) == LAYERS // 2, "what the flag said holds when others turn it on again"

    @with_every_and_offload
    @pytest.mark.parametrize("kwargs", [{"compress": "int8"}, {"compress": None}, {}], ids=str)
    @pytest.mark.parametrize("enabled", [False, True])
    def test_a_disk(self, kwargs, enabled, tmp_path):
        """The Trainer takes offload out of the dict, and transformers knows only yes or no."""
        place = {"place": "disk", "directory": str(worlds.with_disk(tmp_path)), "min_bytes": "1KiB"}
        place["host_budget"] = "256KiB"
        model = build()
        if enabled:
            gradckpt.enable(model)
        train(model, tmp_path, **flag({**kwargs, "offload": place}))
        assert place_of(place).figures()["puts"] == 2 * LAYERS

    @pytest.mark.parametrize("kwargs", NOT_OURS)
    def test_nothing_of_ours_nothing_done(self, kwargs, tmp_path):
        model = build()
        gradckpt.stats.reset()
        train(model, tmp_path, **flag(kwargs))
        assert ADAPTER not in vars(model)
        assert gradckpt.stats()["regions"] == 0

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"compress": "int8", "min_numell": 3}, r"unknown key 'min_numell' .* did you mean 'min_numel'\?"),
            ({"policy": "save_matmul:int8"}, r"unknown policy 'save_matmul'; did you mean 'save_matmuls'\?"),
            ({"min_numel": 5}, r'min_numel=5 has no effect without compress; add "compress": "int8"'),
            ({"compress": "int8", "use_reentrant": True}, "compress='int8' needs use_reentrant=False"),
            ({"compress": "int8", "recompute": False, "use_reentrant": True}, "and use_reentrant= exclude each other"),
            ({"compress": "int8", "recompute": False, "policy": "save_attention"}, "and policy= exclude each other"),
            ({"compress": "int8", "recompute": 0}, "recompute is True or False, not 0"),
        ],
    )
    def test_what_is_wrong_is_said_when_the_trainer_is_made(self, kwargs, message, tmp_path):
        """Each of the rules for kwargs: test_checkpointing_kwargs.py."""
        model = build()
        with pytest.raises((ValueError, TypeError), match=f"^gradckpt: .*{message}"):
            trainer_of(model, tmp_path, kwargs)
        assert ADAPTER not in vars(model)

    def test_an_unknown_key_is_refused_before_the_first_step(self, tmp_path):
        model = build()
        trainer = trainer_of(model, tmp_path, {"compress": "int8", "spam": 1})
        weights = [p.clone() for p in model.parameters()]
        with pytest.raises(ValueError, match=r"unknown key 'spam' among the checkpointing kwargs; the keys are: com"):
            trainer.train()
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        assert ADAPTER not in vars(model)
        assert not model._forward_hooks

    def test_kwargs_without_the_flag_warn(self, tmp_path):
        model = build()
        trainer = trainer_of(model, tmp_path, {"compress": "int8"}, **{NAME: False})
        with pytest.warns(GradckptInactiveWarning, match=rf"compress='int8', but {NAME} is not True.*set {NAME}=True"):
            trainer.train()
        assert ADAPTER not in vars(model)

    def test_what_enable_said_completes_the_kwargs(self, tmp_path):
        model = build()
        handle = gradckpt.enable(model, compress="fp8")
        assert train(model, tmp_path, **flag({"fake_quantize": True})) == 2 * LAYERS
        assert config_of(handle) == gradckpt.CompressionConfig("fp8", fake_quantize=True)


class TestTrainers:
    """One Trainer twice, two Trainers, new models, no training."""

    def test_train_twice(self, tmp_path):
        trainer = trainer_of(build(), tmp_path, {"compress": "int8"})
        assert [compressed_by(trainer.train) for _ in range(2)] == [2 * LAYERS] * 2
        hooks = trainer.model._forward_hooks
        assert len(hooks) == 1

    def test_model_init(self, tmp_path):
        made = []

        def init():
            made.append(build())
            return made[-1]

        trainer = trainer_of(None, tmp_path, {"compress": "int8"}, model_init=init)
        assert [compressed_by(trainer.train) for _ in range(2)] == [2 * LAYERS] * 2
        assert len(made) == 3
        assert ADAPTER not in vars(made[0]), "the one that was never trained"

    @pytest.mark.parametrize("call", ["evaluate", "predict"])
    def test_without_training_nothing_is_touched(self, call, tmp_path):
        model = build()
        trainer = trainer_of(model, tmp_path, {"compress": "int8"}, eval_dataset=DATA)
        getattr(trainer, call)(DATA)
        assert ADAPTER not in vars(model)
        assert not is_on(model)
        assert not functions(model) - {None}

    @pytest.mark.parametrize(
        ("others", "count"),
        [
            ({"bf16": True}, 2),
            ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}, 4),
            ({"eval_dataset": DATA, "eval_on_start": True, "eval_strategy": "steps", "eval_steps": 1}, 2),
        ],
        ids=["bf16", "accumulation", "evaluation in between"],
    )
    def test_settings_of_the_trainer(self, others, count, tmp_path):
        assert compressed_by(trainer_of(build(), tmp_path, {"compress": "int8"}, **others).train) == count * LAYERS

    @with_every_and_offload
    def test_generation_around_steps(self, tmp_path):
        """TRL: off with the Trainer's dict at hand, generate,
        on again with none or with the dict as it is."""
        kwargs = {"compress": "int8", "every_n_layers": 2}

        class Generate(transformers.TrainerCallback):
            def on_step_begin(self, args, state, control, model, **others):
                off(model)
                with torch.no_grad():
                    model.eval().generate(IDS[:1, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
                on(model.train(), *[kwargs] * (state.global_step % 2))

        assert compressed_by(trainer_of(build(), tmp_path, kwargs, callbacks=[Generate()]).train) == LAYERS

    def test_arguments_stay_json(self, tmp_path):
        trainer = trainer_of(build(), tmp_path, {"compress": "int8", "policy": "save_matmuls"})
        trainer.train()
        assert trainer.args.to_dict()[f"{NAME}_kwargs"] == {"compress": "int8", "policy": "save_matmuls"}
        assert "int8" in trainer.args.to_json_string()
        pickle.loads(pickle.dumps(trainer.args))
        trainer.save_model(str(tmp_path / "saved"))
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
        assert ADAPTER not in vars(again)


class Wrapper(torch.nn.Module):
    """A module of the user's around a transformers model, as sentence-transformers has."""

    def __init__(self, *models):
        super().__init__()
        self.models = torch.nn.ModuleList(models)

    def activation_checkpointing_enable(self, *args, **kwargs):
        for model in self.models:
            on(model, *args, **kwargs)

    gradient_checkpointing_enable = activation_checkpointing_enable

    def forward(self, input_ids=None, labels=None):
        return self.models[0](input_ids=input_ids, labels=labels)


class TestModels:
    def test_two_inside(self, tmp_path):
        pair = Wrapper(build(), build())
        assert train(pair, tmp_path, **flag({"compress": "int8"})) == 2 * LAYERS
        assert [step(model) for model in pair.models] == [LAYERS, LAYERS], "both were given the kwargs"

    def test_the_part_is_enabled(self, tmp_path):
        model = build()
        """The flag is for all of the model, as enable() would be."""
        handle = gradckpt.enable(model.model, "int4")
        assert train(model, tmp_path, **flag({"compress": "int8"})) == 2 * LAYERS
        assert handle.modules == {}
        assert ADAPTER not in vars(model.model) or not isinstance(
            vars(model.model)[ADAPTER], type(vars(model)[ADAPTER])
        )

    @needs_layers
    def test_chosen_modules_are_checkpointed_too(self, tmp_path):
        model = build()
        gradckpt.enable(model, None, modules={"layer": "int8"})
        with pytest.raises(ValueError, match=r"checkpointed already: by gradckpt\.enable; call gradckpt\.disable"):
            train(model, tmp_path, **flag({"compress": "int8"}))
        with pytest.raises(ValueError, match=r"was turned on since gradckpt\.enable, which checkpoints it too"):
            train(model, tmp_path, **flag())
        off(model)
        assert train(model, tmp_path) == 2 * LAYERS


# ---- before and after transformers

SCRIPT = """
import os, sys, tempfile, warnings
os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")
{imports}
import torch
sys.path[:0] = ["tests/models", "tests/helpers"]
from test_huggingface import build, train, LAYERS
with tempfile.TemporaryDirectory() as where:
    print(train(build(), where, {name}=True, {name}_kwargs={{"compress": "int8"}}) == 2 * LAYERS)
"""

ORDERS = {
    "gradckpt first": "import gradckpt\nimport transformers",
    "its Trainer first": "from transformers import Trainer\nimport gradckpt",
    "asked where it is": "import gradckpt, importlib.util\nimportlib.util.find_spec('transformers.trainer')",
}


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_imports(order):
    script = SCRIPT.format(imports=ORDERS[order], name=NAME)
    done = worlds.call("-c", script, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.split()[-1:] == ["True"], done.stderr
