"""Activation checkpointing that keeps its checkpoints compressed.

``gradckpt.checkpoint(function, *args, compress="int8")`` is ``torch.utils.checkpoint.checkpoint``
with compressed region inputs; ``gradckpt.enable(model)`` turns it on in a model.
"""

import logging as _logging

try:
    from gradckpt._C import SelectiveRecompute, checkpoint
except (ImportError, OSError) as _error:
    from gradckpt._doctor import import_error

    raise import_error.of(_error) from _error

from gradckpt import _C, codecs, compat, config, integrations, policies, selectors
from gradckpt._compile import dynamo as _compile
from gradckpt._compression import CompressionConfig, GradckptInactiveWarning
from gradckpt._enable import enable
from gradckpt._engine import callbacks as _callbacks
from gradckpt._engine import custom_ops as _custom_ops  # noqa: F401  registers torch.ops.gradckpt
from gradckpt._engine.saved_tensors import compress_saved
from gradckpt._engine.sequential import checkpoint_sequential
from gradckpt._gradient_error import gradient_error
from gradckpt._memory import track_memory
from gradckpt._models.switch import disable
from gradckpt._offload import Offload
from gradckpt._patching import patched
from gradckpt._planning.plan import plan
from gradckpt._planning.region_plan import Plan
from gradckpt._residuals import residuals
from gradckpt._stats import stats
from gradckpt._version import __version__ as __version__
from gradckpt.integrations.transformers import trainer_flag as _trainer_flag

__all__ = [
    "CompressionConfig",
    "GradckptInactiveWarning",
    "Offload",
    "Plan",
    "SelectiveRecompute",
    "checkpoint",
    "checkpoint_sequential",
    "codecs",
    "compat",
    "compress_saved",
    "config",
    "disable",
    "enable",
    "gradient_error",
    "integrations",
    "patched",
    "plan",
    "policies",
    "residuals",
    "selectors",
    "stats",
    "track_memory",
]

_C.bind(_callbacks.TABLE)
_logging.getLogger("gradckpt").addHandler(_logging.NullHandler())
_trainer_flag.hook_import()
_compile.hook_import()
