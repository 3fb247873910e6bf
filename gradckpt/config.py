"""How to compress, the noise of stochastic rounding, and what :func:`gradckpt.enable` returns."""

from gradckpt._compression import CompressionConfig, get_rounding_state, set_rounding_state
from gradckpt._models.switch import Handle

__all__ = ["CompressionConfig", "Handle", "get_rounding_state", "set_rounding_state"]
