"""Autograd Functions with the names and the saved tensors of libraries', in plain torch: what
compress_saved() knows of the libraries is proved on these. Backwards have the libraries' formulas,
but where inputs alone are saved: there autograd differentiates the plain form again.

Each :class:`Twin` also has the same block written without the Function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradckpt import _C, compress_saved

#: tokens, hidden size, intermediate size
TOKENS, HIDDEN, INNER = (2, 96), 256, 640


def function(package: str, name: str, forward: Any, backward: Any) -> type[torch.autograd.Function]:
    """An autograd Function that a module of this package defines."""
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": f"{package}.ops"}
    return type(name, (torch.autograd.Function,), body)


@dataclasses.dataclass(frozen=True)
class Twin:
    """``fused(x, *weights)`` uses the Function, ``plain`` does not."""

    package: str
    name: str
    saved: int
    fused: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    function: Any
    #: whether the backward writes into what it has saved
    overwrites: bool = False

    def __str__(self) -> str:
        return f"{self.package}.{self.name}/{self.saved}"


TWINS: list[Twin] = []


def twin(package: str, name: str, saved: int, cls: Any, block: Any, plain: Any, *shapes: Any, **kw: Any) -> None:
    fused = lambda x, *w: block(cls.apply, x, *w)  # noqa: E731
    TWINS.append(Twin(package, name, saved, fused, lambda x, *w: block(plain, x, *w), shapes, cls, **kw))


def save(ctx: Any, count: int, places: dict[str, int], held: dict[str, Tensor]) -> None:
    """Save so many tensors: these at their places, None at the others."""
    at = {place: held[what] for what, place in places.items()}
    ctx.save_for_backward(*(at.get(place) for place in range(count)))


def saved_by(ctx: Any, places: dict[str, int]) -> dict[str, Tensor]:
    return {what: ctx.saved_tensors[place] for what, place in places.items()}


# ---- products of values ----


def gate(activation: str, a: Tensor) -> tuple[Tensor, Tensor]:
    """The activation and its derivative."""
    if activation == "silu":
        s = torch.sigmoid(a.float()).to(a.dtype)
        return a * s, s + a * s * (1 - s)
    c, k = 0.7978845608028654, 0.044715
    t = torch.tanh(c * (a + k * a**3))
    return 0.5 * a * (1 + t), 0.5 * (1 + t) + 0.5 * a * (1 - t * t) * c * (1 + 3 * k * a * a)


def saves_inputs(
    package: str,
    name: str,
    plain: Callable[..., Tensor],
    places: tuple[int, ...],
    saved: int = 0,
    *,
    flat: bool = False,
    overwrites: bool = False,
) -> type[torch.autograd.Function]:
    """A Function that saves its inputs alone, each at its place of so many, and differentiates the
    plain form again.

    ``flat``: as views with one dimension of rows. ``overwrites``: the backward writes the gradients
    into what it has saved.
    """

    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        kept: list[Tensor | None] = [None] * max(saved, len(places))
        for place, x in zip(places, inputs, strict=True):
            kept[place] = x.view(-1, x.shape[-1]) if flat else x
        ctx.save_for_backward(*kept)
        ctx.shapes = [x.shape for x in inputs]
        return plain(*inputs)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        kept = [ctx.saved_tensors[place] for place in places]
        assert not flat or all(x.is_contiguous() for x in kept)
        with torch.enable_grad():
            leaves = [x.detach().view(shape).requires_grad_() for x, shape in zip(kept, ctx.shapes, strict=True)]
            grads = torch.autograd.grad(plain(*leaves), leaves, grad)
        if overwrites:
            grads = tuple(x.copy_(g.view(x.shape)) for x, g in zip(kept, grads, strict=True))
        return tuple(g.view(shape) for g, shape in zip(grads, ctx.shapes, strict=True))

    return function(package, name, forward, backward)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def geglu(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a, approximate="tanh") * b


def gated(mul: Any, x: Tensor, up: Tensor, side: Tensor, down: Tensor) -> Tensor:
    return F.linear(mul(F.linear(x, up), F.linear(x, side)), down)


for _package, _name, _plain, _overwrites in (
    ("liger_kernel", "LigerSiLUMulFunction", swiglu, True),
    ("liger_kernel", "LigerGELUMulFunction", geglu, True),
    ("flash_attn", "SwiGLUFunction", swiglu, False),
):
    _cls = saves_inputs(_package, _name, _plain, (0, 1), flat=True, overwrites=_overwrites)
    _shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    twin(_package, _name, 2, _cls, gated, _plain, *_shapes, overwrites=_overwrites)


def mlp(activation: Any, x: Tensor, up: Tensor, down: Tensor, *bias: Tensor) -> Tensor:
    return F.linear(activation(F.linear(x, up), *bias), down)


def gelu(x: Tensor, *bias: Tensor) -> Tensor:
    return F.gelu(x + bias[0] if bias else x, approximate="tanh")


for _package, _name, _plain, _inputs, _rows in (
    ("liger_kernel", "LigerFusedGateUpSiLUMulFunction", lambda y: swiglu(*y.chunk(2, -1)), 1, 2 * INNER),
    ("liger_kernel", "LigerReLUSquaredFunction", lambda x: x.relu().square(), 1, INNER),
    ("flash_attn", "GeLUFunction", gelu, 2, INNER),
    ("flash_attn", "FastGeLUFunction", gelu, 1, INNER),
):
    _cls = saves_inputs(_package, _name, _plain, tuple(range(_inputs)))
    twin(_package, _name, _inputs, _cls, mlp, _plain, *((_rows, HIDDEN), (HIDDEN, INNER), (INNER,))[: _inputs + 1])


# ---- norms ----


def statistics(x: Tensor, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The normalized rows, their means and their reciprocal scales."""
    rows = x.float()
    mean = rows.mean(-1) if centred else rows.new_zeros(rows.shape[0])
    r = ((rows - mean[:, None]).square().mean(-1) + 1e-6).rsqrt()
    return (rows - mean[:, None]) * r[:, None], mean, r


def norm_gradient(g: Tensor, x: Tensor, w: Tensor | None, mean: Tensor, r: Tensor, centred: bool) -> Tensor:
    normal = (x.float() - mean[:, None]) * r[:, None]
    m = g.float() * w.float() if w is not None else g.float()
    dx = m - normal * (m * normal).mean(-1, keepdim=True)
    return ((dx - m.mean(-1, keepdim=True) if centred else dx) * r[:, None]).to(x.dtype)


#: From (x, w, b, mean, r) to what is saved, by the name of the place of each.
LAYOUTS: dict[str, tuple[str, str, int, bool]] = {
    "liger rms": ("liger_kernel", "LigerRMSNormFunction", 3, False),
    "liger rms, no weight": ("liger_kernel", "LigerRMSNormFunction", 2, False),
    "unsloth rms": ("unsloth", "Fast_RMS_Layernorm", 3, False),
    "apex rms": ("apex", "FusedRMSNormAffineFunction", 3, False),
    "apex rms, mixed": ("apex", "FusedRMSNormAffineMixedDtypesFunction", 3, False),
    "apex rms, no weight": ("apex", "FusedRMSNormFunction", 2, False),
    "torch rms": ("torch._library", "GeneratedBackwardFor_apex_fused_rms_norm_affine_fwd_default", 3, False),
    "torch rms, no weight": ("torch._library", "GeneratedBackwardFor_apex_fused_rms_norm_fwd_default", 2, False),
    "liger layer": ("liger_kernel", "LigerLayerNormFunction", 5, True),
    "unsloth layer": ("unsloth", "Fast_Layernorm", 5, True),
    "apex layer": ("apex", "FusedLayerNormAffineFunction", 5, True),
    "apex layer, mixed": ("apex", "FusedLayerNormAffineMixedDtypesFunction", 5, True),
    "apex layer, no weight": ("apex", "FusedLayerNormFunction", 3, True),
    "torch layer": ("torch._library", "GeneratedBackwardFor_apex_fused_layer_norm_affine_fwd_default", 5, True),
    "torch layer, no weight": ("torch._library", "GeneratedBackwardFor_apex_fused_layer_norm_fwd_default", 3, True),
    "flash layer": ("flash_attn", "LayerNormFn", 9, True),
    "flash dropout add": ("flash_attn", "DropoutAddLayerNormFn", 8, True),
}


def norm(package: str, name: str, saved: int, centred: bool, result: bool = False) -> Any:
    """``result``: it saves its result, as apex with ``memory_efficient=True``."""
    affine = saved not in (2,) and not (centred and saved == 3)

    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        normal, mean, r = statistics(rows, centred)
        w = weights[0] if affine else None
        b = weights[1] if affine and centred else None
        y = (normal if w is None else normal * w).to(x.dtype)
        y = (y if b is None else y + b).view(x.shape)
        first = y if result else rows
        kept: list[Any] = [first, *((w,) if affine else ())]
        if name == "Fast_Layernorm":
            kept += [b, r, mean]
        elif name == "LayerNormFn":
            kept += [b, None, None, None, None, mean, r]
        elif name == "DropoutAddLayerNormFn":
            kept = [rows, None, None, w, mean, r, None, None]
        else:
            kept += [b] if b is not None else []
            kept += ([None if result else mean] if centred else []) + [r]
        assert len(kept) == saved
        ctx.save_for_backward(*kept)
        return y

    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        kept = ctx.saved_tensors
        x = kept[0].view(-1, kept[0].shape[-1])
        w = kept[3 if name == "DropoutAddLayerNormFn" else 1] if affine else None
        if name == "Fast_Layernorm":
            r, mean = kept[3:]
        elif name == "DropoutAddLayerNormFn":
            mean, r = kept[4:6]
        else:
            r, mean = kept[-1], kept[-2] if centred else None
        if result:  # of rows that a bias or a weight has changed
            shifted = x - kept[2] if affine and centred else x
            x, mean = (shifted / w if affine else shifted) / r[:, None], torch.zeros_like(r)
        mean = torch.zeros_like(r) if mean is None else mean
        rows = g.reshape(x.shape)
        dx = norm_gradient(rows, x, w, mean, r, centred).view(g.shape)
        normal = (x.float() - mean[:, None]) * r[:, None]
        dw = (rows.float() * normal).sum(0) if affine else None
        return (dx, *((dw.to(w.dtype),) if affine else ()), *((rows.sum(0),) if affine and centred else ()))

    return function(package, name, forward, backward)


def norm_block(normed: Any, x: Tensor, up: Tensor, down: Tensor, *weights: Tensor) -> Tensor:
    """Two layers with residuals: what a norm gets is no leaf."""
    x = x + F.linear(normed(x, *weights), up).tanh() * 1
    return F.linear(normed(x, *weights), down)


def plain_norm(centred: bool) -> Any:
    def plain(x: Tensor, *weights: Tensor) -> Tensor:
        w = weights[0] if weights else None
        if centred:
            return F.layer_norm(x, x.shape[-1:], w, weights[1] if weights else None, 1e-6)
        return F.rms_norm(x, x.shape[-1:], w, 1e-6)

    return plain


for _package, _name, _saved, _centred in LAYOUTS.values():
    _affine = _saved != 2 and not (_centred and _saved == 3)
    twin(
        _package.split(".")[0],
        _name,
        _saved,
        norm(_package, _name, _saved, _centred),
        norm_block,
        plain_norm(_centred),
        (HIDDEN, HIDDEN),
        (HIDDEN, HIDDEN),
        *([(HIDDEN,)] * (1 + _centred) if _affine else []),
    )


def _add_norm() -> None:
    def forward(ctx: Any, x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = x + residual
        rows = s.view(-1, s.shape[-1])
        normal, _, r = statistics(rows, False)
        ctx.save_for_backward(s, w, r)
        return (normal * w).to(x.dtype).view(x.shape), s

    def backward(ctx: Any, g: Tensor, gs: Tensor) -> tuple[Tensor, ...]:
        s, w, r = ctx.saved_tensors
        rows, x = g.reshape(-1, g.shape[-1]), s.reshape(-1, s.shape[-1])
        dx = norm_gradient(rows, x, w, torch.zeros_like(r), r, False).view(g.shape) + gs
        return dx, dx, (rows.float() * x.float() * r[:, None]).sum(0).to(w.dtype)

    def plain(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = x + residual
        return F.rms_norm(s, s.shape[-1:], w, 1e-6), s

    def block(add: Any, x: Tensor, up: Tensor, down: Tensor, w: Tensor) -> Tensor:
        y, s = add(F.linear(x, up), x, w)
        y, s = add(F.linear(y, down), s, w)
        return F.linear(y, up) + s

    name = "LigerFusedAddRMSNormFunction"
    cls = function("liger_kernel", name, forward, backward)
    twin("liger_kernel", name, 3, cls, block, plain, (HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,))


_add_norm()


# ---- products of matrices ----


def rows_of(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def lora(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.linear(x, a), b)


def two_products(product: Any, x: Tensor, *w: Tensor) -> Tensor:
    return product(product(x * 1, *w).tanh() * 1, *w)


#: How many each saves; the places of its input and of its weights.
for _package, _name, _saved, _places in (
    ("unsloth", "LoRA_QKV", 7, (0, 1, 2)),
    ("unsloth", "LoRA_W", 3, (2, 0, 1)),
    ("unsloth", "GroupedGemm", 4, (0, 1)),
    ("flash_attn", "FusedDenseFunc", 2, (0, 1)),
    ("apex", "FusedDenseFunc", 2, (0, 1)),
    ("apex", "DenseNoBiasFunc", 2, (0, 1)),
    ("transformer_engine", "_Linear", 4, (0, 2)),
):
    _plain = lora if len(_places) == 3 else F.linear
    _shapes = ((16, HIDDEN), (HIDDEN, 16)) if len(_places) == 3 else ((HIDDEN, HIDDEN),)
    _cls = saves_inputs(_package, _name, _plain, _places, _saved)
    twin(_package, _name, _saved, _cls, two_products, _plain, *_shapes)


def gated_mlp(package: str, name: str, saved: int, places: dict[str, int]) -> None:
    """A SwiGLU block as one Function: what it saves, at which places."""

    def forward(ctx: Any, x: Tensor, up: Tensor, side: Tensor, down: Tensor) -> Tensor:
        e, g = F.linear(x, up), F.linear(x, side)
        act = gate("silu", e)[0]
        h = act * g
        held = {
            "x": x,
            "up": up,
            "side": side,
            "down": down,
            "e": e,
            "g": g,
            "act": act,
            "h": h,
            "packed": torch.cat([h, e, g], -1),
        }
        save(ctx, saved, places, held)
        return F.linear(h, down)

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        held = saved_by(ctx, places)
        x, up, side, down = (held[key] for key in ("x", "up", "side", "down"))
        h, e, g = held["packed"].chunk(3, -1) if "packed" in held else (held.get("h"), held["e"], held["g"])
        value, slope = gate("silu", e)
        value = held.get("act", value)
        h = value * g if h is None else h
        dh = dy @ down
        dd = rows_of(dy).t() @ rows_of(h)
        dg, de = dh * value, dh * g * slope
        if "packed" not in held and "h" not in held:  # as the library does
            dg, de = held["e"].copy_(dg), held["g"].copy_(de)
        return de @ up + dg @ side, rows_of(de).t() @ rows_of(x), rows_of(dg).t() @ rows_of(x), dd

    def plain(x: Tensor, up: Tensor, side: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, up)) * F.linear(x, side), down)

    def block(mlp: Any, x: Tensor, *w: Tensor) -> Tensor:
        x = x + mlp(x * 1, *w).tanh()
        return mlp(x, *w)

    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    twin(package, name, saved, function(package, name, forward, backward), block, plain, *shapes)


gated_mlp("liger_kernel", "LigerMLPFunction", 5, {"x": 0, "up": 1, "side": 2, "down": 3, "packed": 4})
gated_mlp("unsloth", "LoRA_MLP", 9, {"up": 0, "side": 2, "down": 4, "x": 6, "e": 7, "g": 8})
gated_mlp(
    "xformers", "_SwiGLUDecomposedFunc", 12, {"x": 0, "up": 1, "side": 3, "down": 5, "e": 7, "g": 8, "act": 9, "h": 10}
)


def gelu_mlp(package: str, name: str, saved: int, places: dict[str, int], normed: bool = False) -> None:
    """Two linear layers around a GELU, maybe behind a norm, as one Function."""

    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, *w: Tensor) -> Tensor:
        held = {"x": x, "up": up, "down": down}
        y = x
        if normed:
            normal, _mean, r = statistics(rows_of(x), False)
            y = (normal * w[0]).to(x.dtype).view(x.shape)
            held |= {"w": w[0], "y": y, "r": r}
        held["pre"] = F.linear(y, up)
        held["act"] = gate("gelu", held["pre"])[0]
        save(ctx, saved, places, held)
        return F.linear(held["act"], down)

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        held = saved_by(ctx, places)
        value, slope = gate("gelu", held["pre"])
        dp = (g @ held["down"]) * slope
        y = held.get("y", held["x"])
        grads = (rows_of(dp).t() @ rows_of(y), rows_of(g).t() @ rows_of(held.get("act", value)))
        dx = dp @ held["up"]
        if not normed:
            return dx, *grads
        x, r = rows_of(held["x"]), held["r"]
        dw = (rows_of(dx).float() * x.float() * r[:, None]).sum(0).to(x.dtype)
        return norm_gradient(rows_of(dx), x, held["w"], torch.zeros_like(r), r, False).view(dx.shape), *grads, dw

    def plain(x: Tensor, up: Tensor, down: Tensor, *w: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], w[0], 1e-6) if normed else x
        return F.linear(F.gelu(F.linear(y, up), approximate="tanh"), down)

    def block(mlp: Any, x: Tensor, *w: Tensor) -> Tensor:
        x = x + mlp(x * 1, *w).tanh()
        return mlp(x, *w)

    shapes = ((INNER, HIDDEN), (HIDDEN, INNER), *([(HIDDEN,)] if normed else []))
    twin(package, name, saved, function(package, name, forward, backward), block, plain, *shapes)


gelu_mlp("flash_attn", "FusedMLPFunc", 5, {"x": 0, "up": 1, "down": 2, "pre": 3, "act": 4})
gelu_mlp("flash_attn", "FusedMLPFunc", 4, {"x": 0, "up": 1, "down": 2, "pre": 3})
gelu_mlp("apex", "FusedDenseGeluDenseFunc", 5, {"x": 0, "up": 1, "down": 2, "pre": 3, "act": 4})
_PLACES = {"x": 0, "w": 1, "y": 2, "up": 4, "pre": 6, "act": 8, "down": 10, "r": 13}
gelu_mlp("transformer_engine", "_LayerNormMLP", 14, _PLACES, normed=True)


def normed_linear(package: str, name: str, saved: int, places: dict[str, int]) -> None:
    def forward(ctx: Any, x: Tensor, up: Tensor, w: Tensor) -> Tensor:
        rows = rows_of(x)
        normal, _mean, r = statistics(rows, False)
        y = (normal * w).to(x.dtype).view(x.shape)
        held = {"x": rows, "up": up, "w": w, "y": y, "r": r}
        save(ctx, saved, places, held)
        return F.linear(y, up)

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        held = saved_by(ctx, places)
        x, r, w = held["x"], held["r"], held["w"]
        normal = (x.float() * r[:, None]).to(x.dtype)
        dy = rows_of(g @ held["up"])
        y = rows_of(held["y"]) if "y" in held else normal * w
        dx = norm_gradient(dy, x, w, torch.zeros_like(r), r, False).view(g.shape)
        return dx, rows_of(g).t() @ y, (dy * normal).sum(0)

    def plain(x: Tensor, up: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, x.shape[-1:], w, 1e-6), up)

    def block(product: Any, x: Tensor, up: Tensor, w: Tensor) -> Tensor:
        return product(x + product(x * 1, up, w).tanh(), up, w)

    cls = function(package, name, forward, backward)
    twin(package, name, saved, cls, block, plain, (HIDDEN, HIDDEN), (HIDDEN,))


normed_linear("flash_attn", "LayerNormLinearFn", 6, {"x": 0, "w": 1, "up": 3, "r": 5})
normed_linear("transformer_engine", "_LayerNormLinear", 8, {"x": 0, "up": 2, "w": 4, "y": 5, "r": 7})


# ---- one step ----


def inputs(twin: Twin, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Return what the block takes: leaves that require grad."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*TOKENS, HIDDEN, generator=generator)
    weights = [torch.randn(*shape, generator=generator) / shape[-1] ** 0.5 for shape in twin.shapes]
    weights = [1 + w if w.ndim == 1 else w for w in weights]
    return [t.to(dtype).requires_grad_() for t in (x, *weights)]


def saved_by_functions(result: Tensor) -> dict[int, int]:
    """What nodes of Functions hold: bytes of payloads and of tensors by storage; without leaves."""
    nodes, seen, storages = [result.grad_fn], set(), {}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [edge[0] for edge in node.next_functions]
        for one in node._raw_saved_tensors if hasattr(node, "_raw_saved_tensors") else ():
            held = getattr(one.data, "value", one.data)
            for x in (held.codes, held.scales) if isinstance(held, _C.Payload) else (held,):
                if isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter):
                    storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return storages


def within(config: Any, function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, as with the decorator: nothing waits any longer then."""
    return compress_saved(config)(function)(*args)


def step(block: Callable[..., Tensor], leaves: list[Tensor], config: Any) -> tuple[list[Tensor], int]:
    """Return the gradients, and the bytes that Functions have saved."""
    x, *weights = leaves
    for leaf in leaves:
        leaf.grad = None
    end = within(config, lambda: block(x * 1, *weights).float().square().mean())
    kept = saved_by_functions(end)
    for leaf in leaves:
        kept.pop(leaf.untyped_storage().data_ptr(), None)
    end.backward()
    return [leaf.grad.clone() for leaf in leaves], sum(kept.values())


def error(grads: list[Tensor], exact: list[Tensor]) -> float:
    total = sum(float((e.double()).square().sum()) for e in exact)
    return (
        sum(float((g.double() - e.double()).square().sum()) for g, e in zip(grads, exact, strict=True)) / total
    ) ** 0.5
