"""torchtitan: its policies of activation checkpointing, with the inputs of the blocks compressed.

    activation_checkpoint=CompressedFullAC.Config(compress="int8")

in a configuration takes the place of ``FullAC.Config()``; ``CompressedSelectiveAC`` that of ``SelectiveAC``, whose
choice of saved outputs stays what it is. All fields are strings, numbers and flags, for JSON and the command line.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from torch.nn import Module
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, FullAC, SelectiveAC

from gradckpt.config import CompressionConfig
from gradckpt.integrations.wrapper import checkpoint_wrapper

__all__ = ["CompressedConfig", "CompressedFullAC", "CompressedSelectiveAC"]

logger = logging.getLogger("gradckpt")


class _Compressed:
    """Over one of torchtitan's policies: the block that it wraps gets our wrapper with the same keywords."""

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self.compress = _parse(config)
        self.wrapped = 0  # blocks so far

    def _wrap_block(self, module: Module, *, base_fqn: str | None = None) -> Module:
        stock: Any = super()._wrap_block(module, base_fqn=base_fqn)  # type: ignore[misc]
        options = dict(stock.checkpoint_fn.keywords)
        options.pop("use_reentrant", None)  # ours is what False means
        if getattr(self.config, "policy", ""):
            options["policy"] = self.config.policy
        self.wrapped += 1
        return checkpoint_wrapper(module, compress=self.compress, **options)

    def apply(self, model: Module) -> None:
        super().apply(model)  # type: ignore[misc]
        codec = "uncompressed" if self.compress is None else self.compress.codec
        logger.info("%s: %d blocks, inputs %s", type(self).__name__, self.wrapped, codec)


def _parse(config: Any) -> CompressionConfig | None:
    if config.compress == "none":
        if config.replay:
            raise ValueError('gradckpt: replay=True needs a codec; compress is "none"')
        return None
    return CompressionConfig(config.compress, replay=config.replay, min_numel=config.min_numel)


class CompressedFullAC(_Compressed, FullAC):  # type: ignore[misc]
    """``FullAC``: whole blocks are recomputed, from inputs that are kept compressed."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):  # type: ignore[misc]
        compress: str = "int8"
        """A codec of gradckpt, or "none": torch's checkpointing, bit for bit."""

        replay: bool = False
        """Run the forward, too, on the restored inputs."""

        min_numel: int = 1024
        """Inputs with fewer values are kept as they are."""

        policy: str = ""
        """Outputs that are kept instead of computed again, e.g. "save_attention|save_matmuls:int8"."""


class CompressedSelectiveAC(_Compressed, SelectiveAC):  # type: ignore[misc]
    """``SelectiveAC``: torchtitan's choice of outputs is saved as it is, inputs of the blocks are kept compressed."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):  # type: ignore[misc]
        compress: str = "int8"
        """A codec of gradckpt, or "none": torch's checkpointing, bit for bit."""

        replay: bool = False
        """Run the forward, too, on the restored inputs."""

        min_numel: int = 1024
        """Inputs with fewer values are kept as they are."""


#: For the field of a Trainer.Config, so that the command line knows ours beside torchtitan's own.
CompressedConfig = (
    Annotated[CompressedFullAC.Config, tyro.conf.subcommand("compressed-full")]
    | Annotated[CompressedSelectiveAC.Config, tyro.conf.subcommand("compressed-selective")]
    | ActivationCheckpointingConfig
)
