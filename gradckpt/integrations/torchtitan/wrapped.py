"""Policies for torchtitan 0.3.0: a wrapper of gradckpt around each block.

``CompressedSelectiveAC`` keeps the choice of saved outputs that ``SelectiveAC`` makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from torch.nn import Module
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, FullAC, SelectiveAC

from gradckpt.integrations.torch_distributed import checkpoint_wrapper
from gradckpt.integrations.torchtitan.fields import Compressed

__all__ = ["CompressedConfig", "CompressedFullAC", "CompressedSelectiveAC"]


class _Wrapping(Compressed):
    """A block gets our wrapper with the keywords of theirs."""

    def _wrap_block(self, module: Module, *, base_fqn: str | None = None) -> Module:
        stock: Any = super()._wrap_block(module, base_fqn=base_fqn)  # type: ignore[misc]
        options = dict(stock.checkpoint_fn.keywords)
        options.pop("use_reentrant", None)  # ours is never reentrant, as with False
        if getattr(self.config, "policy", ""):
            options["policy"] = self.config.policy
        self.wrapped += 1
        return checkpoint_wrapper(module, compress=self.compress, **options)


class CompressedFullAC(_Wrapping, FullAC):  # type: ignore[misc]
    """``FullAC``: whole blocks are recomputed, from compressed inputs."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):  # type: ignore[misc]
        compress: str = "int8"
        """A codec of gradckpt, or "none": torch's checkpointing, bit for bit."""

        fake_quantize: bool = False
        """Run the forward, too, on the restored inputs."""

        min_numel: int = 1024
        """Inputs with fewer values stay uncompressed."""

        policy: str = ""
        """Outputs that are kept, not recomputed, e.g. "save_matmuls:int8"."""


class CompressedSelectiveAC(_Wrapping, SelectiveAC):  # type: ignore[misc]
    """``SelectiveAC``: torchtitan's choice of outputs is saved uncompressed, block inputs are
    compressed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):  # type: ignore[misc]
        compress: str = "int8"
        """A codec of gradckpt, or "none": torch's checkpointing, bit for bit."""

        fake_quantize: bool = False
        """Run the forward, too, on the restored inputs."""

        min_numel: int = 1024
        """Inputs with fewer values stay uncompressed."""


#: For the field of a Trainer.Config: the command line then knows ours beside torchtitan's own.
CompressedConfig = (
    Annotated[CompressedFullAC.Config, tyro.conf.subcommand("compressed-full")]
    | Annotated[CompressedSelectiveAC.Config, tyro.conf.subcommand("compressed-selective")]
    | ActivationCheckpointingConfig
)
