"""Simulate a training step: every operator, no values.

A simulated tensor is a plain CPU tensor whose storage has an address and a size, and no memory. To
autograd, to models and to gradckpt's engine it is an ordinary tensor, so what they save, share and
accumulate in place is what they save in a real step. :class:`SimulationMode` gives each operator
outputs of the shapes that its meta kernel returns, and records when each storage is allocated and
freed.

Small tensors whose operands all have values (token ids, masks, positions) are computed, so that a
model may ask them questions.

Numbers among the operands of operators, which kernels make tensors of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from typing import Any

import torch

from gradckpt import _C
from gradckpt._engine import torch_private as private
from gradckpt._engine.region_callbacks import tracing_mode_active
from gradckpt._planning.kernels import cuda_scratch_of, gloo_bytes, scratch_of
from gradckpt._planning.simulated_tensors import (
    Again,
    NotSimulated,
    accumulates_in_place,
    bounds,
    composite_key,
    fills_in_place,
    has_rules,
    in_backward,
    map_tensors,
    meta_results,
    shared_space,
    take,
    tensors_in,
    uses_of_one,
)

aten = torch.ops.aten
_Storage: Any = torch.UntypedStorage

#: Tensors up to these sizes in bytes are computed where all operands have values.
_SMALL = {True: 2**16, False: 2**26}  # floating point, others

#: Operators that routers choose experts by: their last result is indices into the operand's last
#: dimension.
_CHOICES = {aten.topk.default, aten.argmax.default, aten.sort.default, aten.sort.stable}

_ZEROS = {aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default}

#: Their kernels return the operand's memory, although their schemas do not say so.
_ALIASING = {aten._unsafe_view.default, aten.lift_fresh.default, aten.detach_.default}


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One allocation (``size`` > 0) or release. ``storage`` numbers the storage, from 0."""

    size: int
    storage: int


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one operator does: floating point operations, and bytes read and written."""

    flop: int
    bytes: int


class SimulationMode(private.TorchDispatchMode):  # type: ignore[misc]
    """A dispatch mode under which nothing is computed.

    ``events``: allocations and releases since the mode was made. ``work``: the operators, each with
    the number of events before it. ``operator``: the running one. ``data_dependent``: the size of
    a result depended on values.

    ``device_is_cpu``: count what the CPU's kernels allocate; else keep payloads as a device
    does: shared when it has answered, and codecs that may overflow hold originals until then.
    ``concentrated``: routers choose by values that do not exist; ``False`` lets them choose all
    experts equally often, ``True`` the first ones for nearly every token, which needs most memory.
    ``rest``: the others' choices, as a part of those of the first.
    """

    supports_higher_order_operators = True

    def __init__(self, concentrated: bool = False, *, device_is_cpu: bool = True) -> None:
        super().__init__()
        self.device_is_cpu = device_is_cpu
        self._concentrated = concentrated
        self.data_dependent = False
        self.rest = 0.0
        self._space = shared_space()
        self._without_values: set[int] = set()  # storages without values, by their addresses in C++
        self._live: dict[int, tuple[int, Any]] = {}  # number and weak reference of every recorded storage
        self._emptied: set[int] = set()  # storages that were resized to nothing
        self._count = 0
        self.events: list[Event] = []
        self.work: list[tuple[int, Work]] = []
        self.operator = ""
        self._factors: list[Event] = []  # numbers that autograd keeps
        self._zeros: int | None = None  # the storage that the last operator made, of zeros
        self.wrote: set[int] = set()  # storages that the step writes and has not made

    # ---- storages ----

    def empty(self, size: Any, stride: Any, dtype: torch.dtype, *, record: bool = True) -> torch.Tensor:
        """Return a simulated tensor; ``record=False``: it was there before the step."""
        numel = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty_strided(size, stride, dtype=dtype)
        storage = take(self._space, nbytes)
        self._without_values.add(storage._cdata)
        self._follow(storage, record=record)
        return torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)

    def like(self, x: torch.Tensor, *, record: bool = False) -> torch.Tensor:
        """Return a simulated tensor of the shape, strides and dtype of ``x``."""
        return self.empty(x.size(), x.stride(), x.dtype, record=record)

    def emptied(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same, with a storage that was resized to nothing before the step."""
        new = self.like(x)
        self._emptied.add(new.untyped_storage()._cdata)
        return new

    def _follow(self, storage: Any, *, record: bool = True) -> None:
        key = storage._cdata
        if key in self._live:
            return
        number, nbytes, mode = self._count, storage.nbytes(), weakref.ref(self)
        self._count += 1

        def freed(_: Any) -> None:
            if (self := mode()) is not None and self._live.pop(key, None) is not None:
                self._without_values.discard(key)
                if key in self._emptied:
                    self._emptied.discard(key)
                else:
                    self.events.append(Event(-nbytes, number))

        self._live[key] = number, weakref.ref(storage, freed)
        if record:
            self.events.append(Event(nbytes, number))

    def __enter__(self) -> Any:
        uses_of_one()  # while no backward runs
        _C.set_simulated(*bounds(self._space), not self.device_is_cpu)
        self._get_rng_state = torch.get_rng_state
        torch.get_rng_state = lambda: self._get_rng_state().clone()  # which this mode sees
        _Storage.resize_ = lambda storage, size: self._resize(storage, size)
        _Storage.nbytes = lambda storage: self._nbytes(storage)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.get_rng_state = self._get_rng_state
        del _Storage.resize_, _Storage.nbytes  # those of its base are back
        _C.set_simulated(0, 0, False)

    def _nbytes(self, storage: Any) -> int:
        return 0 if storage._cdata in self._emptied else int(private.StorageBase.nbytes(storage))

    def _resize(self, storage: Any, size: int) -> Any:
        """Note that a storage is emptied or filled again, as FSDP does with gathered weights."""
        key = storage._cdata
        whole = private.StorageBase.nbytes(storage)
        if key not in self._live:
            return private.StorageBase.resize_(storage, size)
        if size not in (0, whole):
            raise NotSimulated("a storage gets another size")
        if (key in self._emptied) != (size == 0):
            self.events.append(Event(size or -whole, self._live[key][0]))
            (self._emptied.discard if size else self._emptied.add)(key)
        return storage

    def number_of(self, x: torch.Tensor) -> int | None:
        """Return the number of the tensor's storage, None if this mode did not make it."""
        found = self._live.get(x.untyped_storage()._cdata)
        return found[0] if found is not None else None

    def has_values(self, x: torch.Tensor) -> bool:
        return x.untyped_storage()._cdata not in self._without_values

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if tracing_mode_active():  # below this mode, inside the step: a higher order operator traces its gradient
            return func(*args, **kwargs)
        if isinstance(func, private.HigherOrderOperator):
            return self._parts_of(func, args, kwargs)
        if any(map(has_rules, types)):  # C++ asks such tensors for their shapes, and survives no exception
            return NotImplemented
        if numbers := wrapped_numbers(func, args):
            args = tuple(numbers.get(i, x) for i, x in enumerate(args))
        if self.device_is_cpu and (numbers or func in WRAP or self._takes_factor(func, args)):
            return self._with_numbers(func, args, kwargs, list(numbers.values()) or [torch.as_tensor(args[1])])
        return self._run(func, args, kwargs)

    def _parts_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operators of a higher order operator's kernel one by one, as where nothing is
        compiled.
        """
        if any(isinstance(x, torch.Tensor) and has_rules(type(x)) for x in private.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with Again(self):
            return func.dispatch(private.DispatchKey.CPU, *args, **kwargs)

    def _takes_factor(self, func: Any, args: Any) -> bool:
        """Return whether a backward multiplies by a number that a region has kept, as a tensor."""
        if func not in KEEP_FACTORS or args[1].dim():
            return False
        return in_backward() and args[1].untyped_storage()._cdata not in self._live

    def _with_numbers(self, func: Any, args: Any, kwargs: Any, numbers: list[torch.Tensor]) -> Any:
        """Run an operator whose kernel makes tensors of numbers, and casts them. Autograd may keep
        a factor until the backward has multiplied by it.
        """
        with_grad = torch.is_grad_enabled()
        backward = in_backward()
        types = [torch.float64 if x.is_floating_point() else x.dtype for x in numbers]
        operand = next(tensors_in(args))
        kept = backward and func not in WRAP
        made = Event(0 if kept else sum(dtype.itemsize for dtype in types), self._count)
        cast = sum(operand.itemsize for dtype in types if dtype != operand.dtype)
        self._count += 1
        self.events += [made, Event(cast, -1)]
        result = self._run(func, args, kwargs)
        self.events.append(Event(-cast, -1))
        if func in KEEP_FACTORS and with_grad and operand.requires_grad and not in_exact_region():
            self._factors.append(made)
            return result
        if func in KEEP_FACTORS and backward and self._factors:
            made = self._factors.pop()
        self.events.append(Event(-made.size, made.storage))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.operator = func.name()
        outputs = self._run_one(func, args, kwargs)
        self._zeros = self.number_of(outputs) if func in _ZEROS else None
        return outputs

    def _run_one(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            return self._communicated(func, args)
        if (key := composite_key(func)) is not None:
            try:
                with Again(self):
                    return func._op_dk(key, *args, **kwargs)
            except NotSimulated:  # its parts need values, its shape does not
                self.operator = func.name()
        elif func.is_view or func in _ALIASING:
            return func(*args, **kwargs)
        known = all(map(self.has_values, tensors_in((args, kwargs))))
        if func is aten._local_scalar_dense.default and known:
            return func(*args, **kwargs)
        if func._schema.is_mutable and known and self._made_here(func, args, kwargs):
            return self._followed(func(*args, **kwargs))
        filled = self._zeros is not None and fills_in_place(func) and self.number_of(args[0]) == self._zeros
        if not known and (filled or accumulates_in_place(func, args)):
            self._without_values.add(args[0].untyped_storage()._cdata)
            self._count_work(func, args, kwargs, args[0])
            return args[0]
        if func is aten.mkldnn_rnn_layer.default and self.device_is_cpu:
            raise NotSimulated(f"{func.name()}: the size of what it keeps is unknown")
        kwargs = _on_cpu(kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and _given(func, args, kwargs, "dropout_p") != 0:
            torch.rand(())  # so that each region has a state of its own to keep
        try:
            outputs = meta_results(func, args, kwargs)
        except Exception as error:
            outputs = self._without_meta(func, args, kwargs, known, error)
        else:
            outputs = self._results(func, outputs, args, kwargs, known)
        self._count_work(func, args, kwargs, outputs)
        return outputs

    def _communicated(self, func: Any, args: Any) -> Any:
        """Answer a collective, which moves nothing: its tensors have no values afterwards."""
        self._without_values.update(x.untyped_storage()._cdata for x in tensors_in(args))
        if self.device_is_cpu and (size := gloo_bytes(func, args)):
            self.events += [Event(size, -1), Event(-size, -1)]
        work = private.boxed_work(private.FakeWork())
        count = len(func._schema.returns)
        return (args[0], work) if count == 2 else work if count else None

    def _choose(self, outputs: Any, choices: int) -> Any:
        """Give indices values: 0, 1, ... in turn; or the same ones in all rows, except that each of
        the others, whose part of the backward comes first, is chosen once in place of the first.
        """
        found = outputs if isinstance(outputs, torch.Tensor) else outputs[-1]
        if not _is_small(found):
            return map_tensors(self._like_meta, outputs)
        count = torch.arange(found.numel())
        if self._concentrated:
            chosen = found.shape[-1] if found is not outputs and found.dim() else 1
            others = min(choices - chosen, found.numel() // (2 * chosen))
            count %= chosen
            count[: others * chosen : chosen] = chosen + torch.arange(others)
            self.rest = max(self.rest, others / max(found.numel() - others, 1))
        indices = self._followed((count % choices).reshape(found.shape))
        return indices if found is outputs else (*map_tensors(self._like_meta, outputs[:-1]), indices)

    def _made_here(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an in-place operator writes only small tensors that the step made."""
        return all(
            x.numel() == 0 or (x.untyped_storage()._cdata in self._live and _is_small(x))
            for x in _written(func, args, kwargs)
        )

    def _results(self, func: Any, outputs: Any, args: Any, kwargs: Any, known: bool) -> Any:
        if known and not func._schema.is_mutable and all(map(_is_small, tensors_in(outputs))):
            with contextlib.suppress(NotImplementedError):  # an operator of CUDA alone
                return self._followed(func(*args, **kwargs))
        written = _written(func, args, kwargs)
        for x in written:  # a tensor of the step, written with what has no values
            if x.untyped_storage()._cdata in self._live:
                self._without_values.add(x.untyped_storage()._cdata)
            else:
                self.wrote.add(x.untyped_storage()._cdata)
        if func._schema.is_mutable and not isinstance(outputs, (tuple, list)):
            if outputs is not None and outputs.size() != written[0].size():  # out= of another size
                new = self.like(outputs, record=True)
                written[0].set_(new.untyped_storage(), 0, new.size(), new.stride())
            return written[0] if outputs is not None else None
        returns = func._schema.returns
        aliases = {i: r.alias_info.before_set for i, r in enumerate(returns) if r.alias_info is not None}
        if func in _CHOICES and not known:
            return self._choose(outputs, args[0].shape[-1] if args[0].dim() else 1)
        if not aliases:
            scratch = (scratch_of if self.device_is_cpu else cuda_scratch_of)(func, args, outputs)
            return map_tensors(self._like_meta, outputs) if scratch is None else self._with_scratch(*scratch)
        named = {
            next(iter(a.alias_info.before_set)): (args[i] if i < len(args) else kwargs.get(a.name))
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.before_set
        }
        return type(outputs)(
            named[next(iter(aliases[i]))] if i in aliases else map_tensors(self._like_meta, x)
            for i, x in enumerate(outputs)
        )

    def _with_scratch(self, outputs: Any, sizes: list[int | None]) -> Any:
        """Return the results, each allocated in its turn among what lives only in the operator."""
        results = [outputs] if isinstance(outputs, torch.Tensor) else [x for x in outputs if x is not None]
        made: dict[int, torch.Tensor] = {}
        for size in sizes:
            if size is not None:
                self.events.append(Event(size, -1))
            elif len(made) < len(results):
                x = results[len(made)]
                made[id(x)] = self.like(x, record=True)
        return map_tensors(lambda x: made[id(x)] if id(x) in made else self.like(x, record=True), outputs)

    def _like_meta(self, x: torch.Tensor) -> torch.Tensor:
        return self.like(x, record=True)

    def _followed(self, outputs: Any) -> Any:
        for x in tensors_in(outputs):
            if x.untyped_storage().nbytes():
                self._follow(x.untyped_storage())
        return outputs

    def _without_meta(self, func: Any, args: Any, kwargs: Any, known: bool, error: Exception) -> Any:
        """Answer an operator that has no meta kernel for these operands, as the size of its result
        depends on values.
        """
        if func._schema.is_mutable:  # it would write to what the step has not made
            self.wrote.update(x.untyped_storage()._cdata for x in _written(func, args, kwargs))
        elif known:
            self.data_dependent = True
            return self._followed(func(*args, **kwargs))
        if func is aten._grouped_mm.default:  # the meta kernel takes bfloat16 alone
            return self._like_meta(torch.empty(_grouped_shape(*args, **kwargs), dtype=args[0].dtype, device="meta"))
        reason = "its result depends on values"
        if not isinstance(error, NotImplementedError):
            reason = str(error).partition("\n")[0] or type(error).__name__
        raise NotSimulated(f"{func.name()}: {reason}") from error

    def _count_work(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        formula = _formula(func)
        flop = formula(*args, **kwargs, out_val=outputs) if formula is not None else 0
        if flop and _given(func, args, kwargs, "is_causal"):
            flop //= 2  # half of the scores are skipped
        moved = sum(x.numel() * x.element_size() for x in (*tensors_in((args, kwargs)), *tensors_in(outputs)))
        self.work.append((len(self.events), Work(flop, moved)))


def _with_all_heads(formula: Any, first: int) -> Any:
    """Return the formula of attention for keys and values with as many heads as the query, which is
    the argument of that number.

    torch 2.11 counts no attention whose keys and values are shared by several heads.
    """

    def count(*args: Any, **kwargs: Any) -> Any:
        heads = args[first].shape[-3]
        shared = (torch.Size([*x.shape[:-3], heads, *x.shape[-2:]]) for x in args[first + 1 : first + 3])
        return formula(*args[: first + 1], *shared, *args[first + 3 :], **kwargs)

    return count


@functools.cache
def _formula(func: Any) -> Any:
    from torch.utils.flop_counter import flop_registry  # not with gradckpt: it leaves traces in torch

    formula = flop_registry.get(func._overloadpacket)
    if formula is None or not func.name().startswith("aten::_scaled_dot_product"):
        return formula
    return _with_all_heads(formula, int("backward" in func.name()))  # there a gradient comes first


@functools.cache
def _argument(func: Any, name: str) -> tuple[int, Any] | None:
    """Return an argument's place and its default, None if the operator has none of this name."""
    found = ((i, a) for i, a in enumerate(func._schema.arguments) if a.name == name)
    return next(((i, a.default_value) for i, a in found), None)


def _given(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return the value of an argument, None if the operator has none of this name."""
    if (argument := _argument(func, name)) is None:
        return None
    place, default = argument
    return args[place] if place < len(args) else kwargs.get(name, default)


def _grouped_shape(a: torch.Tensor, b: torch.Tensor, offs: Any = None, *_: Any, **__: Any) -> tuple[int, ...]:
    if a.dim() == b.dim() == 2:
        return offs.numel(), a.shape[0], b.shape[1]
    return (*a.shape[:-1], b.shape[-1]) if a.dim() != 3 or b.dim() == 3 else (a.shape[1], b.shape[1])


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Everything simulated is on the CPU, whatever device the model names."""
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    found = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return list(tensors_in(found))


def _is_small(x: torch.Tensor) -> bool:
    return x.numel() * x.element_size() <= _SMALL[x.is_floating_point() or x.is_complex()]


#: Autograd keeps their second operand for the backward of the first.
KEEP_FACTORS = {aten.mul.Tensor, aten.mul_.Tensor, aten.div.Tensor, aten.div_.Tensor}

#: Their kernels make a tensor of the number, as for a wrapped one.
WRAP = {getattr(aten, name).Scalar for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "rsub")}


@functools.cache
def _tensor_places(func: Any) -> frozenset[int]:
    return frozenset(i for i, a in enumerate(func._schema.arguments) if str(a.type) == "Tensor")


def in_exact_region() -> bool:
    """Return whether an exact region without a policy runs its forward, which keeps no number."""
    hooks = private.top_hooks(False)
    if hooks is None or type(hooks[0]).__name__ != "Frame":
        return False
    return not private.is_included(_C.selective_key())


def wrapped_numbers(func: Any, args: Any) -> dict[int, torch.Tensor]:
    """Return tensors for the numbers that a mode gets for wrapped ones, by their places."""
    if not any(isinstance(x, (bool, int, float)) for x in args):
        return {}
    places = _tensor_places(func)
    return {
        i: torch.scalar_tensor(x, dtype=torch.tensor(x).dtype)
        for i, x in enumerate(args)
        if isinstance(x, (bool, int, float)) and i in places
    }
