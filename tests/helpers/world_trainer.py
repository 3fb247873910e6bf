"""What each rank does in the tests of the Trainer with fsdp_config."""

import contextlib
import os

import torch
import transformers_names
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments
from world_accelerate import llama, pretend_device
from world_torch import clean, compare

import gradckpt

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
        **transformers_names.flag(kwargs),
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
