"""A small Llama with the Hugging Face Trainer, as its examples do it."""

import sys
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Bytes(torch.utils.data.Dataset):
    def __init__(self, path, context=64):
        data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
        self.rows = data[: len(data) // context * context].view(-1, context)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class FirstGradients(TrainerCallback):
    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found = self.found or {name: p.grad.clone() for name, p in model.named_parameters()}


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    gradients = FirstGradients()
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Bytes(__file__), callbacks=[gradients])
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    torch.save({"losses": losses, "gradients": gradients.found, "weights": weights}, f"{args.output_dir}/result.pt")


if __name__ == "__main__":
    sys.exit(main())
