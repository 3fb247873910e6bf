"""torch's errors and warnings for what a region does, in the words of the running torch.

torch raises each itself, in a call that has nothing else to do: none of its texts stands in
gradckpt. One sentence of ours takes the place of what a torch no longer says.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from gradckpt._compression import warn_user
from gradckpt._engine import torch_private as private


def _nothing(*args: Any) -> None:
    pass


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Let the modes that are active, and the hooks of a region around, see nothing of it."""
    plain: Any = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    if private.peek_functorch() is not None:  # transforms take no hooks
        plain = contextlib.nullcontext()
    with private.without_modes(), private.without_function_modes(), plain:
        yield


Says = str | Callable[..., str]


def _says(otherwise: Says, kind: type[Exception] = RuntimeError, *, seen: bool = False) -> Callable[[Any], Any]:
    """Let a function that makes torch raise return what torch raises, else an error of that kind
    with a sentence of ours, of which it may be made from the same arguments.

    ``seen``: the modes that are active matter to it.
    """

    def decorate(provoke: Callable[..., Any]) -> Callable[..., Exception]:
        @functools.wraps(provoke)
        def said(*of: Any) -> Exception:
            try:
                with contextlib.nullcontext() if seen else _unseen():
                    provoke(*of)
            except (AttributeError, NameError, NotImplementedError, TypeError):
                pass  # that place looks otherwise in this torch
            except Exception as error:
                return error.with_traceback(None)
            return kind(f"gradckpt: {otherwise if isinstance(otherwise, str) else otherwise(*of)}")

        KINDS[provoke.__name__] = said
        return said

    return decorate


#: All of them, by their names.
KINDS: dict[str, Callable[..., Exception]] = {}


# ---- a recompute that differs ----


def _frame() -> Any:
    return private.CheckpointFrame(None, False, None, lambda x: x)


def _pack(frame: Callable[[], Any]) -> None:
    private.RecomputeHook(frame, 0).pack_hook(types.SimpleNamespace(requires_grad=False))


@_says("a recompute that is over saves a tensor", AssertionError)
def recompute_over() -> None:
    _pack(_nothing)


@_says("the function of a region caught what ends its recompute; let it through", AssertionError)
def went_on() -> None:
    """Of a function that catches the exception which ends its recompute."""
    frame = _frame()
    frame.early_stop = True
    _pack(weakref.ref(frame))


@_says("the recompute of a region has not made a tensor that its backward needs; please report this", AssertionError)
def lost() -> None:
    private.internal_assert(False)


@_says("the recompute saves more tensors than the forward", torch_checkpoint.CheckpointError)
def more_saved() -> None:
    frame = _frame()
    frame.forward_completed = True
    _pack(weakref.ref(frame))


@_says(
    lambda forward, recompute: (
        f"the forward saved {forward} tensors and the recompute {recompute}; make both runs alike"
    ),
    torch_checkpoint.CheckpointError,
)
def fewer_saved(forward: int, recompute: int) -> None:
    frame = _frame()
    frame.weak_holders = [None] * forward
    frame.recomp_counter[0] = recompute
    frame.check_recomputed_tensors_match(0)


def _other_metadata(rows: list[tuple[int, Any, Any]]) -> str:
    differences = "".join(f"tensor {i} was {saved} in the forward and is {now}; " for i, saved, now in rows)
    return f"{differences}make both runs alike"


@_says(_other_metadata, torch_checkpoint.CheckpointError)
def other_metadata(rows: list[tuple[int, Any, Any]]) -> None:
    """``rows``: position, and what the forward and the recompute have there."""
    frame = _frame()
    n = frame.recomp_counter[0] = rows[-1][0] + 1
    frame.weak_holders, frame.x_metadatas = [_nothing] * n, [None] * n
    for index, saved, now in rows:
        holder, handle = private.CheckpointHolder(), private.CheckpointHandle()
        holder.handles[0] = handle
        frame.weak_holders[index] = functools.partial(lambda x: x, holder)
        frame.x_metadatas[index] = saved
        frame.recomputed[0][handle] = now
    frame.check_recomputed_tensors_match(0)


class _Unpacked(dict):  # type: ignore[type-arg]
    """The handles of a tensor that each backward has unpacked already."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> None:
        return None


@_says("a saved tensor is unpacked a second time; read ctx.saved_tensors once", torch_checkpoint.CheckpointError)
def unpacked_twice() -> None:
    frame, holder = _frame(), private.CheckpointHolder()
    frame.is_recomputed = collections.defaultdict(lambda: True)
    holder.handles = _Unpacked()
    private.CheckpointHook(frame).unpack_hook(holder)


@_says(str)
def stop_iteration(error: BaseException) -> None:
    """Raise what leaves a generator, which torch's checkpoint is inside, in place of this."""

    once = [error]  # its traceback holds the generator, which must not hold it

    def generator() -> Iterator[None]:
        raise once.pop()
        yield

    next(generator())


# ---- selective contexts ----


@_says(lambda op, *_: f"the recompute calls {op}, of which its forward has kept nothing")
def no_entry(op: Any, index: int, known: int, consumed: int) -> None:
    """Of a call of the recompute of which nothing is kept."""
    key, storage = private.storage_key(op, ()), collections.defaultdict(dict)  # type: ignore[var-annotated]
    if private.consumed is None:  # a list for each operator; a policy is asked again
        storage = {key: []} if consumed else {}  # type: ignore[assignment]
    elif known:
        storage[key] = {index: private.consumed} if consumed else {}
    mode = private.CachedMode(lambda *args, **kwargs: torch_checkpoint.CheckpointPolicy.MUST_SAVE, storage, False)
    if private.consumed is not None:
        mode.func_counter[key] = index
    mode.__torch_dispatch__(op, (), (), {})


@_says("what a policy keeps was changed in place; clone it first")
def mutated() -> None:
    kept = private.VersionWrapper(torch.empty(0))
    kept.version = -1
    kept.get_val(False)


@_says(lambda op: f"a policy lists operators as torch.ops.aten.mm.default, not {op!r}", ValueError)
def no_operator(op: Any) -> None:
    """Of an entry of a policy's list that is no overload of an operator."""
    private.imported_contexts([op])


# ---- keywords ----


@_says(lambda keywords: f"use_reentrant=True takes no {', '.join(keywords)}", ValueError)
def for_reentrant(keywords: dict[str, Any]) -> None:
    """Of keywords that the reentrant form does not take."""
    private.torchs_checkpoint(_nothing, use_reentrant=True, **keywords)


@_says(lambda keywords: f"checkpoint_sequential takes no {', '.join(keywords)}", ValueError)
def for_sequential(keywords: dict[str, Any]) -> None:
    """Of keywords that ``checkpoint_sequential`` does not take."""
    private.torchs_sequential([_nothing], 1, None, use_reentrant=False, **keywords)


@_says(lambda value, checks: f"determinism_check is one of {list(checks)}, not {value!r}", ValueError)
def unknown_check(value: Any, checks: Any) -> None:
    private.torchs_checkpoint(_nothing, use_reentrant=False, determinism_check=value)


@_says("debug=True and context_fn= exclude each other", ValueError)
def debug_with_contexts() -> None:
    private.torchs_checkpoint(_nothing, use_reentrant=False, debug=True, context_fn=_nothing)


# ---- contexts ----


@_says("contexts of a region that is traced are dispatch modes", AssertionError, seen=True)
def no_modes(forward: Any, recompute: Any) -> None:
    """Of contexts that are no dispatch modes, while a graph is traced."""
    private.torchs_checkpoint(_nothing, use_reentrant=False, context_fn=lambda: (forward, recompute))


@_says("the forward's context swallowed an exception of the forward; let it through")
def suppressed() -> None:
    """Of a forward's context that has swallowed what the forward raised."""

    def fail() -> None:
        raise NameError  # not of interest where torch lets it through

    contexts = contextlib.suppress(NameError), contextlib.nullcontext()
    with torch.enable_grad():
        private.torchs_checkpoint(fail, use_reentrant=False, context_fn=lambda: contexts)


@_says("a region's forward was the first to use the device; use it once before")
def device_began() -> None:
    """Of a forward that was the first to use the device."""
    device = types.SimpleNamespace(_initialized=False)
    generator = private.generator_with(_get_device_module=lambda *kind: device)
    with torch.enable_grad():
        run = generator(_nothing)
        next(run)
        device._initialized = True
        next(run)


# ---- the reentrant form ----


@_says("use_reentrant=True needs a backward() without inputs=; pass use_reentrant=False")
def inputs_given() -> None:
    """Of a backward of some inputs alone, in which this is called."""
    torch_checkpoint.CheckpointFunction.backward(None)


@_says("no output of the region requires grad; call it without a checkpoint")
def no_grad_output() -> None:
    with torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        private.torchs_checkpoint(torch.Tensor.detach, x, use_reentrant=True).backward(torch.zeros(1))


def in_our_words() -> list[str]:
    """Return the kinds that the installed torch does not say."""
    mm = torch.ops.aten.mm
    of: dict[str, tuple[Any, ...]] = {
        "fewer_saved": (2, 1),
        "other_metadata": ([(0, 1, 2)],),
        "no_operator": (mm,),
        "for_reentrant": ({"debug": True},),
        "for_sequential": ({"debug": True},),
        "unknown_check": ("?", ()),
    }
    elsewhere = ("inputs_given", "no_entry", "no_modes", "stop_iteration", "suppressed")
    tried = {
        **{kind: make(*of.get(kind, ())) for kind, make in KINDS.items() if kind not in elsewhere},
        **{f"no_entry {how}": no_entry(mm.default, 1, *how) for how in ((0, 0), (1, 0), (1, 1))},
        **{kind: said for kind in WARNINGS if (said := _warned(kind)) is not None},
    }
    return [kind for kind, said in tried.items() if str(said).startswith("gradckpt: ")]


def raise_torchs(kind: str, *of: Any) -> None:
    """Raise torch's error of that kind. Only C calls this."""
    raise KINDS[kind](*of)  # nothing here holds it, or it would hold itself by its traceback


# ---- warnings ----


def _keep_an_output() -> None:
    mode = private.CachingMode(
        lambda *args, **kwargs: torch_checkpoint.CheckpointPolicy.MUST_SAVE, collections.defaultdict(dict)
    )
    mode.__torch_dispatch__(torch.ops.aten.neg.default, (), (torch.zeros(1),), {})


#: By kind: what makes torch warn, and a sentence of ours.
WARNINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "hooks_bypassed": (
        _keep_an_output,
        "saved-tensor hooks around the region see nothing that its policy keeps; pass respect_saved_tensors_hooks=True "
        "or False",
    ),
    "no_grad_inputs": (
        lambda: torch_checkpoint.check_backward_validity(()),
        "no input of the region requires grad, so nothing gets a gradient",
    ),
    "not_explicit": (
        lambda: private.torchs_checkpoint(_nothing),
        "use_reentrant is not given; pass use_reentrant=False",
    ),
    "sequential_not_explicit": (
        lambda: private.torchs_sequential([_nothing], 1, None),
        "use_reentrant is not given; pass use_reentrant=False",
    ),
}


def _warned(kind: str) -> Warning | None:
    """Return torch's warning, else ours; None where torch says nothing about it."""
    if kind == "hooks_bypassed" and not private.hooks_see_kept:
        return None
    call, otherwise = WARNINGS[kind]
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(Exception), _unseen():
        warnings.simplefilter("always")
        call()
    said = [each.message for each in caught if isinstance(each.message, Warning)]
    return said[0] if said else UserWarning(f"gradckpt: {otherwise}")


#: What torch has said, by kind.
_known: dict[str, Warning | None] = {}


def warn_torchs(kind: str) -> None:
    """Warn of that in torch's words, where the user's code is."""
    warning = _known[kind] if kind in _known else _warned(kind)
    if not str(warning).startswith("gradckpt: "):  # torch may say it later: not under a transform of torch.func
        _known[kind] = warning
    if warning is not None:
        warn_user(str(warning), type(warning))
