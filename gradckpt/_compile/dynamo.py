"""Trace torch's checkpoint, with marked inputs, for ``gradckpt.checkpoint`` in compiled code.

Dynamo knows ``torch.utils.checkpoint.checkpoint`` and makes one operator of it, which AOTAutograd
recomputes in the backward graph. Dynamo cannot trace a C function, so it is given
:func:`checkpoint` below. Nothing of torch is changed: ``torch.compiler.substitute_in_graph`` is its
own interface for this.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint

from gradckpt import _C, compat, policies
from gradckpt._compile import graph, saved_dynamo
from gradckpt._compile.compiler import install
from gradckpt._compile.constants import contents, refusal
from gradckpt._compression import CompressionConfig, parse_compress
from gradckpt._engine import kept_calls, remat
from gradckpt._engine import torch_private as private
from gradckpt._engine.selective import contexts_of, create_selective_checkpoint_contexts
from gradckpt._import_hooks import after_import
from gradckpt._stats import compiled as compiled_stats

logger = logging.getLogger("gradckpt")


class Marking(NamedTuple):
    """The settings of a mark. Dynamo reads them as a constant."""

    fake_quantize: bool
    restored: bool  # the recompute computes with other values than the forward
    codec: str
    dtypes: tuple[torch.dtype, ...]
    min_numel: int
    #: By requires_grad and is_leaf.
    eligible: tuple[tuple[bool, bool], tuple[bool, bool]]
    version: str


def checkpoint(
    function: Any,
    *args: Any,
    compress: Any = None,
    policy: Any = None,
    offload: Any = None,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Any = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    buffers: Any = None,
    **kwargs: Any,
) -> Any:
    """Run ``gradckpt.checkpoint`` as Dynamo sees it. A graph keeps nothing that hooks could see."""
    if offload is not None and offload is not False:  # a graph frees and reads its payloads itself
        private.dynamo.graph_break()
    compress = contents(compress)
    if context_fn is torch_checkpoint.noop_context_fn:  # torch's default
        context_fn = None
    known = isinstance(policy, policies.Policy)  # Dynamo before 2.12 takes no object of ours for a constant
    marking = _marking(compress, None if known else policy, known, use_reentrant, debug, context_fn is not None)
    if marking is not None and torch.is_grad_enabled():
        args, kwargs = private.tree_map(functools.partial(_mark, marking), (args, kwargs))
    if policy is not None:
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    elif context_fn is not None:
        kwargs["context_fn"] = context_fn
    torchs = {
        "preserve_rng_state": preserve_rng_state,
        "determinism_check": determinism_check,
        "early_stop": early_stop,
    }
    kwargs.update(torchs, use_reentrant=False)
    names = policy.patterns if known else ()
    restored = marking is not None and marking.restored
    return _traced(torch.ops.higher_order.tag_activation_checkpoint, names, function, args, kwargs, restored)


def _traced(
    checkpoint: Any, names: tuple[str, ...], function: Any, args: Any, kwargs: Any, restored: bool = False
) -> Any:
    """Trace torch's checkpoint; calls inside that are kept, ours or torch_remat's, look for it.

    ``restored``: a codec rounds its inputs. A graph keeps no arguments beside those, so no call is
    kept.
    """
    around = kept_calls.traced, kept_calls.restored
    changes = kept_calls.must_set(names, restored)
    if changes:
        kept_calls.traced, kept_calls.restored = names, restored
    try:
        if remat.is_traceable() and not restored:
            return remat.trace(checkpoint, function, args, kwargs)
        return checkpoint(function, *args, **kwargs)
    finally:
        if changes:
            kept_calls.traced, kept_calls.restored = around


def _distinct(x: torch.Tensor) -> Any:
    """Return how many values lie in memory: those of an expanded dimension are one."""
    n: Any = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        n = n * size if stride != 0 else n
    return n


def _mark(marking: Marking, x: Any) -> Any:
    """Mark a tensor that ``compress=`` compresses; return any other value unchanged."""
    if (
        isinstance(x, torch.Tensor)
        and type(x) is torch.Tensor
        and x.dtype in marking.dtypes
        and private.dynamo.guard_or_true(_distinct(x) >= marking.min_numel)  # true for a size that only the run tells
        and marking.eligible[int(x.requires_grad)][int(x.is_leaf)]  # Dynamo before 2.12 takes no bool for an index
    ):
        mark = graph.rounded if marking.fake_quantize else graph.region_input
        return mark(x, marking.codec, marking.version)
    return x


def _marking(
    compress: Any, policy: Any, known: bool, use_reentrant: bool | None, debug: bool, contexts: bool
) -> Marking | None:
    """Return what is marked in a call of checkpoint. ``known``: its policy needs no look.

    It runs while Dynamo traces, and its result is a constant there.
    """
    try:
        config = parse_compress(compress)
        known = contexts_of(policy) is not None or known
    except (TypeError, ValueError) as error:
        raise refusal(str(error)) from error
    compiled_stats.ever = True
    if debug:
        raise refusal("gradckpt: debug=True cannot be compiled; call the function without torch.compile to debug")
    if known and contexts:
        raise refusal("gradckpt: policy= and context_fn= exclude each other; a policy is a context_fn")
    if config is None and not known and not contexts:
        return None
    if use_reentrant and (config is not None or known):
        name = "compress" if config is not None else "policy"
        raise refusal(f"gradckpt: {name}= needs use_reentrant=False")
    if config is not None and config.stochastic:
        raise refusal("gradckpt: stochastic=True cannot be compiled; leave it out, or do not compile")
    if private.load_cut() is None:
        graph.warn_unavailable("inputs of compiled regions stay")
        return None
    output = private.dynamo.InstructionTranslator.current_tx().output
    if output.export:
        return None
    output.compiler_fn = install(output.compiler_fn)
    if config is None or graph.may_overflow(config.codec):
        return None
    if config.lossy and not config.fake_quantize:
        output.compiler_fn.restored = True
        if output.compiler_fn.replay_discrete != "casts":
            output.compiler_fn.replay_discrete = config.replay_discrete or output.compiler_fn.replay_discrete
    floating = config.include == "floating"
    settings = floating, config.fake_quantize
    no_grad = _C.eligible(False, False, *settings), _C.eligible(False, True, *settings)
    grad = _C.eligible(True, False, *settings), _C.eligible(True, True, *settings)
    return Marking(
        config.fake_quantize,
        config.lossy and not config.fake_quantize,
        config.codec,
        graph.dtypes(config.codec),
        config.min_numel,
        (no_grad, grad),
        graph.version(),
    )


def compat_checkpoint(function: Any, *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    """Run ``gradckpt.compat.checkpoint`` as Dynamo sees it."""
    kwargs["use_reentrant"] = use_reentrant
    return _traced(private.imported_checkpoint, (), function, args, kwargs)


# ---- in torch's place ----


class Replacement(NamedTuple):
    """The settings of the innermost ``patched()``."""

    config: CompressionConfig | None
    context_fn: Any
    place: Any = None


#: None leaves torch's checkpoint unchanged. Dynamo guards on it: code compiled under one
#: ``patched()`` is compiled again under another, or under none.
_replacement: Replacement | None = None


def bind_not_torchs(function: Any, kwargs: dict[str, Any]) -> Any:
    """Bind to the function those of its keywords that gradckpt.checkpoint would take for its own,
    and torch passes on. They are removed from ``kwargs``.
    """
    its_own = {key: kwargs.pop(key) for key in ("compress", "policy", "offload", "buffers") if key in kwargs}
    return functools.partial(function, **its_own) if its_own else function


def torchs_checkpoint(function: Any, *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    """Run ``torch.utils.checkpoint.checkpoint`` under ``patched()`` as Dynamo sees it."""
    if _replacement is None or use_reentrant:
        return torch.ops.higher_order.tag_activation_checkpoint(function, *args, use_reentrant=False, **kwargs)
    own = kwargs.get("context_fn")
    if _replacement.context_fn is not None and (own is None or own is torch_checkpoint.noop_context_fn):
        kwargs["context_fn"] = _replacement.context_fn
    function = bind_not_torchs(function, kwargs)
    return checkpoint(function, *args, compress=_replacement.config, offload=_replacement.place, **kwargs)


def replace_checkpoint(replacement: Replacement | None) -> None:
    """Give Dynamo :func:`torchs_checkpoint` for torch's function, from the first call on.

    With None it does what Dynamo does by itself. It is not withdrawn, because a graph made without
    its guard would then also serve the next ``patched()``.
    """
    global _replacement
    _replacement = replacement
    graph.patched = replacement is not None
    if replacement is not None and _told:
        _substitute(torch_checkpoint.checkpoint, torchs_checkpoint)


def _substitute(original: Any, traceable: Any) -> None:
    """Substitute the function once in a process, also when this module is loaded again."""
    if original not in private.dynamo.PolyfilledFunctionVariable._get_polyfill_handlers():
        torch.compiler.substitute_in_graph(original, skip_signature_check=True)(traceable)


# ---- telling Dynamo ----

#: True once Dynamo is imported and has every name that is needed.
_told = False


def _tell(dynamo: ModuleType) -> None:
    global _told
    missing = private.load_dynamo()
    if missing:
        lacks = torch.__version__, ", ".join(missing)
        logger.warning("gradckpt: torch %s has no %s, so regions break compiled graphs; install torch 2.12", *lacks)
        return
    _told = True
    own = ((_C.checkpoint, checkpoint), (compat.checkpoint, compat_checkpoint))
    for original, traceable in (*own, *saved_dynamo.SUBSTITUTES):
        _substitute(original, traceable)
    for constant in (
        _marking,
        *saved_dynamo.CONSTANT,
        remat.is_traceable,
        kept_calls.is_listed,
        kept_calls.warn_compiled,
    ):
        torch.compiler.assume_constant_result(constant)
    for code in saved_dynamo.IN_BLOCKS:
        private.dynamo.skip_code(code)

    if _replacement is not None:
        _substitute(torch_checkpoint.checkpoint, torchs_checkpoint)


def hook_import() -> None:
    """Give Dynamo the substitutes, once something imports it."""
    after_import("torch._dynamo", _tell)
