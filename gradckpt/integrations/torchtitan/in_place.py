"""Policies for torchtitan's main branch: each block's forward becomes a region of gradckpt.

torchtitan's ``RegionAC.apply`` tells each block which of its regions are saved, and then wraps it.
The regions are calls of ``torch_remat.region`` in the model's code: those that a configuration
chooses, and those that are always saved because running them again would be wrong, such as the
choice of experts. Both come with ``recompute=False``, which regions of gradckpt honour.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.nn import Module
from torchtitan.distributed.activation_checkpoint import RegionAC, SelectiveAC

from gradckpt._models.switch import enable
from gradckpt.integrations.torchtitan.fields import Compressed

__all__ = ["CompressedFullAC", "CompressedRegionAC", "CompressedSelectiveAC"]

if not issubclass(SelectiveAC, RegionAC):
    raise ImportError(
        "gradckpt: this torchtitan has RegionAC and a SelectiveAC that is none; install 0.3.0 or a later main branch"
    )


class CompressedRegionAC(Compressed, RegionAC):  # type: ignore[misc]
    """``RegionAC``: chosen regions of the model are saved, the rest of a block is recomputed, from
    compressed inputs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RegionAC.Config):  # type: ignore[misc]
        save_regions: list[str] = field(default_factory=list)
        """Patterns of the regions that are saved; empty: only those that the model always saves."""

        preserve_rng_state: bool = True
        """Restore random state in the recompute, also after a saved region that drew numbers."""

        compress: str = "int8"
        """A codec of gradckpt, or "none": block inputs stay as they are."""

        fake_quantize: bool = False
        """Run the forward, too, on the restored inputs."""

        min_numel: int = 1024
        """Inputs with fewer values stay uncompressed."""

        policy: str = ""
        """Outputs of operators that are kept besides, e.g. "save_matmuls:int8"."""

        def __post_init__(self) -> None:
            """Accept what RegionAC refuses: preserve_rng_state and debug."""

    def _wrap_block(self, module: Module, *, base_fqn: str | None = None) -> Module:
        """Make the block a region in place: torchtitan does not look at what this returns."""
        config = self.config
        hooks = getattr(self, "get_saved_tensors_hooks", None)
        if hooks is not None and hooks(module, base_fqn=base_fqn) is not None:
            raise ValueError(
                f"gradckpt: {type(self).__name__} has get_saved_tensors_hooks() for torch_remat's checkpoint, which it "
                "does not use; leave them out, or use RegionAC"
            )
        policy = {"policy": config.policy} if config.policy else {}
        enable(
            module,
            self.compress,
            modules=module,
            preserve_rng_state=config.preserve_rng_state,
            determinism_check=config.determinism_check,
            debug=config.debug,
            **policy,
        )
        self.wrapped += 1
        return module


class CompressedFullAC(CompressedRegionAC):
    """``FullAC``: whole blocks are recomputed, but for what the model always saves."""

    @dataclass(kw_only=True, slots=True)
    class Config(CompressedRegionAC.Config):
        pass


class CompressedSelectiveAC(CompressedRegionAC):
    """``SelectiveAC``: torchtitan's choice of regions is saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(CompressedRegionAC.Config):
        save_regions: list[str] = field(default_factory=lambda: list(SelectiveAC.Config().save_regions))
        recompute_regions: list[str] = field(default_factory=lambda: list(SelectiveAC.Config().recompute_regions))
