"""What libraries allocate: bitsandbytes for frozen weights in 4 or 8 bits (:func:`quantize`), and
losses of a causal language model that never hold all logits, as on CUDA (:data:`LOSSES`).

Of frozen weights only bytes and their lifetimes are right, as simulated tensors have no values.
Each loss allocates what the library's own does, in its order, in chunks of its sizes. Numbers are
right in float32; in 16 bits the libraries' kernels round otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: Values of one nf4 scale, and scales of one second-level scale.
_SCALED, _SCALES = 64, 256


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, among them the transposed ones of GPT-2."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def linear_sizes(module: Any) -> tuple[int, int]:
    """Return the input and the output features of a linear layer."""
    if hasattr(module, "in_features"):
        return module.in_features, module.out_features
    rows, columns = module.weight.shape
    return rows, columns


def _nf4(out_features: int, in_features: int) -> dict[str, torch.Tensor]:
    n = out_features * in_features
    return {
        "packed": torch.empty(-(-n // 2), dtype=torch.uint8),
        "scales": torch.empty(-(-n // _SCALED), dtype=torch.float32),
        "code": torch.empty(16, dtype=torch.float32),
    }


def _nested(out_features: int, in_features: int) -> dict[str, torch.Tensor]:
    """As _nf4, with scales in 8 bits: bnb_4bit_use_double_quant=True."""
    made = _nf4(out_features, in_features)
    blocks = len(made["scales"])
    return {
        **made,
        "scales": torch.empty(blocks, dtype=torch.uint8),
        "scales_of_scales": torch.empty(-(-blocks // _SCALES), dtype=torch.float32),
    }


def _int8(out_features: int, in_features: int) -> dict[str, torch.Tensor]:
    return {
        "packed": torch.empty(out_features, in_features, dtype=torch.int8),
        "scales": torch.empty(out_features, dtype=torch.float32),
    }


def _dequantize_nf4(layer: QuantizedLinear, dtype: torch.dtype) -> torch.Tensor:
    scales = layer.scales.float()  # of nested scales those in float32, which die when the weight is written
    weight = torch.empty(layer.out_features, layer.in_features, dtype=dtype)
    del scales
    return weight


def _dequantize_int8(layer: QuantizedLinear, dtype: torch.dtype) -> torch.Tensor:
    return layer.packed.to(dtype).mul_(layer.scales.unsqueeze(1).mul(1.0 / 127.0))


class _Matmul4Bit(torch.autograd.Function):
    """bitsandbytes' MatMul4Bit: the weight is dequantized in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: QuantizedLinear, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, _dequantize_nf4(layer, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        return torch.matmul(gradient, _dequantize_nf4(ctx.layer, gradient.dtype)), None, None


class _Matmul8Bit(torch.autograd.Function):
    """bitsandbytes' MatMul8bitLt without outliers: the input is quantized, too.

    The input stays an attribute of the node, as there: checkpointing does not free it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: QuantizedLinear, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer, ctx.input = layer, x if ctx.needs_input_grad[0] else None
        rows = x.reshape(-1, x.shape[-1])
        half = rows.to(torch.float16)
        quantized, scales = torch.empty_like(rows, dtype=torch.int8), torch.empty(rows.shape[0])
        del half
        product = torch.ops.aten._int_mm(quantized, layer.packed.t())  # int32
        output = torch.empty_like(product, dtype=x.dtype)
        del quantized, scales, product
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        weight = _dequantize_int8(ctx.layer, ctx.input.dtype)
        return torch.matmul(gradient.to(weight.dtype), weight), None, None


_Tensors = Callable[[int, int], dict[str, torch.Tensor]]

#: Name -> the tensors of a weight, and its product with an input.
FORMATS: dict[str, tuple[_Tensors, type[torch.autograd.Function]]] = {
    "nf4": (_nf4, _Matmul4Bit),
    "nf4-nested": (_nested, _Matmul4Bit),
    "int8": (_int8, _Matmul8Bit),
}


class QuantizedLinear(nn.Module):
    """A frozen linear layer whose weight is stored in fewer bits."""

    packed: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: Any, bits: str, compute_dtype: torch.dtype) -> None:
        super().__init__()
        tensors, self.product = FORMATS[bits]
        self.in_features, self.out_features = linear_sizes(linear)
        # Inputs of int8 layers are quantized in any dtype; those of nf4 layers are cast first.
        self.compute_dtype = None if bits == "int8" else compute_dtype
        for name, tensor in tensors(self.out_features, self.in_features).items():
            self.register_buffer(name, tensor)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The packed weight, which models ask for its dtype."""
        return self.packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        output: torch.Tensor = self.product.apply(x, self, bias)
        return output.to(given)


def quantize(model: nn.Module, bits: str, compute_dtype: torch.dtype, head: nn.Module | None) -> int:
    """Replace the linear layers of a model except its output head and those that transformers keeps
    in float32; return their number of weights.
    """
    names = [getattr(model, name, None) or () for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")]
    kept = {name for each in names for name in each}
    count = 0
    for name, module in list(model.named_modules()):
        if not is_linear(module) or (isinstance(module, nn.Linear) and type(module) is not nn.Linear):
            continue  # transformers leaves subclasses, such as routers with several outputs
        if module is not head and not kept & {*name.split(".")}:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, QuantizedLinear(module, bits, compute_dtype))
            count += math.prod(linear_sizes(module))
    return count


#: TRL 1.16: tokens and words of the logits that exist at the same time.
_TRL_TOKENS, _TRL_WORDS = 4096, 32768


class Loss(NamedTuple):
    """``of``: (hidden states, head, labels) -> the mean over the labels. ``about``: a sentence."""

    of: Callable[[Tensor, nn.Module, Tensor], Tensor]
    about: str


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _computes_in(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products of a tensor."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def _shifted(labels: Tensor) -> Tensor:
    """Return the label that each token predicts, -100 for the last one."""
    return nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()


# ---- TRL


class _TrlFunction(torch.autograd.Function):
    """Log-probabilities of the labels: running sums over tiles of logits, which backward makes
    again; gradients are summed in float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        dtype, n = _computes_in(hidden), len(hidden)
        highest = torch.full((n,), -torch.inf, dtype=torch.float32)
        total, of_label, *_others = (torch.zeros(n, dtype=torch.float32) for _ in range(6))  # for entropy, accuracy
        buffer = torch.empty(min(n, _TRL_TOKENS), _TRL_WORDS, dtype=dtype)
        for rows in _chunks(n, _TRL_TOKENS):
            part = hidden[rows].to(dtype)
            for words in _chunks(len(weight), _TRL_WORDS):
                tile = _tile(buffer, part, weight[words], bias, words)
                inside = (labels[rows] >= words.start) & (labels[rows] < words.stop)
                at = (labels[rows] - words.start).clamp(0, tile.shape[1] - 1)
                of_label[rows] += tile.gather(1, at[:, None])[:, 0].float() * inside
                top = torch.maximum(highest[rows], tile.amax(1).float())
                total[rows] *= (highest[rows] - top).exp()
                total[rows] += tile.sub_(top[:, None]).exp_().sum(1, dtype=torch.float32)
                highest[rows] = top
        log_sum = highest + total.log()
        ctx.save_for_backward(hidden, weight, bias, labels, log_sum)
        ctx.dtype = dtype
        return of_label - log_sum

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sum = ctx.saved_tensors
        (gradient,) = gradients
        like = [x if needed else None for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)]
        sums = [None if x is None else torch.zeros(x.shape, dtype=torch.float32) for x in like]
        of_hidden, of_weight, of_bias = sums
        buffer = torch.empty(min(len(hidden), _TRL_TOKENS), _TRL_WORDS, dtype=ctx.dtype)
        for rows in _chunks(len(hidden), _TRL_TOKENS):
            part = hidden[rows].to(ctx.dtype)
            for words in _chunks(len(weight), _TRL_WORDS):
                chunk = weight[words].to(ctx.dtype)
                tile = _tile(buffer, part, chunk, bias, words)
                tile.sub_(log_sum[rows][:, None]).exp_().neg_()
                inside = (labels[rows] >= words.start) & (labels[rows] < words.stop)
                at = (labels[rows] - words.start).clamp(0, tile.shape[1] - 1)
                tile.scatter_add_(1, at[:, None], inside[:, None].to(tile.dtype))
                tile.mul_(gradient[rows][:, None])
                if of_hidden is not None:
                    of_hidden[rows].addmm_(*_of_one_dtype(of_hidden, tile, chunk))
                if of_weight is not None:
                    of_weight[words].addmm_(*_of_one_dtype(of_weight, tile.t(), part))
                if of_bias is not None:
                    of_bias[words] += tile.sum(0, dtype=torch.float32)
        given = (
            total if x is None or total is None else total.to(x.dtype) for x, total in zip(like, sums, strict=True)
        )
        return (*given, None)


def _tile(buffer: Tensor, part: Tensor, chunk: Tensor, bias: Tensor | None, words: slice) -> Tensor:
    tile = buffer[: len(part), : len(chunk)]
    torch.mm(part, chunk.to(part.dtype).t(), out=tile)
    return tile if bias is None else tile.add_(bias[words].to(tile.dtype))


def _of_one_dtype(total: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return operands whose product has the dtype of the sum: CUDA's addmm adds 16 bits to float32,
    the CPU's does not, so in a simulated step the operands are strided views of the sum's dtype.
    """
    if left.dtype == total.dtype:
        return left, right
    one = torch.empty(1, dtype=total.dtype)
    return one.expand(left.shape), one.expand(right.shape)


def _trl(hidden: Tensor, head: Any, labels: Tensor) -> Tensor:
    labels = labels[:, 1:].flatten()
    known = (labels != -100).to(torch.float32)
    # TRL takes the labelled positions out by index: all of them need most.
    hidden = hidden[:, :-1].index_select(1, torch.arange(hidden.shape[1] - 1)).flatten(0, 1)
    scores: Tensor = _TrlFunction.apply(hidden, head.weight, head.bias, labels)  # type: ignore[no-untyped-call]
    return -(scores * known).sum() / known.sum()


# ---- Liger


class _LigerFunction(torch.autograd.Function):
    """The loss and, in the same pass, the gradients, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        n, width = hidden.shape
        parts = -(-len(weight) // width)
        size = min(1 << (-(-n // parts) - 1).bit_length(), n)
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None else None
        losses = torch.zeros(n, dtype=torch.float32)
        known = labels != -100
        count = max(int(known.sum()), 1)
        buffer = None
        if hidden.dtype == weight.dtype == _computes_in(hidden):
            buffer = torch.empty(size, len(weight), dtype=hidden.dtype)
        for rows in _chunks(n, size):
            part = hidden[rows]
            logits = torch.mm(part, weight.t(), out=None if buffer is None else buffer[: len(part)])
            if bias is not None:
                logits = logits.add_(bias) if logits.dtype == bias.dtype else logits + bias
            at = labels[rows].clamp(min=0)[:, None]
            logits.sub_(logits.amax(1, keepdim=True))
            losses[rows] -= logits.gather(1, at)[:, 0] * known[rows]
            sums = logits.exp_().sum(1)
            losses[rows] += sums.log() * known[rows]
            logits.div_(sums[:, None])
            logits.scatter_add_(1, at, torch.full((len(part), 1), -1.0, dtype=logits.dtype))
            logits.mul_((known[rows] / count).to(logits.dtype)[:, None])
            if buffer is None:
                of_hidden[rows] = logits @ weight
            else:
                torch.mm(logits, weight, out=of_hidden[rows])
            if of_weight is not None:
                same = part if part.dtype == logits.dtype else part.to(logits.dtype)
                of_weight.addmm_(*_of_one_dtype(of_weight, logits.t(), same))
            if of_bias is not None:
                of_bias += logits.sum(0)
            del logits, part
        del buffer
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return (*(None if x is None else x.mul_(gradient) for x in ctx.saved_tensors), None)


def _liger(hidden: Tensor, head: Any, labels: Tensor) -> Tensor:
    hidden, labels = hidden.flatten(0, 1), _shifted(labels).flatten()
    loss: Tensor = _LigerFunction.apply(hidden, head.weight, head.bias, labels)  # type: ignore[no-untyped-call]
    return loss


# ---- torch


class _TorchFunction(torch.autograd.Function):
    """torch.nn.functional.linear_cross_entropy with options=LinearCrossEntropyOptions(), as 2.13 to
    2.15 compute it on CUDA: the policy "compact", half of the aspect ratio.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        n, width = hidden.shape
        words, wide = len(weight), torch.float32 if hidden.dtype.itemsize == 2 else hidden.dtype
        size = max((1 << (-(-n // -(-words // width)) - 1).bit_length()) // 2, 1)
        known = labels != -100
        part_of_loss = known.to(wide).div_(-max(int(known.sum()), 1))
        at_label = torch.where(known, labels, 0)
        buffer = torch.empty(size, words, dtype=wide)
        loss = torch.zeros((), dtype=wide)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        inputs = torch.empty(size, width, dtype=wide) if of_weight is not None and wide != hidden.dtype else None
        for rows in _chunks(n, size):
            part, share, at = hidden[rows], part_of_loss[rows], at_label[rows]
            wider = part if inputs is None else inputs[: len(part)].copy_(part)
            logits = buffer[: len(part)]
            torch.mm(*_of_one_dtype(logits, part, weight.t()), out=logits)
            if bias is not None:
                logits.add_(bias)
            logits.sub_(logits.amax(1, keepdim=True))
            loss.add_(share.dot(logits.gather(1, at[:, None])[:, 0]))
            sums = logits.exp_().sum(1)
            loss.sub_(share.dot(sums.log()))
            logits.mul_(share.div(sums)[:, None])
            narrow = logits if wide == hidden.dtype else logits.to(hidden.dtype)
            if of_hidden is not None:
                torch.mul(weight.index_select(0, at), share.to(hidden.dtype)[:, None], out=of_hidden[rows])
                of_hidden[rows].addmm_(narrow, weight, alpha=-1)
            if of_weight is not None:
                of_weight.addmm_(narrow.t(), part, alpha=-1)
                rest = wider * share[:, None] if inputs is None else wider.mul_(share[:, None]).to(hidden.dtype)
                of_weight.index_add_(0, at, rest)
            if of_bias is not None:
                of_bias.sub_(logits.sum(0)).index_add_(0, at, share.to(of_bias.dtype))
        ctx.gradients = [of_hidden, of_weight, of_bias]
        return loss.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        made, ctx.gradients = ctx.gradients, None
        return (*(None if x is None else x.mul_(gradient) for x in made), None)


def _torch(hidden: Tensor, head: Any, labels: Tensor) -> Tensor:
    if hidden.dtype != head.weight.dtype:
        raise ValueError(
            f"gradckpt: linear_cross_entropy takes one dtype, and the hidden states have {hidden.dtype}, the head "
            f"{head.weight.dtype}; take --loss liger or trl"
        )
    hidden, labels = hidden.flatten(0, 1), _shifted(labels).flatten()
    loss: Tensor = _TorchFunction.apply(hidden, head.weight, head.bias, labels)  # type: ignore[no-untyped-call]
    return loss


#: Name -> loss.
LOSSES = {
    "trl": Loss(_trl, "Loss as TRL 1.16's trainers compute it, in tiles of 4,096 tokens x 32,768 words (--loss trl)."),
    "liger": Loss(
        _liger,
        "Loss as Liger 0.8 computes it, for use_liger_kernel=True of the Trainer (--loss liger); Liger's other kernels "
        "are not counted.",
    ),
    "torch": Loss(
        _torch,
        "Loss as torch.nn.functional.linear_cross_entropy computes it with LinearCrossEntropyOptions() (--loss torch).",
    ),
}
