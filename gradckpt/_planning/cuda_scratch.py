"""What kernels of CUDA allocate while they run: :func:`cuda_scratch_of`.

Flash attention's backward sums the query's gradient in float32, with one number for each row of the
scores, and where heads share keys and values it has their gradients of each head. Sizes and order
are those of torch 2.13's flash_api.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

from gradckpt._planning.cpu_scratch import Scratch

__all__ = ["cuda_scratch_of"]

aten = torch.ops.aten


def cuda_scratch_of(func: Any, args: Any, results: Any) -> Scratch | None:
    """Return what an operator allocates and releases, None if it allocates its results alone."""
    if func is not aten._scaled_dot_product_flash_attention_backward.default:
        return None
    query, key = args[1], args[2]
    batch, heads, rows, size = query.shape
    rows = -(-rows // 128) * 128
    sums = [4 * batch * heads * rows, 4 * batch * heads * rows * (-(-size // 32) * 32)]
    if key.shape[1] != heads:
        sums += 2 * [batch * key.shape[2] * heads * size * key.itemsize]
    return Scratch(results, [None, None, None, *sums, *(-size for size in reversed(sums))])
