"""In which form a tensor crosses from a forward graph into its backward, under
``compress_saved()``: a payload, a cast, and what is done besides.
"""

from __future__ import annotations

from typing import Any

import torch

#: Inductor decomposes other casts, but not those that come as late as this.
CAST = torch.ops.prims.convert_element_type.default
#: Codecs that are casts. What they might not hold does not occur where a form goes with them.
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def pack_saved(x: torch.Tensor, codec: str, form: str) -> Any:
    """Return the payload and the sizes, or a cast."""
    order = memory_order(x)
    x = x.permute(order) if order != sorted(order) else x
    if form and codec in CASTS:
        return CAST(x, CASTS[codec])
    sizes = x.shape
    x = x.clamp(-20, 20) if form == "clamp" else x
    return (torch.ops.gradckpt.encode(x, codec), *sizes)


def unpack_saved(packed: Any, codec: str, form: str, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``value``, which was traced."""
    x: torch.Tensor
    if isinstance(packed, torch.Tensor):
        x = CAST(packed, value.dtype)
    else:
        payload, *sizes = packed
        x = torch.ops.gradckpt.decode(payload, codec, sizes, value.dtype)
    order = memory_order(value)
    x = x.permute([order.index(dim) for dim in range(len(order))]) if order != sorted(order) else x
    kind, _, dim = form.partition(":")
    if kind == "probabilities":
        total = x.sum(int(dim), keepdim=True)
        x = x / torch.where(total == 0, 1, total)  # zeros: a row that is masked as a whole
    return x


def hint(size: int | torch.SymInt) -> int:
    """Return a size; for a symbolic one its value when the graph was traced, or a guess if only the
    run will tell.
    """
    if not isinstance(size, torch.SymInt):
        return size
    known: int | None = size.node.hint
    return int(size.node.expr.xreplace(dict.fromkeys(size.node.expr.free_symbols, 4096))) if known is None else known


def memory_order(x: torch.Tensor) -> list[int]:
    """Return the dimensions, largest stride first."""
    return sorted(range(x.dim()), key=lambda dim: -hint(x.stride()[dim]))
