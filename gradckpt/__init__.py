"""Activation checkpointing that keeps its checkpoints compressed.

``gradckpt.checkpoint(function, *args, compress="int8")`` is ``torch.utils.checkpoint.checkpoint``
with compressed region inputs; ``gradckpt.enable(model)`` turns it on in a model.
"""

import logging as _logging

try:
    from gradckpt._C import SelectiveRecompute, checkpoint
except (ImportError, OSError) as _error:
    from gradckpt import _import_error

    raise _import_error.of(_error) from _error

from gradckpt import _ops as _ops
from gradckpt import codecs, compat, config, integrations, policies, selectors
from gradckpt import compile as _compile
from gradckpt._memory import track_memory
from gradckpt.config import CompressionConfig, GradckptInactiveWarning
from gradckpt.integrations import trainer_flag
from gradckpt.patched import patched
from gradckpt.residuals import residuals
from gradckpt.saved import compress_saved
from gradckpt.sequential import checkpoint_sequential
from gradckpt.stats import stats
from gradckpt.switch import disable, enable

__version__ = "0.1.0"

__all__ = [
    "CompressionConfig",
    "GradckptInactiveWarning",
    "SelectiveRecompute",
    "checkpoint",
    "checkpoint_sequential",
    "codecs",
    "compat",
    "compress_saved",
    "config",
    "disable",
    "enable",
    "integrations",
    "patched",
    "policies",
    "residuals",
    "selectors",
    "stats",
    "track_memory",
]

_logging.getLogger("gradckpt").addHandler(_logging.NullHandler())
trainer_flag.watch()
_compile.watch()
