"""torchtitan: its policies of activation checkpointing, with compressed block inputs.

    activation_checkpoint=CompressedFullAC.Config(compress="int8")

in a configuration replaces ``FullAC.Config()``. torchtitan's policies have two shapes. Those of
0.3.0 put a wrapper around each block (wrapped.py). Those of its main branch, recognised by their
``RegionAC``, replace the block's forward, in which ``torch_remat.region`` marks what is not
recomputed (in_place.py). All fields are strings, numbers, flags and lists of strings, for JSON and
the command line.
"""

from __future__ import annotations

from torchtitan.distributed import activation_checkpoint

__all__ = ["CompressedFullAC", "CompressedSelectiveAC"]

if hasattr(activation_checkpoint, "RegionAC"):
    from gradckpt.integrations.torchtitan.in_place import CompressedFullAC, CompressedRegionAC, CompressedSelectiveAC

    __all__ += ["CompressedRegionAC"]
else:
    from gradckpt.integrations.torchtitan.wrapped import (
        CompressedConfig,
        CompressedFullAC,
        CompressedSelectiveAC,
    )

    __all__ += ["CompressedConfig"]
