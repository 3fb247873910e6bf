"""Preferences with TRL's DPO."""

import copy

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, 256)}, unk_token="<pad>"))
words.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)
texts = ["".join(f" w{i}" for i in row) for row in torch.randint(2, 256, (3 * 24, 32)).tolist()]
model = LlamaForCausalLM(config)
trainer = DPOTrainer(
    model=model,
    ref_model=copy.deepcopy(model),
    args=DPOConfig(
        output_dir="dpo",
        max_steps=3,
        logging_steps=1,
        activation_checkpointing=True,
        report_to="none",
        save_strategy="no",
        bf16=False,
    ),
    train_dataset=Dataset.from_dict({"prompt": texts[:24], "chosen": texts[24:48], "rejected": texts[48:]}),
    processing_class=tokenizer,
)
trainer.train()
