"""``python -m front_end.train config.yaml``"""

import sys

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        settings = yaml.safe_load(file)
    torch.manual_seed(settings["seed"])
    model = LlamaForCausalLM(LlamaConfig(**settings["model"]))
    ids = torch.randint(settings["model"]["vocab_size"], (24, settings["sequence_len"]))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    args = TrainingArguments(**settings["training"], activation_checkpointing=settings["gradient_checkpointing"])
    Trainer(model=model, args=args, train_dataset=rows).train()


if __name__ == "__main__":
    main()
