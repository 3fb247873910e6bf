"""The words for dtypes and optimizers that other libraries use: :func:`dtype_name`,
:func:`optimizer_name`.
"""

from __future__ import annotations

import torch

__all__ = ["MIXED", "STORED", "dtype_name", "optimizer_name"]

#: Name -> dtype of the parameters.
STORED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: Float32 parameters under autocast, and to which dtype.
MIXED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}

#: torch's words.
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}

#: transformers' words, of TrainingArguments.optim, and torch's.
_OPTIMIZERS = {
    "adam": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit",
    "paged_adamw": "adamw",
    "paged_adamw_32bit": "adamw",
    "lion_32bit": "lion",
    "lion_8bit": "lion-8bit",
    "paged_lion_8bit": "lion-8bit",
    "paged_lion_32bit": "lion",
}


def dtype_name(text: str) -> str:
    """Return our name of a dtype or a mixture; one that is not known as it is."""
    return _DTYPES.get(text.removeprefix("torch."), text)


def optimizer_name(text: str) -> str:
    """Return our name of an optimizer; one that is not known as it is."""
    return _OPTIMIZERS.get(text.lower(), text)
