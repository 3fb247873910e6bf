"""What all policies for torchtitan have in common: fields, and a mixin that reads and logs them."""

from __future__ import annotations

import logging
from typing import Any

from torch.nn import Module

from gradckpt._compression import CompressionConfig

logger = logging.getLogger("gradckpt")


def _parse(config: Any) -> CompressionConfig | None:
    if config.compress == "none":
        if config.fake_quantize:
            raise ValueError('gradckpt: fake_quantize=True needs a codec; compress is "none"')
        return None
    return CompressionConfig(config.compress, fake_quantize=config.fake_quantize, min_numel=config.min_numel)


class Compressed:
    """A mixin for torchtitan's policies: block inputs are compressed."""

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self.compress = _parse(config)
        self.wrapped = 0  # number of blocks so far

    def apply(self, model: Module) -> None:
        super().apply(model)  # type: ignore[misc]
        codec = "uncompressed" if self.compress is None else self.compress.codec
        logger.info("gradckpt: %s: %d blocks, inputs %s", type(self).__name__, self.wrapped, codec)
