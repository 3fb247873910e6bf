"""The ways of training that bench_training.py compares: exact, formats of gradckpt, and controls.

The controls show what the comparison can tell apart. ``noise`` changes each gradient by 1e-6 of
itself. ``cut`` stands for a bad codec: in a second run of each step, each region's backward starts
from its input rounded toward 0, and the difference that this makes is scaled to a quarter of the
gradient's norm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from training_tasks import Batch, Task

import gradckpt

EXACT, BF16, NOISE, CUT = "exact", "bf16", "noise", "cut"
CUT_ERROR, NOISE_SIZE = 0.25, 1e-6


class Way(NamedTuple):
    about: str
    settings: dict[str, Any] | None = None  # keywords of gradckpt.enable
    codec: str = ""  # among those that it uses
    needs_products: bool = False  # in the blocks


WAYS = {
    EXACT: Way("no checkpointing"),
    BF16: Way("bf16 autocast"),
    "int8": Way("`int8`", {"compress": "int8"}, "int8"),
    "int6": Way("`int6`", {"compress": "int6"}, "int6"),
    "int4": Way("`int4`", {"compress": "int4"}, "int4"),
    "fp8": Way("`fp8`", {"compress": "fp8"}, "fp8_e4m3"),
    "saved": Way("`int8`, `recompute=False` (`saved`)", {"compress": "int8", "recompute": False}, "int8"),
    "products": Way(
        '`int8`, `policy="save_matmuls:int8"` (`products`)',
        {"policy": "save_matmuls:int8"},
        "int8",
        needs_products=True,
    ),
    "stochastic": Way(
        "`int8`, `stochastic=True`, regions run again", {"compress": {"codec": "int8", "stochastic": True}}, "int8"
    ),
    NOISE: Way("control: gradients changed by 1e-6 (`noise`)"),
    CUT: Way(f"control: a codec with {100 * CUT_ERROR:g} % gradient error (`cut`)"),
}
OURS = tuple(name for name, way in WAYS.items() if way.settings)
#: Those that change nothing, to the last bit.
EQUAL = {
    "lossless": Way("`lossless`", {"compress": "lossless"}, "lossless"),
    "attention": Way('`policy="save_attention:int8"`', {"policy": "save_attention:int8"}, needs_products=True),
}


def of_task(task: Task, ways: dict[str, Way]) -> list[str]:
    return [name for name, way in ways.items() if task.products or not way.needs_products]


# ---- the bad codec


class Cut:
    """The error of a codec that rounds region inputs toward 0, to multiples of their row's RMS,
    scaled to CUT_ERROR of the gradient in each step."""

    def __init__(self, model: nn.Module, block: str) -> None:
        self.model, self.on = model, False
        for module in model.modules():
            if type(module).__name__ == block:
                module.forward = self.from_rounded(module.forward)

    def from_rounded(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """While ``on``: the output is exact up to rounding, and its gradient that of a run from the
        rounded input. An input without a gradient, as the first one of LoRA, is not rounded."""

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not (self.on and x.requires_grad):
                return forward(x, *args, **kwargs)
            with torch.no_grad():
                exact = forward(x, *args, **kwargs)
                grid = x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
                change = (x / grid).trunc() * grid - x
            rough = forward(x + change, *args, **kwargs)
            return rough + (exact - rough).detach()

        return run

    @contextlib.contextmanager
    def bad(self) -> Iterator[None]:
        """A second run of the same step changes no running statistics."""
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        momenta = [m.momentum for m in norms]
        self.on = True
        for norm in norms:
            norm.momentum = 0.0
        try:
            yield
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            self.on = False

    def change_gradients(self, batch: Batch) -> float:
        """Return the error of the codec itself."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        exact = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        with self.bad():
            self.model(**batch).loss.backward()
        errors = [p.grad - g for p, g in zip(parameters, exact, strict=True)]
        norm = lambda of: torch.stack([x.norm() for x in of]).norm()  # noqa: E731
        share = norm(errors) / norm(exact)
        for p, g, error in zip(parameters, exact, errors, strict=True):
            p.grad = g + CUT_ERROR / share * error
        return float(share)


# ---- a run in one way


class Session:
    """A model in one of the ways, for as long as it is entered."""

    def __init__(self, name: str, task: Task, model: nn.Module, seed: int) -> None:
        self.name, self.model, self.autocast = name, model, name == BF16
        self.generator = torch.Generator().manual_seed(seed)
        self.cut = Cut(model, task.block) if name == CUT else None
        self.errors: list[float] = []  # of the bad codec, in each step
        gradckpt.stats.reset()
        gradckpt.config.set_rounding_state((0, 0))  # else the noise is that of the runs before
        settings = (WAYS | EQUAL)[name].settings
        if settings:
            block = next(type(m) for m in model.modules() if type(m).__name__ == task.block)
            if isinstance(settings.get("compress"), dict):
                settings = {**settings, "compress": {**settings["compress"], "seed": seed}}
            gradckpt.enable(model, modules=block, **settings)

    def change_gradients(self, batch: Batch) -> None:
        """Apply the control, if this is one."""
        if self.cut is not None:
            self.errors.append(self.cut.change_gradients(batch))
        if self.name == NOISE:
            for p in self.model.parameters():
                if p.grad is not None:
                    noise = torch.randn(p.grad.shape, generator=self.generator).to(p.grad.device)
                    p.grad.mul_(1 + NOISE_SIZE * noise)

    def compressed(self) -> int:
        """Count the payloads, and the outputs that a policy kept."""
        return int(gradckpt.stats()["encoded"] + gradckpt.stats()["policy_outputs"])

    def codecs(self) -> set[str]:
        """Return the names of the codecs that made payloads."""
        return {name for name, one in gradckpt.stats()["codecs"].items() if one}

    def recomputes(self) -> int:
        return int(gradckpt.stats()["recomputes"])
