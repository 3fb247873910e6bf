"""Rare paths of selective recompute, in Python: policies, names, and torch's own contexts.

Only C calls them (csrc/engine); nothing here is public.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from gradckpt import _C, policies
from gradckpt._compression import warn_inactive
from gradckpt._engine import kept_calls, selective
from gradckpt._engine import torch_private as private
from gradckpt._engine.arguments import without_partials
from gradckpt._engine.catching import catch
from gradckpt._engine.op_mixing import has_effect
from gradckpt._engine.op_policy import keeping_effects, kept, read_policy
from gradckpt._engine.torch_objects import barred_by
from gradckpt._engine.trial_calls import is_capturing, leaves_behind
from gradckpt._patching import CHECKPOINT

# ---- policies ----

_RECOMPUTE = (torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE, torch_checkpoint.CheckpointPolicy.MUST_RECOMPUTE)


def ask(mode: Any, op: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Return a policy function's answer for an operator:

    False to recompute, else how its outputs are compressed.
    """
    context = torch_checkpoint.SelectiveCheckpointContext(is_recompute=False)
    context.op_output = out  # torch before 2.12 takes no keyword for it
    answer = mode.policy_fn(context, op, *args, **(kwargs or {}))
    plain = answer is False or answer is _RECOMPUTE[0] or answer is _RECOMPUTE[1]
    keep, config, offload = (0, None, None) if plain else read_policy(answer, op)
    if keep or (answer is not _RECOMPUTE[1] and has_effect(op)):
        return kept(config, offload)
    return False


def selective_policy(policy: Any) -> tuple[Any, Any]:
    """Return the names to catch, and the function to ask or None."""
    known = policies.as_policy(policy)
    selective.latest = policy if known is None else known
    if known is None:
        return selective.NO_NAMES, policy
    known = keeping_effects(known)
    if known.catchable:
        catch(known)
        return known.names, None
    return selective.NO_NAMES, selective.asker(known)


def with_tensors(op: Any, args: Any) -> Any:
    """Return an operator's arguments with tensors for the numbers where its schema has tensors.

    None: there are none. The numbers decide no dtype, as where torch's kernels pass them.
    """
    if isinstance(op, private.HigherOrderOperator):
        return None
    given = [x for x in args if isinstance(x, torch.Tensor)]
    sized = any(x.dim() for x in given)
    changed = list(args)
    for i, (x, argument) in enumerate(zip(args, op._schema.arguments, strict=False)):
        if isinstance(x, bool | int | float | complex) and str(argument.type) in ("Tensor", "Optional[Tensor]"):
            changed[i] = torch.tensor(x, dtype=None if sized or not given else torch.result_type(given[0], x))
    return None if all(map(operator.is_, changed, args)) else tuple(changed)


def call_negated(call: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator as torch's fallback for pending negations would.

    Our kernel replaces that fallback.
    """
    args, kwargs = private.tree_map_only(torch.Tensor, torch.Tensor.resolve_neg, (args, kwargs or {}))
    return call(*args, **kwargs)


class _KeyAgain(private.TorchDispatchMode):  # type: ignore[misc]
    """A mode below all others that turns the key on again, on which the surrounding region catches.

    The key is off within modes.
    """

    supports_higher_order_operators = True

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = self.key
        excluded = private.is_excluded(key)
        private.set_included(key, True)
        private.set_excluded(key, False)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            private.set_excluded(key, excluded)
            private.set_included(key, False)


def through_modes(key: Any, call: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that the key caught through the modes entered inside the region.

    Then the key catches it.
    """
    modes = [_KeyAgain(key), *private.dispatch_modes()]  # torch 2.10 frees one that it alone holds
    private.set_included(key, False)
    try:
        with private.without_modes(), contextlib.ExitStack() as stack:
            for mode in modes:
                stack.callback(private.pop_dispatch_mode, None)
                private.push_dispatch_mode(mode)
            return call(*args, **(kwargs or {}))
    finally:
        private.set_included(key, True)


# ---- names ----


class Candidate:
    """An output that may get a name.

    ``refs`` finds it again when a tensor of the same memory gets one. A single tensor is not kept
    alive; ``what`` is its layout, or a copy.
    """

    __slots__ = ("call", "line", "refs", "version", "what")

    def __init__(self, out: Any, line: int, call: int) -> None:
        tensors = [out] if isinstance(out, torch.Tensor) else out
        tensors = [x for x in tensors if isinstance(x, torch.Tensor) and (x is out or x.is_floating_point())]
        self.refs = [private.StorageWeakRef(x.untyped_storage()) for x in tensors]
        self.line, self.call = line, call
        self.what, self.version = out, 0
        if isinstance(out, torch.Tensor):
            self.what = (out.size(), out.stride(), out.storage_offset(), out.dtype)
            self.version = 0 if out.is_inference() else out._version

    def lies_in(self, x: torch.Tensor) -> bool:
        cdata = x.untyped_storage()._cdata
        return any(ref.cdata == cdata and not ref.expired() for ref in self.refs)

    def output(self, x: torch.Tensor) -> Any:
        """Return the output in whose memory x lies; None if x cannot show it, or it was changed."""
        if not isinstance(self.what, tuple) or not isinstance(self.what[-1], torch.dtype):
            return self.what
        size, stride, offset, dtype = self.what
        if dtype != x.dtype or (not x.is_inference() and x._version != self.version):
            return None
        with torch.no_grad():
            return x.detach().as_strided(size, stride, offset)


def find_candidate(candidates: list[Candidate] | None, x: Any, name: str) -> tuple[Any, int, int]:
    """Return (output, line, call) of the last operator that wrote the memory of x.

    The output is None if it was written into since.
    """
    if isinstance(x, torch.Tensor):
        for each in reversed(candidates or []):
            if each.lies_in(x):
                return each.output(x), each.line, each.call
    raise ValueError(
        f"gradckpt: name(x, {name!r}) got an x that no matrix product, convolution or fused attention of this region "
        "returned; name such an output or its view"
    )


def copy_candidates(candidates: list[Candidate], x: torch.Tensor) -> None:
    """Copy outputs that may get a name before x is written into."""
    for each in candidates:
        if each.lies_in(x):
            out = each.output(x)
            each.what = private.tree_map_only(torch.Tensor, torch.clone, out)


def warn_unnamed(wanted: frozenset[str]) -> None:
    if not wanted & kept_calls.met:  # calls in graphs are not counted
        _warn_once_unnamed(wanted)


@functools.lru_cache(maxsize=256)
def _warn_once_unnamed(wanted: frozenset[str]) -> None:
    listed = ", ".join(repr(name) for name in sorted(wanted))
    warn_inactive(
        f"save_named({listed}) kept nothing; call gradckpt.policies.name(x, ...) with such a name in the region"
    )


# ---- the function form ----

_TENSOR = object()


def tensors_of(out: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Return the tensors in a region's result, and the rest of it for :func:`together`."""
    leaves, spec = private.tree_flatten(out)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return tensors, ([_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


def together(rest: Any, tensors: Any) -> Any:
    leaves, spec = rest
    each = iter(tensors)
    return private.tree_unflatten([next(each) if leaf is _TENSOR else leaf for leaf in leaves], spec)


barred = functools.partial(
    barred_by,
    "gradckpt: SelectiveRecompute has no gradient of its gradient (create_graph=True); use gradckpt.checkpoint "
    "with policy=",
)


#: id(module) -> weak reference to it, and the methods already checked. A module need not be
#: hashable; torch's WeakIdKeyDictionary takes 2 us for each call of SelectiveRecompute, this 0.4.
_checked: dict[int, tuple[weakref.ref[Any], set[str]]] = {}


def _owns(owner: Any, variable: torch.Tensor) -> bool:
    """Return whether the variable is a parameter of the module, one that required no grad in the
    forward.
    """
    modules = {id(owner): owner}
    pending = [owner]
    while pending:
        module = pending.pop()
        if any(variable is parameter for parameter in module._parameters.values()):
            return True
        children = [child for child in module._modules.values() if child is not None and id(child) not in modules]
        modules.update((id(child), child) for child in children)
        pending += children
    return False


def check_leaves(function: Any, roots: tuple[torch.Tensor, ...], targets: list[torch.Tensor]) -> None:
    """Check, once for each module and method, that gradients flow to the targets only."""
    function = without_partials(function)
    owner, method = getattr(function, "__self__", function), getattr(function, "__name__", "")
    key = id(owner)
    known_owner, checked = _checked.get(key, (None, set()))
    if known_owner is None or known_owner() is not owner:
        checked = set()
        _checked[key] = weakref.ref(owner, lambda _: _checked.pop(key, None)), checked
    if method in checked:
        return
    known = {id(x) for x in targets}
    for variable in leaves_behind(roots):
        if id(variable) not in known and not _owns(owner, variable):
            raise RuntimeError(
                f"gradckpt: SelectiveRecompute would lose the gradient of a tensor that {type(owner).__name__} uses, "
                f"of shape {tuple(variable.shape)}; make it a parameter or an argument, or use gradckpt.checkpoint"
            )
    checked.add(method)


# ---- contexts ----


def selective_mode(store: Any, policy_fn: Any, replay: int) -> Any:
    if replay:
        return selective.RecomputeContext(store, False, False)
    return selective.ForwardContext(policy_fn, store, False)


def torchs_checkpoint() -> tuple[Any, ...]:
    """Return torch's checkpoint as called, its function, its code, and the code that replaces it.

    The tuple is empty where other software has replaced torch's checkpoint.
    """

    try:
        function, stock = CHECKPOINT.find()
    except RuntimeError:
        return ()
    return torch_checkpoint.checkpoint, function, stock.__code__, CHECKPOINT.code


def discrete_rules(casts: int) -> Any:
    policy = policies.discrete if casts else policies.discrete_but_casts
    catch(policy)
    return policy.names


def without_modes() -> contextlib.ExitStack:
    """Take all dispatch modes off until the returned stack is closed."""
    stack = contextlib.ExitStack()
    stack.enter_context(private.without_modes())
    return stack


def generator_of(args: Any, kwargs: Any) -> torch.Generator | None:
    """Return the generator that an operator draws from: the one it is given, or its device's.

    It returns None where nothing is drawn, or where a graph is captured, which advances its
    generators when it is replayed.
    """
    leaves = private.tree_leaves((args, kwargs))
    passed = next((x for x in leaves if isinstance(x, torch.Generator)), None)
    if passed is not None:
        return passed
    devices = [x.device for x in leaves if isinstance(x, torch.Tensor)]
    devices += [torch.device(x) for x in (kwargs or {}).values() if isinstance(x, torch.device)]
    device = next((d for d in devices if d.type != "cpu"), devices[0] if devices else torch.get_default_device())
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type, None)
    if is_capturing(module):
        return None
    generators = getattr(module, "default_generators", ())
    index = module.current_device() if module is not None and device.index is None else device.index
    return generators[index] if generators else None


def record_traced(context: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator while tracing, where a policy has to mark the operators of the graph.

    torch then keeps every output and marks the nodes by the policy. NotImplemented means that
    nothing is being traced.
    """
    if context.policy_fn is None or not private.is_tracing_checkpoint():
        return NotImplemented
    mode = private.CachingMode
    return mode.__torch_dispatch__(context, func, types, args, kwargs or {})


def raise_ambiguous(op: Any, forward: int, recompute: int) -> None:
    raise torch_checkpoint.CheckpointError(
        f"gradckpt: the forward called {op} alike {forward} x and the recompute {recompute} x, with other results; "
        "let both call it as often, in one order"
    )


def are_alike(a: Any, b: Any) -> bool:
    """Return whether two calls would hand out the same, to the last bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(are_alike, a, b))
    if hasattr(a, "val"):  # an OpOutput
        return a.form is b.form and are_alike(a.val, b.val)
    if isinstance(a, _C.Payload):
        return are_alike(a.decode(), b.decode())
    if isinstance(a, torch.Tensor):
        return _equal(a, b)
    return a is b or (isinstance(a, (bool, int, float, complex, str)) and a == b)


def _has_values(x: torch.Tensor) -> bool:
    """Return False for a meta tensor, and for one whose memory FSDP or an offload has freed."""
    if x.layout is not torch.strided or x.numel() == 0:
        return True
    reach = x.storage_offset() + 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return not x.is_meta and x.untyped_storage().nbytes() >= reach * x.element_size()


def may_change_places(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether one constant, parameter or buffer may stand for the other: equal, or freed."""
    if a.shape != b.shape or not (_has_values(a) and _has_values(b)):
        return True
    return _equal(a.detach(), b.detach())


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    layout = [(x.dtype, x.device, x.shape, x.layout) for x in (a, b)]
    if layout[0] != layout[1] or type(a) is not torch.Tensor or a.layout is not torch.strided:
        return False
    with torch.no_grad():
        one, other = (x.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for x in (a, b))
        return torch.equal(one, other)


def traced_value(entry: Any, allow_mutation: int) -> Any:
    """Return what torch's mode has kept of a call."""
    return private.tree_map(lambda x: x.get_val(bool(allow_mutation)), entry)
