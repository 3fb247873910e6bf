"""The Trainer with fsdp_config, two ranks on gloo:
compression by activation_checkpointing_kwargs alone."""

import contextlib
import os

import model_families
import pytest
import torch
import worlds
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments
from world_accelerate import llama, pretend_device
from world_torch import clean, compare

import gradckpt

# ---- What each rank does in the tests of the Trainer with fsdp_config.

STEPS = 3


def arguments(version, compress, flag):
    for name in list(os.environ):  # an earlier TrainingArguments left them, for accelerate
        if name.startswith("FSDP_"):
            del os.environ[name]
    config = {
        "version": version,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "activation_checkpointing": flag,
    }
    if version == 1:
        config |= {"use_orig_params": True, "sync_module_states": False, "cpu_ram_efficient_loading": False}
    kwargs = {"use_reentrant": False} if compress == "torch" else {"compress": None if compress == "None" else compress}
    made = TrainingArguments(
        os.environ["GRADCKPT_TEST_WORLD"],
        per_device_train_batch_size=2,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-2,
        optim="sgd",
        seed=3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config=config,
        **model_families.flag(kwargs),
    )
    assert made.device.type == "cpu"  # asks accelerate, which starts its state anew
    pretend_device()
    return made


class Losses(TrainerCallback):
    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.values += [logs["loss"]] if "loss" in logs else []


def data():
    for seed in range(16):
        ids = torch.randint(0, 64, (32,), generator=torch.Generator().manual_seed(seed))
        yield {"input_ids": ids, "labels": ids}


def train(version, compress, flag=False):
    losses = Losses()
    gradckpt.stats.reset()
    trainer = Trainer(
        model=llama(), args=arguments(version, compress, flag), train_dataset=list(data()), callbacks=[losses]
    )
    trainer.train()
    model = trainer.model_wrapped
    whole = contextlib.nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        whole = FullyShardedDataParallel.summon_full_params(model)
    with whole:
        named = [(clean(name), p.detach()) for name, p in model.named_parameters()]
        return type(model).__name__, losses.values, {n: getattr(p, "full_tensor", p.clone)() for n, p in named}


def trainers():
    found = {}
    for version in (1, 2):
        _, stock, expected = train(version, "torch")
        for compress in ("None", "int8"):
            engine, losses, parameters = train(version, compress)
            stats = gradckpt.stats()
            found[f"fsdp{version} {compress}"] = {
                **compare(parameters, expected),
                "engine": engine,
                "losses": [losses, stock],
                **{key: stats[key] for key in ("regions", "eligible", "compressed", "bytes_in", "bytes_out")},
            }
        try:
            train(version, "int8", flag=True)
        except ValueError as error:
            found[f"fsdp{version} flag"] = str(error)
    return found


pytest.importorskip("transformers", minversion="5.17", reason="the Trainer before 5.17 reads fsdp_config otherwise")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return worlds.run(trainers, tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize("compress", ["None", "int8"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_flag(found, version, compress):
    for rank in found:
        r = rank[f"fsdp{version} {compress}"]
        assert r["engine"] == ["FullyShardedDataParallel", "FSDPLlamaForCausalLM"][version - 1]
        assert r["regions"] == 9  # 3 layers, 3 steps
        mine, stock = r["losses"]
        assert mine[0] == stock[0]
        if compress == "None":
            assert mine == stock
            assert r["equal"], "a parameter differs from that of transformers' own checkpointing"
            assert r["compressed"] == 0
        else:
            assert not r["equal"]
            assert r["error"] < 1e-4
            assert r["compressed"] == r["eligible"] == 9
            assert 0 < r["bytes_out"] < 0.26 * r["bytes_in"]


@pytest.mark.parametrize("version", [1, 2])
def test_fsdps_own_flag_beside_ours_is_an_error(found, version):
    for rank in found:
        assert "can't both be set to True" in rank[f"fsdp{version} flag"]
