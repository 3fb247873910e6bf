"""A module that treats each token alone, run in tiles of the sequence: :func:`run_in_tiles`.

The forward keeps the input alone, and packs it before the module runs, so that the recompute of an
enclosing region stops there. The backward takes the tiles one after the other: each runs again with
grad, and its gradients are written into one buffer for the input and, for the weights, summed in
float32 and rounded once. Products of fewer rows may round differently in the last bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module

from gradckpt._engine import buffers, parameter_hooks
from gradckpt._engine import torch_private as private
from gradckpt._engine.token_check import NARROW, TOKENS, TokenCheck, part_of, without_autocast_cache
from gradckpt._engine.torch_objects import barred_by, make_saved_tensor
from gradckpt._engine.trial_calls import (
    generator_states,
    holds_still,
    leaves_behind,
    restore_generators,
    without_policies,
)


def run_in_tiles(
    module: Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    count: int,
    preserve_rng_state: bool,
    check: TokenCheck,
) -> torch.Tensor:
    """Return ``forward(*args, **kwargs)`` of a module inside a region.

    Raises:
        ValueError: The tiles do not divide the tokens, or the module mixes tokens.
        TypeError: It is called with more than one tensor, or returns something else.
    """
    leaves, spec = private.tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    kind = type(module).__name__
    if len(places) != 1 or leaves[places[0]].dim() < 2:
        raise TypeError(
            f"gradckpt: tiles= takes modules that are called with one tensor of tokens, and {kind} got {len(places)} "
            "tensors; leave it out"
        )
    place = places[0]
    x, leaves[place] = leaves[place], None  # what stays until the backward does not hold it
    if x.shape[TOKENS] % count or not x.numel():
        raise ValueError(
            f"gradckpt: tiles={count} does not divide the {x.shape[TOKENS]} tokens of {kind}; pass a number that "
            "does, or pad the sequence"
        )

    def call(tile: torch.Tensor) -> Any:
        given = [tile if i == place else value for i, value in enumerate(leaves)]
        args, kwargs = private.tree_unflatten(given, spec)
        result = forward(*args, **kwargs)
        if not holds_still((args, kwargs), given, spec):
            raise ValueError(
                f"gradckpt: tiles= takes modules that leave their arguments as they are, and {kind} writes into a "
                "list or dict; leave it out"
            )
        return result

    parameters = [p for p in module.parameters() if p.requires_grad]
    if not (x.requires_grad or parameters):
        return call(x)  # type: ignore[no-any-return]
    run = _Run(module, call, count, parameters, preserve_rng_state)
    run.saved = make_saved_tensor(x, False)  # first: an enclosing recompute ends here
    check.see(module, call, x, count, _plain(leaves))
    return _Tiles.apply(run, x, *parameters)  # type: ignore[no-untyped-call, no-any-return]


class _Run:
    """One call, from its forward to its backward."""

    def __init__(
        self,
        module: Module,
        call: Callable[[torch.Tensor], Any],
        count: int,
        parameters: Sequence[torch.Tensor],
        preserve_rng_state: bool,
    ) -> None:
        self.module = module
        self.call = call
        self.count = count
        self.parameters = parameters
        self.versions = [p._version for p in parameters]
        self.autocast = _autocast()
        self.random = generator_states() if preserve_rng_state else None
        self.saved: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor | None = None
        with without_autocast_cache(), without_policies():  # casts without grad are of no use to others
            for i, tile in enumerate(x.chunk(self.count, TOKENS)):
                y = self._call(tile)
                if result is None:
                    result = y.new_empty((*x.shape[:TOKENS], x.shape[TOKENS], y.shape[-1]))
                part_of(result, i, self.count).copy_(y)
                del y
        assert result is not None
        return result

    def _call(self, tile: torch.Tensor) -> torch.Tensor:
        y = self.call(tile.contiguous())  # modules take views of it, as of the whole
        if not isinstance(y, torch.Tensor) or y.shape[:-1] != tile.shape[:-1]:
            what = f"shape {tuple(y.shape)}" if isinstance(y, torch.Tensor) else type(y).__name__
            raise TypeError(
                f"gradckpt: tiles= takes modules that return one row for each token, and {type(self.module).__name__} "
                f"returns {what} for {tuple(tile.shape)}; leave it out"
            )
        return y

    def backward(self, grad: torch.Tensor, needed: list[bool]) -> list[torch.Tensor | None]:
        """Return the gradients of the input and of the parameters."""
        x = self.saved.unpack().detach()
        if [p._version for p in self.parameters] != self.versions:
            raise RuntimeError(
                f"gradckpt: a weight of {type(self.module).__name__}, which runs in tiles, was changed in place before "
                "the backward; step the optimizer afterwards"
            )
        wanted = [p for p, is_needed in zip(self.parameters, needed[1:], strict=True) if is_needed and p.requires_grad]
        sums: list[torch.Tensor | None] = [None] * len(wanted)
        of_input = torch.empty_like(x) if needed[0] else None
        reached = False
        with self._as_forward():
            for i, tile in enumerate(x.chunk(self.count, TOKENS)):
                found = self._differentiate(tile, part_of(grad, i, self.count), wanted, needed[0], check=i == 0)
                if of_input is not None:
                    first, *found = found
                    reached |= first is not None
                    part_of(of_input, i, self.count).copy_(torch.zeros_like(tile) if first is None else first)
                for j, each in enumerate(found):
                    sums[j] = _added(sums[j], each)
        by_id = {id(p): s.to(p.dtype) for p, s in zip(wanted, sums, strict=True) if s is not None}
        return [of_input if reached else None, *(by_id.get(id(p)) for p in self.parameters)]

    def _differentiate(
        self, tile: torch.Tensor, grad: torch.Tensor, wanted: list[torch.Tensor], of_input: bool, check: bool
    ) -> list[torch.Tensor | None]:
        with torch.enable_grad():
            leaf = tile.detach().requires_grad_(of_input)
            y = self._call(leaf)
        after = generator_states() if self.random is not None else None
        inputs = (leaf, *wanted) if of_input else tuple(wanted)
        if check:
            _check_leaves(self.module, y, inputs)
        found: list[torch.Tensor | None] = [None] * len(inputs)
        if y.requires_grad and inputs:
            if any(p._backward_hooks for p in wanted):
                found = list(parameter_hooks.capture(private.run_backward, (y,), (grad,), inputs, wanted))
            else:
                found = list(private.run_backward((y,), (grad,), False, False, inputs, True, False))
        if after is not None:
            restore_generators(after)
        return found

    @contextlib.contextmanager
    def _as_forward(self) -> Iterator[None]:
        """Enter the forward's random state and autocast; put running statistics back afterwards."""
        with contextlib.ExitStack() as stack:
            if self.random is not None:
                stack.callback(restore_generators, generator_states())
                restore_generators(self.random)
            stack.callback(buffers.enter(buffers.with_rule(self.module)).close)
            for kind, enabled, dtype, cached in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            yield


class _Tiles(torch.autograd.Function):
    """The node of a call. The parameters are inputs, so that their hooks see one gradient."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        return run.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.run is None:
            raise RuntimeError(
                "gradckpt: a module in tiles was differentiated a second time; pass retain_graph=True to the first "
                "backward"
            )
        with torch.no_grad():
            found = ctx.run.backward(grad.detach(), list(ctx.needs_input_grad[1:]))
        if not private.keeps_graph():
            ctx.run = None
        return None, *(barred_by(_NO_SECOND, found) if torch.is_grad_enabled() else found)


_NO_SECOND = "gradckpt: tiles= has no gradient of its gradient (create_graph=True); leave tiles= out"


def _plain(leaves: list[Any]) -> tuple[Any, ...]:
    """Return what a module is called with beside its tensor, as far as it may be compared."""
    return tuple(x if isinstance(x, (bool, int, float, str, torch.dtype)) else type(x) for x in leaves)


def _added(total: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None:
        return total
    if total is None:
        return x.float() if x.dtype in NARROW else x.clone()  # autograd may hand it to others, too
    if x.dtype == total.dtype or x.layout is torch.strided:
        return total.add_(x)
    return total + x


def _check_leaves(module: Module, y: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
    """Check that gradients flow to the inputs only; those of other tensors would be lost."""
    known = {id(x) for x in inputs} | {id(p) for p in module.parameters()}
    for variable in leaves_behind((y,)):
        if id(variable) not in known:
            raise RuntimeError(
                f"gradckpt: tiles= would lose the gradient of a tensor of shape {tuple(variable.shape)} that "
                f"{type(module).__name__} uses; make it a parameter, or leave tiles= out"
            )


def _autocast() -> list[tuple[str, bool, torch.dtype, bool]]:
    """Return the state of autocast, by device."""
    cached = torch.is_autocast_cache_enabled()
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached)
        for kind in private.autocast_types()
        if torch.is_autocast_enabled(kind)
    ]
