"""The policies: what each has, and in which order it calls what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchtitan.config import Configurable
from torchtitan.protocols.module import Module


class ActivationCheckpointing(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        preserve_rng_state: bool = True
        determinism_check: str = "default"
        debug: bool = False

    def __init__(self, config: Config, dump_folder: str = "") -> None:
        self.config = config
        self.dump_folder = dump_folder

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        raise NotImplementedError

    def apply(self, model: nn.Module) -> None:
        layers = model.get_submodule("layers")
        for layer_id, block in layers.named_children():
            layers.register_module(layer_id, self._wrap_block(block, base_fqn=f"layers.{layer_id}"))


class FullAC(ActivationCheckpointing):
    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        pass


class RegionAC(ActivationCheckpointing):
    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        save_regions: list[str]
        recompute_regions: list[str] = field(default_factory=list)
        preserve_rng_state: bool = False

        def __post_init__(self) -> None:
            if self.preserve_rng_state or self.debug:
                raise ValueError("torch_remat activation checkpointing does not support preserve_rng_state=True, debug")

    def get_saved_tensors_hooks(self, module: nn.Module, *, base_fqn: str | None) -> Any:
        return None

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        import torch_remat as remat  # here, so that the tests of our policies need no torch_remat

        module.forward = remat.checkpoint(
            region_name=base_fqn or type(module).__name__,
            determinism_check=self.config.determinism_check,
            preserve_rng_state=False,
            saved_tensors_hooks=self.get_saved_tensors_hooks(module, base_fqn=base_fqn),
        )(module.forward)
        return module

    def apply(self, model: nn.Module) -> None:
        for layer_id, block in list(model.get_submodule("layers").named_children()):
            assert isinstance(block, Module)
            block.configure_remat_regions(self.config.save_regions, self.config.recompute_regions)
            self._wrap_block(block, base_fqn=f"layers.{layer_id}")


class SelectiveAC(RegionAC):
    @dataclass(kw_only=True, slots=True)
    class Config(RegionAC.Config):
        save_regions: list[str] = field(default_factory=lambda: ["*"])
        recompute_regions: list[str] = field(default_factory=lambda: ["*routed_experts.w13.*"])

        def __post_init__(self) -> None:
            super(SelectiveAC.Config, self).__post_init__()
            if self.save_regions != ["*"] or self.recompute_regions != ["*routed_experts.w13.*"]:
                raise ValueError("SelectiveAC is a fixed policy")


ActivationCheckpointingConfig = SelectiveAC.Config | RegionAC.Config | FullAC.Config | None
