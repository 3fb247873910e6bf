"""Put gradckpt in torch's place, for code that cannot be changed: :class:`patched`.

No name is rebound. torch's two functions stay the same objects; while a :class:`patched` is active,
their *bodies* (``__code__``) are exchanged for ones that call this module. All holders of the
functions therefore reach gradckpt: modules that look them up at call time, names bound earlier with
``from torch.utils.checkpoint import checkpoint``, the ``functools.partial`` in every layer of a
transformers model, wrappers of FSDP. Pickles, ``is``, dynamo and ``inspect.signature`` still see
torch's functions, and only two code objects have to be put back.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradckpt import _C, compat
from gradckpt._compile import dynamo, graph
from gradckpt._compression import Compress, CompressionConfig, explains_keywords, parse_compress
from gradckpt._engine import torch_private as private
from gradckpt._engine.arguments import check_bool, unbound
from gradckpt._engine.decorator import check_runs_at_call
from gradckpt._engine.places import place_of
from gradckpt._engine.region_callbacks import tracing_mode_active
from gradckpt._engine.selective import contexts_of
from gradckpt._models import inactivity_warning
from gradckpt._models.keywords import is_old_default
from gradckpt._offload import OffloadLike, parse_offload
from gradckpt._stats import PEAKS, Stats, highest, latest_peaks, restart_peaks, stats
from gradckpt.policies import PolicyLike

P = ParamSpec("P")
R = TypeVar("R")

#: The number of optimizer steps without a compressed tensor before the warning.
PATIENCE = 2


def _torchs_own(name: str) -> Any:
    """Return that function of torch, without torch's decorators."""
    function = inspect.unwrap(getattr(torch_checkpoint, name))
    if not private.is_of_checkpoint(function):
        found = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
        raise RuntimeError(
            f"gradckpt: torch.utils.checkpoint.{name} is {found}, not torch's own function; undo that replacement "
            "before patched()"
        )
    return function


class _Body:
    """One of torch's functions, whose body can be exchanged and put back."""

    def __init__(self, name: str, replacement: Callable[..., Any]) -> None:
        self.name = name
        self.code = replacement.__code__
        self.function: Any = None  # torch's, without torch's decorators; None before the first exchange
        self.stock: Any = None  # a copy of it, with its original body
        self.exchanged = False

    def find(self) -> tuple[Any, Any]:
        """Return torch's function and a copy of it that keeps its body."""
        function = _torchs_own(self.name)
        if function.__code__ is not self.code:
            self.function, self.stock = function, private.copied(function)
        return self.function, self.stock

    def exchange(self) -> None:
        function, stock = self.find()
        function.__signature__ = inspect.signature(stock)  # torch.compile sorts keywords by it
        self.change(on=True)
        self.exchanged = True

    def put_back(self) -> None:
        if self.exchanged:
            self.exchanged = False
            del self.function.__signature__
            self.change(on=False)

    def change(self, on: bool) -> None:
        if on or self.function.__code__ is self.code:
            self.function.__code__ = self.code if on else self.stock.__code__


class _Checkpoint(_Body):
    """torch's checkpoint, which regions that replay discrete operators also exchange."""

    def find(self) -> tuple[Any, Any]:
        _torchs_own("checkpoint")
        return super().find()

    def change(self, on: bool) -> None:
        _C.replace_checkpoint(1 if on else -1)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call torch's checkpoint with its original body."""
        if private.INNER is None:
            return self.stock(*args, **kwargs)
        options = {name: kwargs[name] for name in self.stock.__kwdefaults__ if name in kwargs}
        rest = {name: value for name, value in kwargs.items() if name not in options}
        return self.stock(args[0], args[1:], rest, **options)


def _checkpoint_body(*args, **kwargs):  # type: ignore[no-untyped-def]
    from gradckpt._patching import _checkpoint  # the globals of this code are those of torch.utils.checkpoint

    return _checkpoint(args, kwargs)


def _inner_body(function, args, kwargs, **options):  # type: ignore[no-untyped-def]
    from gradckpt._patching import _inner

    return _inner(function, args, kwargs, options)


def _sequential_body(functions, segments, input, use_reentrant=None, **kwargs):  # type: ignore[no-untyped-def]
    from gradckpt._patching import _sequential

    return _sequential(functions, segments, input, use_reentrant, kwargs)


_BODIES = CHECKPOINT, _SEQUENTIAL = (
    _Checkpoint(private.INNER, _inner_body) if private.INNER else _Checkpoint("checkpoint", _checkpoint_body),
    _Body("checkpoint_sequential", _sequential_body),
)
_lock = threading.RLock()  # held while handles come and go, never by a call of checkpoint
_active: list[patched] = []  # the innermost last


def _checkpoint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handles = _active[-1:]  # a copy: another thread may empty the list
    if not handles:
        return _torchs(args, kwargs)
    return handles[0]._call(args, kwargs)


def _inner(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
    """Call with the function's keywords apart from those of torch, whose names they may have."""
    defaults = CHECKPOINT.stock.__kwdefaults__  # torch passes all options, also those that the caller left out
    its_own = kwargs.keys() & {"function", *options}
    if its_own:
        if options["use_reentrant"] is None or options["use_reentrant"]:
            return CHECKPOINT.stock(function, args, kwargs, **options)  # torch refuses them
        function = functools.partial(function, **{key: kwargs.pop(key) for key in its_own})
    given = {name: value for name, value in options.items() if value is not defaults[name]}
    return _checkpoint((function, *args), {**kwargs, **given})


def _torchs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call torch's checkpoint, or ours inside a region that replays discrete operators.

    Ours then replays them, too.
    """
    if _C.replays_discrete() and not _is_tracing():
        return compat.checkpoint(*args, **kwargs)
    return CHECKPOINT.call(args, kwargs)


def _sequential(functions: Any, segments: Any, input: Any, use_reentrant: Any, kwargs: dict[str, Any]) -> Any:
    if use_reentrant is None and any(handle._acts for handle in _active[-1:]):
        use_reentrant = False
    return _SEQUENTIAL.stock(functions, segments, input, use_reentrant, **kwargs)


@explains_keywords
class patched:
    """Replace torch's ``checkpoint`` and ``checkpoint_sequential`` in the whole process while
    active.

    ``with gradckpt.patched("int8"): train()``, ``@gradckpt.patched("int8")`` above a function, or
    ``handle = gradckpt.patched("int8").start()`` and later ``handle.remove()``. Every caller of
    torch's functions is served, however and whenever the function was imported: timm, diffusers,
    transformers with or without its Trainer, ``torch.distributed``'s checkpoint wrappers.
    Afterwards torch is unchanged; regions whose backward is still to come keep their payloads.

    ``use_reentrant=False`` and, if ``compress`` or ``policy`` is given, ``None`` use gradckpt.
    ``use_reentrant=True`` uses torch's own function, which cannot compress; such calls are counted.
    Regions that ``torch.compile`` traces keep payloads in its graphs. Running statistics are
    updated as in torch (``buffers="torch"``).

    Blocks nest: the innermost counts, in every thread; they may end in any order. :meth:`start`
    does not: it ends what an earlier ``start()`` began, so that a notebook's cell may run again.
    Forked children inherit it, spawned ones do not (``gradckpt run`` covers both).

    Args:
        compress: As ``compress=`` of :func:`gradckpt.checkpoint`; ``None`` gives torch's results,
            bit for bit.
        policy: As ``policy=`` of :func:`gradckpt.enable`; a region's own ``context_fn`` or
            ``debug=True`` wins.
        fake_quantize: Let the forward run on the restored values; see
            :class:`gradckpt.CompressionConfig`.
        offload: As ``offload=`` of :func:`gradckpt.checkpoint`.

    Raises:
        ValueError: The codec, policy or place is unknown.
        TypeError: An argument has another type, or the decorated object is a class, generator or
            coroutine function.
        RuntimeError: It is already active, or another library has replaced torch's function.
    """

    def __init__(
        self,
        compress: Compress = "int8",
        *,
        policy: PolicyLike = None,
        fake_quantize: bool = False,
        offload: OffloadLike = None,
    ) -> None:
        config = parse_compress(compress)
        if check_bool("fake_quantize", fake_quantize) and config is not None:
            config = dataclasses.replace(config, fake_quantize=True)
        self.config: CompressionConfig | None = config
        self._policy = policy
        self._context_fn = contexts_of(policy)
        self.offload = parse_offload(offload)
        self._place = place_of(self.offload)
        self._acts = config is not None or self._context_fn is not None or self._place is not None
        self._forget()

    def _forget(self) -> None:
        # These are plain additions: the GIL keeps other threads out of each.
        self._calls = self._reentrant = self._traced = self._regions = self._steps = 0
        self._trained = False
        self._peaks = (0,) * len(PEAKS)  # as far as a later patch's restart_peaks() has ended them
        self._before: Stats = stats()
        self._after: Stats | None = None
        self._said = False
        self._started = False  # by start(), not as a block
        self._step_hook: Any = None

    # ---- coming and going ----

    @property
    def active(self) -> bool:
        """True between :meth:`start` and :meth:`remove`."""
        return any(handle is self for handle in _active)

    def start(self) -> patched:
        """Begin, in place of an earlier ``start()``, with the counters of :meth:`stats` at zero.

        Return itself.
        """
        with _lock:
            earlier = [handle for handle in _active if handle._started]
            self._begin()
            self._started = True
            for handle in earlier:
                handle.remove()
        return self

    def _begin(self) -> None:
        with _lock:
            if self.active:
                raise RuntimeError("gradckpt: this patched() is active already; for a block inside, make another one")
            self._forget()
            self._before = stats()
            peaks = restart_peaks()
            for handle in _active:
                handle._peaks = highest(handle._peaks, peaks)
            try:
                _active.append(self)
                if self._acts:
                    self._step_hook = register_optimizer_step_post_hook(self._stepped)
                if len(_active) == 1:
                    for body in _BODIES:
                        body.exchange()
                _tell_dynamo()
            except BaseException:
                self.remove()
                raise

    def remove(self) -> None:
        """End the patch, also if others began since. Before :meth:`start` or a second time, do
        nothing.
        """
        with _lock:
            if not self.active:
                return
            self._after = stats()
            self._peaks = highest(self._peaks, latest_peaks(_C.stats()))
            if self._step_hook is not None:
                self._step_hook.remove()
                self._step_hook = None
            _active[:] = [handle for handle in _active if handle is not self]
            if not _active:
                for body in _BODIES:
                    body.put_back()
            _tell_dynamo()

    def __enter__(self) -> patched:
        self._begin()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        ends = self.active
        self.remove()
        if ends and kind is None and (self._trained or self._steps):
            self._say()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        check_runs_at_call(function, "patched()", "`with gradckpt.patched(...)` where it is called to the end")

        @functools.wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            with patched(self.config, policy=self._policy, offload=self.offload):
                return function(*args, **kwargs)

        return within

    def __repr__(self) -> str:
        codec = self.config.codec if self.config else None
        return f"<gradckpt.patched({codec!r}): {'active' if self.active else 'not active'}>"

    # ---- a call ----

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad = torch.is_grad_enabled()
        self._trained |= grad
        if graph.is_compiling():  # counted with its graph, also when that comes from a cache
            return CHECKPOINT.call(args, kwargs)
        if "function" in kwargs and not args:
            kwargs = dict(kwargs)
            args = (kwargs.pop("function"),)
        if not args:  # torch says that a function is missing
            return _torchs(args, kwargs)
        self._calls += 1
        if _is_tracing():
            self._traced += 1
            return CHECKPOINT.call(args, kwargs)
        reentrant = kwargs.get("use_reentrant")
        in_model = _is_transformers(args[0])
        if reentrant is None or (in_model and is_old_default(kwargs)):
            reentrant = not self._acts
        if reentrant:
            self._reentrant += 1
            return _torchs(args, kwargs)
        self._regions += grad
        if not self._acts:
            return compat.checkpoint(*args, **kwargs)
        return self._compressed(args[0], args[1:], {**kwargs, "use_reentrant": False}, in_model)

    def _compressed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], in_model: bool) -> Any:
        function = dynamo.bind_not_torchs(function, kwargs)
        debug = getattr(torch_checkpoint, "_checkpoint_debug_enabled", None)
        if (
            self._context_fn is not None
            and kwargs.get("context_fn") in (None, torch_checkpoint.noop_context_fn)
            and not (kwargs.get("debug", False) if debug is None else debug)
        ):
            kwargs["context_fn"] = self._context_fn
        if in_model:
            function, tensors = unbound(function)
            kwargs |= tensors
        return _C.checkpoint(function, *args, compress=self.config, offload=self._place, buffers="torch", **kwargs)

    # ---- the report ----

    def stats(self) -> Stats:
        """Return the counters between :meth:`start` and now, or :meth:`remove`, in this process.

        ``print`` shows them to people, as those of :func:`gradckpt.stats`.

        Returns:
            ``calls`` of torch's function; of these, ``reentrant`` ones were left to torch
            (``use_reentrant=True``), and ``traced`` ones were seen while a graph was made
            (``torch.compile``), once for many runs. The others are those of :func:`gradckpt.stats`:
            they also count other uses of gradckpt at the same time, and restart with
            ``gradckpt.stats.reset()``. ``peak_live_bytes`` is the peak between the two, with
            payloads of before that were still alive.
        """
        now = stats() if self._after is None else self._after
        found = now.since(self._before)
        if found is not now:  # else gradckpt.stats.reset() began the peak, too
            latest = () if self._after is not None else (latest_peaks(_C.stats()),)
            found |= dict(zip(PEAKS, highest(self._peaks, *latest), strict=True))
        compiled = found["compiled_regions"]
        found.update(calls=self._calls + compiled, reentrant=self._reentrant, traced=self._traced + compiled)
        return found

    @property
    def inactive_reason(self) -> str | None:
        """The reason why nothing was compressed so far, or no region got the policy.

        ``None`` if something was, or if nothing was requested.
        """
        s = self.stats()
        if not self._acts or s["compressed"] or s["compiled_tensors"]:
            return None
        if self.config is None and (self._regions or s["traced"] or s["regions"]):
            return None  # the backward checks whether the policy keeps anything
        if not s["calls"] and stats()["compiled_regions"]:
            return None  # a graph of an earlier block may be running, so this is unknown
        if s["regions"] < self._regions:
            return None  # gradckpt.stats.reset() was called meanwhile, so this is unknown
        holder = getattr(torch_checkpoint, "checkpoint", None)
        if self.active and not private.is_of_checkpoint(holder):
            return f"torch.utils.checkpoint.checkpoint was replaced by {holder!r}; undo that"
        if not s["calls"] and s["regions_eligible"]:
            return inactivity_warning.inactive_reason(s)
        if not s["calls"] and s["regions"]:
            return (
                "the regions called gradckpt.checkpoint without compression, which a patch leaves alone; there, pass "
                'compress="int8"'
            )
        if not s["calls"]:
            return (
                "nothing in this process called torch.utils.checkpoint.checkpoint; turn checkpointing on, by "
                "activation_checkpointing=True or the script's flag, and call model.train()"
            )
        if s["reentrant"] == s["calls"]:
            return (
                f"all {s['calls']} calls of checkpoint passed use_reentrant=True, which gradckpt leaves to torch; pass "
                "use_reentrant=False (transformers: in activation_checkpointing_kwargs)"
            )
        if not s["regions"] and s["traced"]:
            return (
                "every region was compiled, and its inputs are leaves or small, or torch.compile's backend has no "
                "AOTAutograd"
            )
        if not s["regions"]:
            return f"all {s['calls']} calls of checkpoint were made without grad"
        return inactivity_warning.inactive_reason(s)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count an optimizer step, of any optimizer.

        The hook stays registered: torch is iterating over the list that holds it.
        """
        if self._steps >= PATIENCE or torch.compiler.is_compiling():
            return
        self._steps += 1
        if self._steps == PATIENCE and _active[-1:] == [self]:
            self._say()

    def _say(self) -> None:
        """Warn once, unless the engine has already warned."""
        reason = self.inactive_reason
        if reason is None or self._said or inactivity_warning.has_said():
            return
        self._said = True
        what = f"patched({self.config.codec!r}) compressed nothing" if self.config else "the policy did nothing"
        inactivity_warning.say(f"{what}: {reason}", mend=not inactivity_warning.are_small(self.stats()))


def _tell_dynamo() -> None:
    """Tell torch.compile the settings of the innermost patch."""
    acting = (dynamo.Replacement(h.config, h._context_fn, h._place) for h in _active[-1:] if h._acts)
    dynamo.replace_checkpoint(next(acting, None))


def _is_tracing() -> bool:
    """Return whether the region is being recorded (torch.compile, AOTAutograd, export), or its
    tensors have no values.
    """
    return torch.compiler.is_compiling() or tracing_mode_active()


def _is_transformers(function: Any) -> bool:
    """Return whether the region is a layer of a transformers model, called by transformers."""
    if "transformers" not in sys.modules:
        return False
    first: Any = None
    while isinstance(function, functools.partial):
        first = function.args[0] if function.args else first  # forward, self
        function = function.func
    owner = getattr(function, "__self__", first)
    if not isinstance(owner, torch.nn.Module):
        return False
    library = type(owner).__module__.split(".")[0]
    return library in ("transformers", "transformers_modules") or "_gradient_checkpointing_func" in vars(owner)
