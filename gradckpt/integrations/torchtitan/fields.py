"""The fields that all policies for torchtitan have in common."""

from __future__ import annotations

from typing import Any

from gradckpt._config import CompressionConfig

__all__ = ["parse"]


def parse(config: Any) -> CompressionConfig | None:
    if config.compress == "none":
        if config.fake_quantize:
            raise ValueError('gradckpt: fake_quantize=True needs a codec; compress is "none"')
        return None
    return CompressionConfig(config.compress, fake_quantize=config.fake_quantize, min_numel=config.min_numel)
