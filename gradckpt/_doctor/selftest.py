"""A self-test of this machine: codecs, regions and counters, on the CPU and on every CUDA
device.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint

from gradckpt import _C
from gradckpt._engine.custom_ops import payload_nbytes

#: The least signal-to-noise ratio of Gaussian values in dB: docs/codecs.md less half a decibel.
#: A codec that is missing here must keep its max_error.
FLOORS = {
    "int8": 43.0,
    "int8_plain": 42.5,
    "int6": 31.6,
    "fp8_e4m3": 31.2,
    "fp8_e5m2": 25.2,
    "int4": 20.5,
    "sparse_int8": 42.3,
    "bf16": 55.0,
    "fp16": 73.0,
}

#: The largest relative L2 error of the gradients of three layers whose inputs were int8.
GRADIENT_BOUND = 0.002

_NUMEL = 10_007  # odd, so that the last group is padded
_ROWS, _WIDTH, _LAYERS = 128, 64, 3


class Check(NamedTuple):
    """One line: a test, its device, its result, and the bound for it."""

    name: str
    device: str
    ok: bool
    figure: str
    bound: str


def run(devices: Iterable[str] | None = None) -> list[Check]:
    """Test each device of :func:`devices_here`, or the given ones.

    ``gradckpt.stats()`` counts the tensors that are compressed here.
    """
    return [check for device in devices or devices_here() for check in _checks(device)]


def devices_here() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{i}" for i in range(count))]


def _checks(device: str) -> Iterable[Check]:
    def check(name: str, function: Callable[..., tuple[bool, str, str]], *args: Any) -> Check:
        try:
            return Check(name, device, *function(*args, device))
        except Exception as error:
            sentence = (str(error).splitlines() or [""])[0]
            return Check(name, device, False, f"{type(error).__name__}: {sentence}", "no error")

    for codec in _C.codecs():
        yield check(f"round trip {codec}", _round_trip, codec)
    yield check("payload bytes", _payload_bytes)
    if device == "cpu":
        for isa in _isas():
            yield check(f"bytes of {isa}", _bytes, isa, "scalar", "scalar C")
    else:
        yield check("bytes of CUDA", _bytes, _C.isa(), _C.isa(), "the CPU")
    yield check("compress=None", _none_is_torch)
    yield check("loss with int8", _loss)
    yield check("gradients with int8", _gradients)
    yield check("bytes saved", _bytes_saved)


# ---- codecs ----


def _pairs() -> list[tuple[str, str]]:
    return [(codec, dtype) for codec in _C.codecs() for dtype in _C.codec_info(codec)["dtypes"]]


def _values(dtype: str) -> torch.Tensor:
    """Return Gaussian values on the host, the same every time."""
    x = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    return x > 0 if dtype == "bool" else x.to(getattr(torch, dtype))


def encode(x: torch.Tensor, codec: str) -> Any:
    return _C.encode(x, codec)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    same: bool = torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return same


def _round_trip(codec: str, device: str) -> tuple[bool, str, str]:
    info = _C.codec_info(codec)
    worst, largest, noise = 0.0, 0.0, math.inf
    for dtype in info["dtypes"]:
        x = _values(dtype)
        restored = encode(x.to(device), codec).decode()
        if restored.device != torch.device(device) or restored.dtype != x.dtype or restored.shape != x.shape:
            return False, f"came back as {restored.dtype} {tuple(restored.shape)}", f"{x.dtype} {tuple(x.shape)}"
        error = x.double() - restored.cpu().double()
        worst = max(worst, error.abs().max().item())
        largest = max(largest, x.double().abs().max().item())
        power = error.square().sum().item()
        noise = min(noise, 10 * math.log10(x.double().square().sum().item() / power)) if power else noise
        if math.isnan(power):
            return False, "NaN came back", "numbers"
    if info["max_error"] == 0:
        return worst == 0, f"{worst:g} off", "exact"
    if codec not in FLOORS:
        bound = info["max_error"] * largest
        return worst <= bound, f"{worst:.3g} off", f"at most {bound:.3g}"
    floor = FLOORS[codec]
    return noise >= floor, f"{noise:.1f} dB above its noise", f"at least {floor:.1f} dB"


def _payload_bytes(device: str) -> tuple[bool, str, str]:
    wrote = computed = 0
    wrong = []
    for codec, dtype in _pairs():
        expected = int(payload_nbytes((_NUMEL,), getattr(torch, dtype), codec))
        payload = encode(_values(dtype).to(device), codec)
        nbytes = payload.codes.numel() + payload.scales.numel()
        wrote, computed = wrote + nbytes, computed + expected
        if not nbytes == payload.nbytes == expected:
            wrong.append(f"{codec} {dtype}")
    return not wrong, ", ".join(wrong) or f"{wrote:,} bytes", f"{computed:,} bytes by arithmetic"


@contextlib.contextmanager
def _forced(isa: str) -> Iterator[None]:
    used = _C.isa()
    _C.force_isa(isa)
    try:
        yield
    finally:
        _C.force_isa(used)


def _isas() -> list[str]:
    """Return the instruction sets of this CPU besides scalar."""
    found = []
    for isa in ("avx2", "avx512"):
        with contextlib.suppress(ValueError), _forced(isa):
            found.append(isa)
    return found


def _both_ways(device: str) -> list[list[torch.Tensor]]:
    """Return payload and restored values of every codec and dtype, on the host."""
    payloads = [encode(_values(dtype).to(device), codec) for codec, dtype in _pairs()]
    return [[tensor.cpu() for tensor in (p.codes, p.scales, p.decode())] for p in payloads]


def _bytes(isa: str, wanted_isa: str, of: str, device: str) -> tuple[bool, str, str]:
    """Compare the bytes of a device by an instruction set with those of the CPU by another."""
    with _forced(wanted_isa):
        wanted = _both_ways("cpu")
    with _forced(isa):
        made = _both_ways(device)
    different = [
        f"{codec} {dtype}"
        for (codec, dtype), mine, others in zip(_pairs(), made, wanted, strict=True)
        if not all(map(_same, mine, others))
    ]
    figure = f"{len(made) - len(different)} of {len(made)} alike"
    return not different, ", ".join([figure, *different]), f"those of {of}, and the values restored"


# ---- regions ----


def _train(call: Callable[..., torch.Tensor], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and gradients of a small network with dropout.

    ``call(layer, input)`` runs each layer.
    """
    where = torch.device(device)
    forked = torch.random.fork_rng([] if where.index is None else [where.index])
    with forked, torch.enable_grad(), torch.autocast(where.type, enabled=False):
        torch.manual_seed(0)
        layers = [_layer(device) for _ in range(_LAYERS)]
        x = torch.randn(_ROWS, _WIDTH, requires_grad=True, device=device, dtype=torch.float32)
        hidden = x * 1.0
        for layer in layers:
            hidden = call(layer, hidden)
        loss = hidden.square().mean()
        loss.backward()
    grads = [x.grad, *(p.grad for layer in layers for p in layer.parameters())]
    return loss.detach(), torch.cat([g.flatten() for g in grads if g is not None])


def _layer(device: str) -> torch.nn.Module:
    first = torch.nn.Linear(_WIDTH, 2 * _WIDTH, device=device, dtype=torch.float32)
    last = torch.nn.Linear(2 * _WIDTH, _WIDTH, device=device, dtype=torch.float32)
    return torch.nn.Sequential(first, torch.nn.GELU(), torch.nn.Dropout(0.1), last)


def _plain(layer: Any, x: torch.Tensor) -> Any:
    return layer(x)


_with_torch = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)
_with_none = _C.checkpoint
_with_int8 = functools.partial(_C.checkpoint, compress="int8")


def _none_is_torch(device: str) -> tuple[bool, str, str]:
    (loss, gradients), (loss_, gradients_) = _train(_with_none, device), _train(_with_torch, device)
    different = int((gradients != gradients_).sum()) + int(loss != loss_)
    figure = f"{different} of {gradients.numel() + 1:,} values differ"
    return different == 0, figure, "loss and gradients of torch.utils.checkpoint, bit for bit"


def _loss(device: str) -> tuple[bool, str, str]:
    loss, exact = _train(_with_int8, device)[0], _train(_plain, device)[0]
    return torch.equal(loss, exact), f"{loss.item():.9g}", f"{exact.item():.9g}, that of no checkpointing"


def _gradients(device: str) -> tuple[bool, str, str]:
    gradients, exact = _train(_with_int8, device)[1], _train(_plain, device)[1]
    error = ((gradients - exact).norm() / exact.norm()).item()
    bound = f"those of exact autograd within {GRADIENT_BOUND:.1%}, and not the same"
    return 0 < error <= GRADIENT_BOUND, f"{error:.3%} off", bound


def _bytes_saved(device: str) -> tuple[bool, str, str]:
    before = _C.stats()
    _train(_with_int8, device)
    now = _C.stats()
    inputs, written, original = (now[k] - before[k] for k in ("compressed", "bytes_out", "bytes_in"))
    written_each = int(payload_nbytes((_ROWS, _WIDTH), torch.float32, "int8"))
    expected = (_LAYERS, _LAYERS * written_each, _LAYERS * _ROWS * _WIDTH * 4)
    figure = f"{inputs} inputs, {original:,} -> {written:,} bytes"
    bound = "{0} inputs, {2:,} -> {1:,} bytes by arithmetic".format(*expected)
    return (inputs, written, original) == expected, figure, bound
