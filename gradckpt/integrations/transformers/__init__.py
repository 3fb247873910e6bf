"""Hugging Face transformers: its models' own switch, and the Trainer's flag."""
