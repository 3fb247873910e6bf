"""Attention under compress_saved(): its result and its log-sum-exp are made again in the backward.

The backward of attention takes differences that vanish where a softmax is sharp (Dao et al. 2022,
arXiv:2205.14135, algorithm 4: ``dS = P * (dP - D)``). They do so only if all five tensors that it
reads fit together, not if each was rounded by itself. So query, key and value are kept as any
factors are, and the other two are made from what is restored of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gradckpt import _C

Tensor = torch.Tensor
Call = Callable[[Tensor, Tensor, Tensor, Any, bool, Any], Any]
_aten = torch.ops.aten


def _cpu(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any) -> Any:
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any) -> Any:
    return _aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal, scale=scale)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any) -> Any:
    return _aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, 0.0, causal, False, scale=scale)


#: By the node: the operator, and the node's names for the mask and the log-sum-exp.
_CALLS: dict[str, tuple[Call, str | None, str]] = {
    "ScaledDotProductFlashAttentionForCpuBackward0": (_cpu, "attn_mask", "logsumexp"),
    "ScaledDotProductFlashAttentionBackward0": (_flash, None, "logsumexp"),
    "ScaledDotProductEfficientAttentionBackward0": (_efficient, "attn_bias", "log_sumexp"),
    "ScaledDotProductCudnnAttentionBackward0": (_cudnn, "attn_bias", "logsumexp"),
}


class Again:
    """One call of attention, without its results. ``part(0)`` makes its result, ``part(1)`` its
    log-sum-exp; the one that was not asked for waits until it is.
    """

    __slots__ = ("call", "causal", "kept", "mask", "scale", "waiting")

    def __init__(self, call: Call, kept: list[Any], mask: Any, causal: bool, scale: Any) -> None:
        self.call, self.kept, self.mask, self.causal, self.scale = call, kept, mask, causal, scale
        self.waiting: dict[int, Tensor] = {}

    def part(self, index: int) -> Tensor:
        found = self.waiting.pop(index, None)
        if found is None:
            q, k, v = (each.restore() for each in self.kept)
            mask = None if self.mask is None else self.mask.restore()
            with torch.no_grad():
                results = self.call(q, k, v, mask, self.causal, self.scale)
            found = results[index]
            self.waiting = {1 - index: results[1 - index]}
        return found


def attention_again(node: Any) -> tuple[Any, Any, Any] | None:
    """Return what makes the result of this node again, its saved log-sum-exp, and what makes that.

    The node is about to save its result, the last that it saves. None where results must be kept:
    the call drops probabilities at random, or other hooks hold what the node saves.
    """
    known = _CALLS.get(type(node).__name__)
    if known is None or node._saved_dropout_p != 0:
        return None
    call, mask, log_sum = known
    q, k, v, sums = (_kept(node, name) for name in ("query", "key", "value", log_sum))
    bias = _kept(node, mask)
    if not all(isinstance(x, _C.SavedTensor) for x in (q, k, v, sums)) or not isinstance(bias, _C.SavedTensor | None):
        return None
    again = Again(call, [q, k, v], bias, node._saved_is_causal, node._saved_scale)
    return functools.partial(again.part, 0), sums, functools.partial(again.part, 1)


def _kept(node: Any, name: str | None) -> Any:
    return None if name is None else getattr(node, f"_raw_saved_{name}").data
