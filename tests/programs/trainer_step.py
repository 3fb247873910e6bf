"""A step of the Trainer with its flag alone, as docs/frameworks.md writes it."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gradckpt

config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
ids = torch.arange(64)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"compress": {"codec": "int8", "min_numel": 1}},
    )
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 8).train()
stats = gradckpt.stats()
assert 0 < stats["bytes_out"] < stats["bytes_in"], stats
