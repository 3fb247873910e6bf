"""Supervised fine-tuning with TRL."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = Tokenizer(WordLevel({f"<{i}>": i for i in range(256)}, unk_token="<0>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<1>")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=SFTConfig(
        output_dir="sft",
        max_steps=3,
        logging_steps=1,
        max_length=64,
        activation_checkpointing=True,
        report_to="none",
        save_strategy="no",
        bf16=False,
    ),
    train_dataset=Dataset.from_dict({"input_ids": torch.randint(2, 256, (24, 64)).tolist()}),
    processing_class=tokenizer,
)
trainer.train()
