"""``compress_saved()`` as Dynamo sees it: the functions of C that it calls, traceable."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx.node import has_side_effect

from gradckpt import _C
from gradckpt._compile import graph, saved_blocks, saved_joint
from gradckpt._compile.compiler import install
from gradckpt._compile.constants import contents, refusal
from gradckpt._engine import saved_tensors
from gradckpt._engine import torch_private as private
from gradckpt._stats import compiled as compiled_stats


def parse_saved(compress: Any, offload: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return the settings of a block; the config is the argument of an operator, or None."""
    if offload is not None and offload is not False:  # a graph frees and reads its payloads itself
        private.dynamo.graph_break()
    text = _settings(contents(compress), ())
    return text, None, text, (), None


def saved_push(plan: Any, formats: Any, place: Any) -> None:
    """Begin a block of ``compress_saved()``."""
    if place is not None:
        private.dynamo.graph_break()
    text = plan if isinstance(plan, str) else _settings(contents(plan), formats)
    if _has_blocks():
        torch.ops.gradckpt.saved_begin(text)


def saved_pop(failed: bool) -> None:
    """End it."""
    if _has_blocks():
        torch.ops.gradckpt.saved_end()


def saved_call(plan: Any, formats: Any, place: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function in a block."""
    saved_push(plan, formats, place)
    try:
        return function(*args, **kwargs)
    finally:
        saved_pop(False)


def _settings(compress: Any, formats: tuple[tuple[str, str | None], ...]) -> str | None:
    """Return a block's settings as the argument of an operator; None: nothing is compressed.

    It runs while Dynamo traces, and its result is a constant there.
    """
    try:
        config = saved_tensors.parse_saved(compress, None)[0]
    except (TypeError, ValueError) as error:
        raise refusal(str(error)) from error
    if config is None:
        return None
    if config.stochastic:
        raise refusal("gradckpt: stochastic=True cannot be compiled; leave it out, or do not compile")
    compiled_stats.ever = True
    if _has_blocks():
        _keep_operators()
        output = private.dynamo.InstructionTranslator.current_tx().output
        output.compiler_fn = install(output.compiler_fn)
    return saved_blocks.settings_text(config, config.operators or formats)


@functools.cache
def _keep_operators() -> None:
    """Let no pass remove our operators: torch's table of those is not touched by an import."""
    for operator in (*saved_blocks.KEPT, saved_joint.SIGNS):
        has_side_effect(operator)


def _has_blocks() -> bool:
    """Return whether the graph may have blocks: an exported one has none."""
    if private.load_cut() is None:
        graph.warn_unavailable("what compress_saved() keeps in compiled graphs stays")
        return False
    return not private.dynamo.InstructionTranslator.current_tx().output.export


#: What Dynamo sees in place of what.
SUBSTITUTES = (
    (saved_tensors.parse_saved, parse_saved),
    *((_C.saved_push, saved_push), (_C.saved_pop, saved_pop), (_C.saved_call, saved_call)),
)
#: What runs while it traces.
CONSTANT = (_settings, _has_blocks)
#: What is traced only as part of other code: where a ``with`` statement runs uncompiled, so do both
#: of its ends.
IN_BLOCKS = tuple(getattr(saved_tensors.compress_saved, name).__code__ for name in ("__enter__", "__exit__"))
