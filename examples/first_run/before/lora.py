"""LoRA with PEFT and the Trainer of transformers."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
ids = torch.randint(256, (24, 64))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="lora",
        max_steps=3,
        logging_steps=1,
        activation_checkpointing=True,
        report_to="none",
        save_strategy="no",
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in ids],
)
trainer.train()
