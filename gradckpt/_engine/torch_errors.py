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

from gradckpt._config import warn_user
from gradckpt._engine import torch_private as private

Raises = Callable[[], Any]


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


def _raised(provoke: Raises, otherwise: str, kind: type[Exception] = RuntimeError, *, seen: bool = False) -> Exception:
    """Return what torch raises there, else an error of that kind with a sentence of ours.

    ``seen``: the modes that are active matter to it.
    """
    try:
        with contextlib.nullcontext() if seen else _unseen():
            provoke()
    except (AttributeError, NameError, NotImplementedError, TypeError):
        pass  # that place looks otherwise in this torch
    except Exception as error:
        return error.with_traceback(None)
    return kind(f"gradckpt: {otherwise}")


# ---- a recompute that differs ----


def _frame() -> Any:
    return private.CheckpointFrame(None, False, None, lambda x: x)


def _pack(frame: Callable[[], Any]) -> None:
    private.RecomputeHook(frame, 0).pack_hook(types.SimpleNamespace(requires_grad=False))


def recompute_over() -> Exception:
    return _raised(functools.partial(_pack, _nothing), "a recompute that is over saves a tensor", AssertionError)


def went_on() -> Exception:
    """Of a function that catches the exception which ends its recompute."""

    def provoke() -> None:
        frame = _frame()
        frame.early_stop = True
        _pack(weakref.ref(frame))

    return _raised(provoke, "the function of a region caught what ends its recompute; let it through", AssertionError)


def lost() -> Exception:
    otherwise = "the recompute of a region has not made a tensor that its backward needs; please report this"
    return _raised(functools.partial(private.internal_assert, False), otherwise, AssertionError)


def more_saved() -> Exception:
    def provoke() -> None:
        frame = _frame()
        frame.forward_completed = True
        _pack(weakref.ref(frame))

    return _raised(provoke, "the recompute saves more tensors than the forward", torch_checkpoint.CheckpointError)


def fewer_saved(forward: int, recompute: int) -> Exception:
    def provoke() -> None:
        frame = _frame()
        frame.weak_holders = [None] * forward
        frame.recomp_counter[0] = recompute
        frame.check_recomputed_tensors_match(0)

    otherwise = f"the forward saved {forward} tensors and the recompute {recompute}; make both runs alike"
    return _raised(provoke, otherwise, torch_checkpoint.CheckpointError)


def other_metadata(rows: list[tuple[int, Any, Any]]) -> Exception:
    """``rows``: position, and what the forward and the recompute have there."""

    def provoke() -> None:
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

    otherwise = "".join(f"tensor {i} was {saved} in the forward and is {now}; " for i, saved, now in rows)
    return _raised(provoke, f"{otherwise}make both runs alike", torch_checkpoint.CheckpointError)


class _Unpacked(dict):  # type: ignore[type-arg]
    """The handles of a tensor that each backward has unpacked already."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> None:
        return None


def unpacked_twice() -> Exception:
    def provoke() -> None:
        frame, holder = _frame(), private.CheckpointHolder()
        frame.is_recomputed = collections.defaultdict(lambda: True)
        holder.handles = _Unpacked()
        private.CheckpointHook(frame).unpack_hook(holder)

    otherwise = "a saved tensor is unpacked a second time; read ctx.saved_tensors once"
    return _raised(provoke, otherwise, torch_checkpoint.CheckpointError)


def stop_iteration(error: BaseException) -> Exception:
    """Return what leaves a generator, which torch's checkpoint is inside, in place of this."""

    once = [error]  # its traceback holds the generator, which must not hold it

    def generator() -> Iterator[None]:
        raise once.pop()
        yield

    return _raised(lambda: next(generator()), str(error))


# ---- selective contexts ----


def no_entry(op: Any, index: int, known: int, consumed: int) -> Exception:
    """Of a call of the recompute of which nothing is kept."""

    def provoke() -> None:
        key, storage = private.storage_key(op, ()), collections.defaultdict(dict)  # type: ignore[var-annotated]
        if private.consumed is None:  # a list for each operator; a policy is asked again
            storage = {key: []} if consumed else {}  # type: ignore[assignment]
        elif known:
            storage[key] = {index: private.consumed} if consumed else {}
        mode = private.CachedMode(lambda *args, **kwargs: torch_checkpoint.CheckpointPolicy.MUST_SAVE, storage, False)
        if private.consumed is not None:
            mode.func_counter[key] = index
        mode.__torch_dispatch__(op, (), (), {})

    return _raised(provoke, f"the recompute calls {op}, of which its forward has kept nothing")


def mutated() -> Exception:
    def provoke() -> None:
        kept = private.VersionWrapper(torch.empty(0))
        kept.version = -1
        kept.get_val(False)

    return _raised(provoke, "what a policy keeps was changed in place; clone it first")


def no_operator(op: Any) -> Exception:
    """Of an entry of a policy's list that is no overload of an operator."""
    return _raised(
        lambda: private.imported_contexts([op]),
        f"a policy lists operators as torch.ops.aten.mm.default, not {op!r}",
        ValueError,
    )


# ---- keywords ----


def _call_torchs(**keywords: Any) -> Raises:
    return functools.partial(private.torchs_checkpoint, _nothing, **keywords)


def for_reentrant(keywords: dict[str, Any]) -> Exception:
    """Of keywords that the reentrant form does not take."""
    otherwise = f"use_reentrant=True takes no {', '.join(keywords)}"
    return _raised(_call_torchs(use_reentrant=True, **keywords), otherwise, ValueError)


def for_sequential(keywords: dict[str, Any]) -> Exception:
    """Of keywords that ``checkpoint_sequential`` does not take."""
    call = functools.partial(private.torchs_sequential, [_nothing], 1, None, use_reentrant=False, **keywords)
    return _raised(call, f"checkpoint_sequential takes no {', '.join(keywords)}", ValueError)


def unknown_check(value: Any, checks: Any, note: str | None) -> Exception:
    otherwise = f"determinism_check is one of {list(checks)}, not {value!r}"
    error = _raised(_call_torchs(use_reentrant=False, determinism_check=value), otherwise, ValueError)
    if note is not None:
        error.add_note(note)
    return error


def debug_with_contexts() -> Exception:
    call = _call_torchs(use_reentrant=False, debug=True, context_fn=lambda: _nothing())
    return _raised(call, "debug=True and context_fn= exclude each other", ValueError)


# ---- contexts ----


def no_modes(forward: Any, recompute: Any) -> Exception:
    """Of contexts that are no dispatch modes, while a graph is traced."""
    call = _call_torchs(use_reentrant=False, context_fn=lambda: (forward, recompute))
    return _raised(call, "contexts of a region that is traced are dispatch modes", AssertionError, seen=True)


def suppressed() -> Exception:
    """Of a forward's context that has swallowed what the forward raised."""

    def fail() -> None:
        raise NameError  # not of interest where torch lets it through

    def provoke() -> None:
        contexts = contextlib.suppress(NameError), contextlib.nullcontext()
        with torch.enable_grad():
            private.torchs_checkpoint(fail, use_reentrant=False, context_fn=lambda: contexts)

    return _raised(provoke, "the forward's context swallowed an exception of the forward; let it through")


def device_began() -> Exception:
    """Of a forward that was the first to use the device."""

    def provoke() -> None:
        device = types.SimpleNamespace(_initialized=False)
        generator = private.generator_with(_get_device_module=lambda *kind: device)
        with torch.enable_grad():
            run = generator(_nothing)
            next(run)
            device._initialized = True
            next(run)

    return _raised(provoke, "a region's forward was the first to use the device; use it once before")


# ---- the reentrant form ----


def inputs_given() -> Exception:
    """Of a backward of some inputs alone, in which this is called."""
    return _raised(
        functools.partial(torch_checkpoint.CheckpointFunction.backward, None),
        "use_reentrant=True needs a backward() without inputs=; pass use_reentrant=False",
    )


def no_grad_output() -> Exception:
    def provoke() -> None:
        with torch.enable_grad():
            x = torch.zeros(1, requires_grad=True)
            private.torchs_checkpoint(torch.Tensor.detach, x, use_reentrant=True).backward(torch.zeros(1))

    return _raised(provoke, "no output of the region requires grad; call it without a checkpoint")


KINDS: dict[str, Callable[..., Exception]] = {
    function.__name__: function
    for function in (
        *(debug_with_contexts, device_began, inputs_given, lost, mutated, no_entry, no_grad_output, recompute_over),
        *(stop_iteration, unpacked_twice, went_on),
    )
}


def in_our_words() -> list[str]:
    """Return the kinds that the installed torch does not say."""
    mm = torch.ops.aten.mm.default
    tried = {
        "more_saved": more_saved(),
        "fewer_saved": fewer_saved(2, 1),
        "other_metadata": other_metadata([(0, 1, 2)]),
        "no_operator": no_operator(torch.ops.aten.mm),
        "for_reentrant": for_reentrant({"debug": True}),
        "for_sequential": for_sequential({"debug": True}),
        "unknown_check": unknown_check("?", (), None),
        **{kind: make() for kind, make in KINDS.items() if kind not in ("inputs_given", "no_entry", "stop_iteration")},
        **{f"no_entry {how}": no_entry(mm, 1, *how) for how in ((0, 0), (1, 0), (1, 1))},
        **{kind: said for kind, make in WARNINGS.items() if (said := make()) is not None},
    }
    return [kind for kind, said in tried.items() if str(said).startswith("gradckpt: ")]


def raise_torchs(kind: str, *of: Any) -> None:
    """Raise torch's error of that kind. Only C calls this."""
    raise KINDS[kind](*of)  # nothing here holds it, or it would hold itself by its traceback


# ---- warnings ----


def _warned(call: Raises, otherwise: str) -> Warning:
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(Exception), _unseen():
        warnings.simplefilter("always")
        call()
    said = [each.message for each in caught if isinstance(each.message, Warning)]
    return said[0] if said else UserWarning(f"gradckpt: {otherwise}")


def _not_explicit() -> Warning:
    return _warned(_call_torchs(), "use_reentrant is not given; pass use_reentrant=False")


def _sequential_not_explicit() -> Warning:
    call = functools.partial(private.torchs_sequential, [_nothing], 1, None)
    return _warned(call, "use_reentrant is not given; pass use_reentrant=False")


def _no_grad_inputs() -> Warning:
    call = functools.partial(torch_checkpoint.check_backward_validity, ())
    return _warned(call, "no input of the region requires grad, so nothing gets a gradient")


def _hooks_bypassed() -> Warning | None:
    """Return None where torch says nothing about it."""

    def call() -> None:
        mode = private.CachingMode(
            lambda *args, **kwargs: torch_checkpoint.CheckpointPolicy.MUST_SAVE, collections.defaultdict(dict)
        )
        mode.__torch_dispatch__(torch.ops.aten.neg.default, (), (torch.zeros(1),), {})

    text = "saved-tensor hooks around the region see nothing that its policy keeps"
    return _warned(call, f"{text}; pass respect_saved_tensors_hooks=True or False") if private.hooks_see_kept else None


WARNINGS: dict[str, Callable[[], Warning | None]] = {
    "hooks_bypassed": _hooks_bypassed,
    "no_grad_inputs": _no_grad_inputs,
    "not_explicit": _not_explicit,
    "sequential_not_explicit": _sequential_not_explicit,
}


#: What torch has said, by kind.
_known: dict[str, Warning | None] = {}


def warn_torchs(kind: str) -> None:
    """Warn of that in torch's words, where the user's code is."""
    warning = _known[kind] if kind in _known else WARNINGS[kind]()
    if not str(warning).startswith("gradckpt: "):  # torch may say it later: not under a transform of torch.func
        _known[kind] = warning
    if warning is not None:
        warn_user(str(warning), type(warning))
