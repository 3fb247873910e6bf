"""The working set of a region's backward, made smaller: its parts are recomputed one after the
other, and modules that treat each token alone run in tiles of the sequence.

Both replace the forward of modules inside a region, and act in calls of that region alone. A part
is a region of its own: while the enclosing region runs again, it keeps nothing but its input, and
it runs again itself once the backward has come to it. So the tensors of one part are there at a
time.

Forms of ``parts=``:
    * ``"nested"``: every part is a region.
    * ``"sequential"``: every part but the last, which the recompute of the whole runs with grad.
    * ``"kept"``: likewise; the output of a part is kept from the forward, a second payload, and the
      recompute of the whole does not run the part.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.nn import Module, ModuleDict, ModuleList

from gradckpt import _C
from gradckpt._engine import kept_calls
from gradckpt._engine import torch_private as private
from gradckpt._engine.buffers import Calling
from gradckpt._engine.tiles import run_in_tiles
from gradckpt._engine.token_check import TokenCheck
from gradckpt._engine.trial_calls import MadeTensors, holds_still, leaves_behind, reaches_before
from gradckpt._models import inactivity_warning
from gradckpt._models.caches import with_caches
from gradckpt._models.kinds import Tree, has_forward
from gradckpt._models.replaced_forward import ReplacedForward, replacements_of, unbound
from gradckpt._models.rules import Settings

#: Keywords of the enclosing region that hold for its parts.
_SHARED = ("preserve_rng_state", "determinism_check", "early_stop", "respect_saved_tensors_hooks", "buffers")


class Inner(ReplacedForward):
    """The forward of a module inside a region, which does otherwise there alone."""

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self.traced = False  # by torch.compile

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        args, forward = unbound(module, args), self.forward_of(module)
        if not (self.active and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            self.traced = True
            return forward(*args, **kwargs)
        if _C.running_region() is None:
            return forward(*args, **kwargs)
        return self.run(module, forward, args, kwargs)

    def run(self, module: Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


#: To what a part returns: of the result, of a list of its tensors, and of who asks.
_REFERENCES = 4


def _is_in(x: torch.Tensor, tensors: Iterable[torch.Tensor]) -> bool:
    return any(x is each for each in tensors)


class Part(Inner):
    """A part of a region. ``kept_as``: the name under which its output is kept, or None."""

    def __init__(self, module: Module, settings: Settings, kept_as: str | None) -> None:
        super().__init__(module)
        self.keywords = {key: settings[key] for key in _SHARED if key in settings}
        self.kept_as = kept_as
        self.seen = False  # it leaves no tensors elsewhere

    def run(self, module: Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call it as a region.

        Raises:
            ValueError: What it does would be done twice, or not again.
        """
        forward, args, kwargs = with_caches(forward, args, kwargs)
        leaves, spec = private.tree_flatten((args, kwargs))
        tensors = list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())
        places = {id(x): place for place, x in enumerate(tensors)}
        versions = [-1 if x.is_inference() else x._version for x in tensors]
        function = _Called(forward, [places[id(x)] if isinstance(x, torch.Tensor) else (x,) for x in leaves], spec)
        part = functools.partial(_C.checkpoint, function, compress=None, **{"buffers": module, **self.keywords})
        result = part(*tensors) if self.kept_as is None else self._run_once(self.kept_as, module, part, tensors)
        if any(version >= 0 and x._version != version for x, version in zip(tensors, versions, strict=True)):
            self._refuse("changes an input in place")
        return result

    def _run_once(self, name: str, module: Module, part: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
        """Call it in the forward, of which the recompute gets what it returns."""
        region = _C.running_region()
        assert region is not None  # Inner asks
        calls, replay, *_ = region
        if not replay and name in calls:
            self._refuse("runs twice in a region")
        part = kept_calls.region(part, name, recompute=False)
        if replay or self.seen:
            return part(*tensors)
        number = private.next_node_number()
        with MadeTensors() as made:
            result = part(*tensors)

        def is_of_input(x: torch.Tensor) -> bool:
            return x.requires_grad and (
                reaches_before((x,), number) or any(_is_in(v, tensors) for v in leaves_behind((x,)))
            )

        returned = [x for x in private.tree_leaves(result) if isinstance(x, torch.Tensor) and not _is_in(x, tensors)]
        is_held = any(sys.getrefcount(x) > _REFERENCES for x in returned if x.grad_fn is not None)
        if is_held or made.are_left(*tensors, *returned, *module.parameters(), *module.buffers(), of=is_of_input):
            self._refuse("leaves a tensor elsewhere than in its result")
        self.seen = True
        return result

    def _refuse(self, why: str) -> NoReturn:
        other = "leave it out" if self.kept_as is None else 'pass parts="sequential", or leave it out'
        raise ValueError(f"gradckpt: parts= runs {self.kind} as a region of its own, and it {why}; {other}")

    def __repr__(self) -> str:
        return f"<forward of {self.kind}, a part of a region{', kept' if self.kept_as else ''}>"


@dataclasses.dataclass(slots=True, eq=False)
class _Called(Calling):
    """A forward that gets the tensors of a call by their order, each once, since attention asks
    whether two are one. Those given by keyword would be kept, where the recompute of the enclosing
    region makes them again.
    """

    rest: list[tuple[Any] | int]  # a number: a tensor
    spec: Any

    def __call__(self, *tensors: Any) -> Any:
        leaves = [tensors[each] if isinstance(each, int) else each[0] for each in self.rest]
        args, kwargs = private.tree_unflatten(leaves, self.spec)
        result = self.function(*args, **kwargs)
        if not holds_still((args, kwargs), leaves, self.spec):
            raise ValueError(
                "gradckpt: parts= runs modules as regions of their own, and one writes into a list or dict that it is "
                "given; leave parts= out"
            )
        return result


class Tiled(Inner):
    """A module that runs in so many tiles of the sequence."""

    def __init__(self, module: Module, settings: Settings) -> None:
        super().__init__(module)
        self.tiles: int = settings["tiles"]
        self.preserve_rng_state: bool = settings.get("preserve_rng_state", True)
        self.check = TokenCheck()

    def run(self, module: Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return run_in_tiles(module, forward, args, kwargs, self.tiles, self.preserve_rng_state, self.check)

    def __repr__(self) -> str:
        return f"<forward of {self.kind}, in {self.tiles} tiles>"


# ---- which modules ----


def working_sets(tree: Tree, regions: Mapping[Module, Settings]) -> list[Inner]:
    """Return what the settings of regions ask for, in the order in which to install it.

    Raises:
        ValueError: A region has no parts, or no module that could run in tiles.
    """
    found: dict[Module, Inner] = {}
    for region, settings in regions.items():
        if "tiles" in settings:
            found |= {module: Tiled(module, settings) for module in _token_wise(tree, region)}
        if "parts" in settings:
            found = {**_parts(region, settings), **found}
    return list(found.values())


def _parts(region: Module, settings: Settings) -> dict[Module, Inner]:
    form, parts = settings["parts"], list(parts_of(region))
    if not parts:
        raise ValueError(
            f"gradckpt: {type(region).__name__} has no parts that save more than their input; leave parts= out, or "
            'choose the blocks around it, as in modules="layer"'
        )
    working = [part for part in _children(region) if _multiplies(part)]
    if form != "nested" and working and working[-1] in parts:
        parts.remove(working[-1])
    names = {part: name for name, part in region.named_modules()}
    kept = {part for part in parts if form == "kept" and _multiplies(part)}
    return {part: Part(part, settings, f'{names[part]} of parts="kept"' if part in kept else None) for part in parts}


def parts_of(region: Module) -> Iterator[Module]:
    """Yield the parts of a region, in the order in which it holds them: modules with parameters,
    but torch's own without modules inside, which save little more than their input.
    """
    return (part for part in _children(region) if part._modules or not type(part).__module__.startswith("torch.nn."))


def have_parts(regions: Iterable[Module]) -> bool:
    """Return whether there are regions, and each of them has parts."""
    found = [next(parts_of(region), None) is not None for region in regions]
    return bool(found) and all(found)


def _children(module: Module) -> Iterator[Module]:
    """Yield the modules with parameters that a module holds itself, or in lists."""
    for child in module.children():
        if isinstance(child, (ModuleList, ModuleDict)) and not has_forward(child):
            yield from _children(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _multiplies(module: Module) -> bool:
    """Return whether the module has weights of products, unlike a norm."""
    return any(parameter.ndim > 1 for parameter in module.parameters())


def _token_wise(tree: Tree, region: Module) -> list[Module]:
    """Return the modules of a region that are to run in tiles: its MLPs, else the module itself.

    Raises:
        ValueError: It is a layer without any.
    """
    inside = list(region.modules())
    found = [module for module in inside if tree.kinds.get(id(module)) == "mlp"]
    if found:
        return found
    if any(tree.kinds.get(id(module)) in ("layer", "attention") for module in inside if module is not region):
        raise ValueError(
            f"gradckpt: {type(region).__name__} has no MLP that is a module of its own, for tiles=; leave it out, or "
            "name other modules"
        )
    return [region]


# ---- in a model ----


def install(tree: Tree, regions: Mapping[Module, Settings]) -> None:
    """Install what the settings of regions ask for.

    Raises:
        ValueError: As :func:`working_sets`; nothing is installed then.
    """
    found = working_sets(tree, regions)
    for inner in found:
        inner.install()
    if found:
        inactivity_warning.expect(tree.model, _why_compiled)


def _why_compiled(model: Module) -> tuple[str, bool] | None:
    """Return what does nothing in a graph of torch.compile, or None."""
    traced = [inner for inner in inner_in(model) if inner.traced]
    if not traced:
        return None
    names = " and ".join(sorted({"tiles=" if isinstance(inner, Tiled) else "parts=" for inner in traced}))
    reason = f"{names} does nothing in torch.compile's graphs, whose partitioner decides what runs again; leave it out"
    return reason, True


def inner_in(model: Module) -> list[Inner]:
    return [each for module in model.modules() for each in replacements_of(module) if isinstance(each, Inner)]


def are_called(model: Module) -> bool:
    """Return whether all that was installed in a model is still called."""
    return all(inner.is_called() for inner in inner_in(model))
