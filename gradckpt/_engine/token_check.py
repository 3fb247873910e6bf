"""Does a module treat each token alone, so that it may run in tiles? :class:`TokenCheck`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module

from gradckpt import _C
from gradckpt._engine import buffers
from gradckpt._engine import torch_private as private
from gradckpt._engine.trial_calls import (
    MadeTensors,
    generator_states,
    reaches_before,
    restore_generators,
    without_policies,
)

#: The dimension of the tokens: the last but one.
TOKENS = -2

#: The types in which one rounding is seen.
NARROW = (torch.float16, torch.bfloat16)

Call = Callable[[torch.Tensor], Any]


class TokenCheck:
    """What was found out about a module, by running it on two tiles; once for each shape and mode.

    A module is not believed because of its name. Its rows have to be the same to the bit where
    other tokens are beside them. Rows and gradients have to be the same, up to rounding, where the
    tiles change places, and where each runs alone.
    """

    def __init__(self) -> None:
        self.seen: set[Any] = set()

    def see(self, module: Module, call: Call, x: torch.Tensor, count: int, rest: Hashable) -> None:
        """Check a module; ``rest``: what else it is called with. A simulated step has no values:
        the real one checks.

        Raises:
            ValueError: The module mixes tokens, or depends on their places or number, or its
                recompute could choose otherwise than its forward.
        """
        region = _C.running_region()
        approximate = region is not None and bool(region[3])
        modes = tuple(part.training for part in module.modules())
        autocast = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type)
        key = (tuple(x.shape), x.dtype, modes, approximate, autocast, rest)
        if key in self.seen or _C.is_simulated() or isinstance(x, private.FakeTensor) or x.device.type == "meta":
            return
        random = generator_states()
        statistics = buffers.enter(buffers.with_rule(module))
        try:
            why = _Trial(module, call, x.detach(), count, approximate, random).why_not()
        finally:
            statistics.close()
            restore_generators(random)
        if why is not None:
            kind = type(module).__name__
            raise ValueError(
                f"gradckpt: tiles= needs modules that treat each token alone, and {kind} {why}; leave it out"
            )
        self.seen.add(key)


class _Trial:
    """Runs of a module on the first two tiles of its input, with the same random state."""

    def __init__(self, module: Module, call: Call, x: torch.Tensor, count: int, approximate: bool, random: Any) -> None:
        self.module, self.call, self.x, self.approximate, self.random = module, call, x, approximate, random
        self.size = x.shape[TOKENS] // count
        self.tiles = part_of(x, 0, count), part_of(x, 1, count)
        self.writes = False

    def run(self, *tiles: torch.Tensor) -> Any:
        restore_generators(self.random)
        given = torch.cat(tiles, TOKENS)
        version = given._version
        result = self.call(given)
        self.writes |= given._version != version
        return result

    def draws(self) -> bool:
        """Return whether the last run drew random numbers."""
        before, after = ([cpu, *(state for _, state in others)] for cpu, others in (self.random, generator_states()))
        return not all(map(torch.equal, before, after))

    def why_not(self) -> str | None:
        """Return what is wrong with the module, or None."""
        with torch.no_grad(), without_autocast_cache(), without_policies():
            why = self.beside_others()
            if why is not None:
                return why
            drawn = self.draws()
            twice = self.run(self.tiles[0], self.tiles[0]).chunk(2, TOKENS) if drawn else None
            with _in_eval_mode(self.module) if drawn else contextlib.nullcontext():
                whole = self.run(*self.tiles)
                if drawn and self.draws():
                    return "draws random numbers in eval mode, too"
                if twice and _same(twice[0], twice[1]) and not _near(twice[0], whole.narrow(TOKENS, 0, self.size)):
                    return "draws random numbers that tokens share"
                return self.same_anywhere(whole)

    def beside_others(self) -> str | None:
        """Change tokens beside a tile, and look for what a run leaves behind."""
        first, second = self.tiles
        held = [
            (part, name, x, x._version)
            for part in self.module.modules()
            if not buffers.has_rule(type(part))  # those are put back
            for name, x in part.named_buffers(recurse=False)
        ]
        with MadeTensors() as seen:
            whole = self.run(first, second)
        if not isinstance(whole, torch.Tensor) or whole.shape[:-1] != (*self.x.shape[:TOKENS], 2 * self.size):
            return "returns something else than one row for each"
        if self.writes:
            return "changes its input in place"
        if any(x._version != version or part._buffers.get(name) is not x for part, name, x, version in held):
            return "changes a buffer"
        if seen.are_left(whole, self.x, *self.module.parameters(), *self.module.buffers()):
            return "leaves a tensor elsewhere than in its result"
        if self.approximate and seen.choices:
            return f"chooses by values ({seen.choices[0]}), which a codec rounds"
        last = self.run(_other(first), second), self.run(first, _other(second))  # this one last: draws() asks for it
        for place, tile in ((self.size, last[0]), (0, last[1])):
            if not _same(tile.narrow(TOKENS, place, self.size), whole.narrow(TOKENS, place, self.size)):
                return "gives a token other values beside other tokens"
        return None

    def same_anywhere(self, whole: torch.Tensor) -> str | None:
        """Let the tiles change places, and run one by one; compare rows and gradients."""
        first, second = self.tiles
        turned = self.run(second, first).chunk(2, TOKENS)[::-1]
        if not _near(torch.cat(turned, TOKENS), whole):
            return "goes by their places"
        if not _near(torch.cat([self.run(first), self.run(second)], TOKENS), whole):
            return "goes by how many there are"
        weights = _weights(whole).chunk(2, TOKENS)
        number = private.next_node_number()
        together = self.gradients(weights, self.tiles, number)
        if together is None:
            return "uses a tensor with a gradient that code outside of it has made"
        apart = [self.gradients((weight,), (tile,), number) for weight, tile in zip(weights, self.tiles, strict=True)]
        of_input = torch.cat([each[0] for each in apart if each is not None], TOKENS)
        of_weights = zip(*(each[1:] for each in apart if each is not None), strict=True)
        for found, parts in ((together[0], (of_input,)), *zip(together[1:], of_weights, strict=True)):
            if not _are_sum(found, parts):
                return "has gradients that are no sum over tokens"
        return None

    def gradients(
        self, weights: Sequence[torch.Tensor], tiles: Sequence[torch.Tensor], number: int
    ) -> list[torch.Tensor] | None:
        """Return those of the input and of parameters; None: the graph reaches further back."""
        restore_generators(self.random)
        wanted = [p for p in self.module.parameters() if p.requires_grad and not p._backward_hooks]
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            x = torch.cat(list(tiles), TOKENS).requires_grad_()
            y = self.call(x * 1)
        if reaches_before((y,), number):
            return None
        if not y.requires_grad:
            return [torch.zeros_like(each) for each in (x, *wanted)]
        weight = torch.cat(list(weights), TOKENS)
        found = torch.autograd.grad(y, (x, *wanted), weight.to(y.dtype), allow_unused=True)
        return [torch.zeros_like(of) if g is None else g for g, of in zip(found, (x, *wanted), strict=True)]


def part_of(x: torch.Tensor, i: int, count: int) -> torch.Tensor:
    size = x.shape[TOKENS] // count
    return x.narrow(TOKENS, i * size, size)


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


# ---- comparisons ----


def _other(tile: torch.Tensor) -> torch.Tensor:
    return tile * -1.25 + 0.5


def _weights(like: torch.Tensor) -> torch.Tensor:
    """Return values of both signs, others for each token."""
    return torch.arange(like.numel(), device=like.device).mul(0.7).sin_().view(like.shape)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _rounding(x: torch.Tensor) -> tuple[float, bool]:
    """Return what one rounding changes here at most, and whether it is a narrow type's."""
    dtypes = [x.dtype] + [torch.get_autocast_dtype(x.device.type)] * torch.is_autocast_enabled(x.device.type)
    widest = max(dtypes, key=lambda each: torch.finfo(each).eps)
    return torch.finfo(widest).eps, widest in NARROW


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether rows differ by roundings alone; in narrow types few go another way."""
    eps, narrow = _rounding(a)
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool((a - b).norm() <= eps * (0.5 if narrow else 512) * b.norm())


def _are_sum(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Return whether gradients are the sum of others, up to their roundings."""
    eps, narrow = _rounding(whole)
    found, *rest = (x.to_dense().double().nan_to_num() for x in (whole, *parts))
    size = sum(float(x.norm()) for x in rest)
    return float((found - sum(rest)).norm()) <= max(eps * 4 if narrow else 0.0, 0.01) * size


@contextlib.contextmanager
def _in_eval_mode(module: Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training
