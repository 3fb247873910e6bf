"""Which modules of a model are a layer, an attention, an MLP, a mixture of experts, a norm:
:class:`Tree`.

A kind is recognised by the name of the module's class (or of a base class) and by its parts;
docs/apply.md has the table. A module has at most one kind, and none lies inside another of its
kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.nn import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Conv1d,
    Conv2d,
    Conv3d,
    LayerNorm,
    Linear,
    Module,
    ModuleList,
    ReLU,
    ReLU6,
    RMSNorm,
    Sequential,
    SyncBatchNorm,
)

_MOE = re.compile(r"(moe|sparse_?mlp|(moe|sparse)_?(block|layer))$", re.IGNORECASE)
_ATTENTION = re.compile(r"(Attention|Attn)(V?\d+)?$")
_MLP = re.compile(r"(mlp|feed_?forward(network)?|ffn|actdense|swiglu)$", re.IGNORECASE)
_LAYER = re.compile(r"(Layer|Block)(V?\d+)?$")
_NORM = re.compile(r"(Layer|RMS|Rms|Group|Scale|Simple)Norm(?!\w*(Linear|MLP))\w*$")  # not LayerNormLinear

#: The first and the last projection of an MLP, by their usual names.
_MLP_PARTS = (
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("wi", "wo"),
    ("w1", "w2"),
    ("lin1", "lin2"),
    ("linear_fc1", "linear_fc2"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)

#: transformers' own mark of the modules that it would checkpoint.
_MARKED = "GradientCheckpointingLayer"


def _is_called(module: Module, pattern: re.Pattern[str]) -> bool:
    """Return whether its class or a base class has such a name.

    The user's subclasses and parametrized modules have such a base class.
    """
    classes = type(module).__mro__[: type(module).__mro__.index(Module)]
    return any(pattern.search(each.__name__) for each in classes)


def _is_matrix(value: Any) -> bool:
    return getattr(value, "ndim", 0) == 2


def _holds_matrix(module: Module) -> bool:
    """Return whether it holds a matrix, itself or in a child such as a Linear."""
    own = any(_is_matrix(parameter) for parameter in module._parameters.values())
    return own or any(_is_matrix(getattr(child, "weight", None)) for child in module.children())


def _is_moe(module: Module) -> bool:
    if isinstance(getattr(module, "experts", None), Module):
        return any(isinstance(getattr(module, router, None), Module) for router in ("gate", "router"))
    return _is_called(module, _MOE) and _holds_matrix(module) and not _holds_attention(module)


def _is_attention(module: Module) -> bool:
    """Return whether the module has the projections itself.

    BertAttention and T5LayerSelfAttention do not: they add a norm and a residual.
    """
    return _is_called(module, _ATTENTION) and _holds_matrix(module)


def _is_mlp(module: Module) -> bool:
    if _holds_attention(module):
        return False  # a layer with its own projections, as in OPT
    if _is_called(module, _MLP) and next(module.parameters(), None) is not None:
        # If a module only adds a norm and a residual around an MLP, the inner module is the MLP.
        return not any(_is_called(child, _MLP) for child in module.children())
    parts = [[getattr(getattr(module, name, None), "weight", None) for name in pair] for pair in _MLP_PARTS]
    return any(_is_matrix(first) and _is_matrix(last) for first, last in parts)


def _is_layer(module: Module) -> bool:
    if any(each.__name__ == _MARKED for each in type(module).__mro__):
        return True
    return _is_called(module, _LAYER) and _holds_attention(module)


def _is_norm(module: Module) -> bool:
    return _is_called(module, _NORM) and not module._modules


def _holds_attention(module: Module) -> bool:
    return any(_is_attention(inside) for inside in module.modules() if inside is not module)


#: Kind -> its test, and the kinds inside which it is not searched (its own among them). The first
#: match wins.
_RULES: dict[str, tuple[Callable[[Module], bool], frozenset[str]]] = {
    "moe": (_is_moe, frozenset({"moe", "attention", "mlp"})),
    "attention": (_is_attention, frozenset({"moe", "attention", "mlp"})),
    "layer": (_is_layer, frozenset({"layer", "moe", "attention", "mlp"})),
    "mlp": (_is_mlp, frozenset({"moe", "attention", "mlp"})),
    "norm": (_is_norm, frozenset({"moe", "attention", "mlp"})),
}

KINDS = ("layer", "attention", "mlp", "moe", "norm")


def has_forward(module: Module) -> bool:
    """Return whether a module can be called; a ModuleList cannot, but a class made of it may be."""
    return "forward" in vars(module) or type(module).forward is not Module.forward


class Tree:
    """The modules of a model by name, shared ones under each of their names, and their kinds."""

    def __init__(self, model: Module) -> None:
        self.model = model
        self.names = list(model.named_modules(remove_duplicate=False))
        self.kinds: dict[int, str] = {}
        self._walk(model, frozenset(), set())

    def _walk(self, module: Module, around: frozenset[str], seen: set[int]) -> None:
        """Find the kinds of a module and its children, inside modules of the kinds ``around``."""
        if id(module) in seen:
            return  # a shared module has the kind of its first place
        seen.add(id(module))
        kind = next((kind for kind, (test, not_in) in _RULES.items() if not around & not_in and test(module)), None)
        if kind is not None:
            self.kinds[id(module)] = kind
            around = around | {kind}
        for child in module.children():
            self._walk(child, around, seen)

    def of_kind(self, kind: str) -> list[str]:
        """Return the names of the modules of a kind, in the model's order."""
        return [name for name, module in self.names if self.kinds.get(id(module)) == kind]

    def counts(self) -> Iterator[tuple[str, int]]:
        """Return how many modules have each kind; kinds without modules are left out."""
        found = list(self.kinds.values())
        return ((kind, found.count(kind)) for kind in KINDS if kind in found)


class Blocks(NamedTuple):
    """A class with several instances side by side in a ModuleList or Sequential of a model."""

    kind: type[Module]
    names: list[str]  # of its instances, in the model's order, shared ones once
    parameters: int  # of all of them together


#: With this share of all blocks' parameters, a class is the model's block even if others repeat.
_MOST = 0.9


def repeated_blocks(model: Module) -> list[Blocks]:
    """Return the classes of a model's repeated blocks, those with most parameters first.

    A block has modules of its own and lies in no other block: the linear layers of an MLP are not
    blocks, nor are the experts of a layer, nor the stages of a vision model, whereas the blocks in
    their Sequentials are. The list has one element if a class has 90 % of all blocks' parameters,
    or is the only one.
    """
    names = {module: name for name, module in model.named_modules()}
    repeated: set[Module] = set()
    in_a_row: set[Module] = set()  # children of a Sequential
    for module in names:
        if isinstance(module, (ModuleList, Sequential)):
            children = [inside_fsdp(child) for child in module.children()]
            children = [child for child in children if child._modules and not isinstance(child, ModuleList)]
            count = Counter(map(type, children))
            same = {child for child in children if count[type(child)] > 1}
            repeated |= same
            in_a_row |= {child for child in same if not _is_unit(child)} if isinstance(module, Sequential) else set()
    stages = {block for block in repeated if 2 * _size(in_a_row & {*_inside(block)}) >= _size([block]) > 0}
    repeated -= stages
    repeated -= {part for block in repeated for part in _inside(block)}
    kinds: dict[type[Module], list[Module]] = {}
    for module in names:
        if module in repeated:
            kinds.setdefault(type(module), []).append(module)
    found = [Blocks(kind, [names[module] for module in its], _size(its)) for kind, its in kinds.items()]
    found = sorted((blocks for blocks in found if blocks.parameters), key=lambda blocks: -blocks.parameters)
    # Beside blocks with a class of their own, a Sequential is a stage of one block.
    found = [blocks for blocks in found if blocks.kind is not Sequential] or found
    found = _apart(found, [*names])
    if found and found[0].parameters >= _MOST * sum(blocks.parameters for blocks in found):
        return found[:1]
    return found


def _apart(found: list[Blocks], modules: list[Module]) -> list[Blocks]:
    """Return the kinds without those of which a module is inside one of a kind before, or holds
    one: a class is chosen wherever it is.
    """
    kept: list[Blocks] = []
    inside: set[type[Module]] = set()
    for blocks in found:
        parts = {type(part) for module in modules if type(module) is blocks.kind for part in _inside(module)}
        if blocks.kind not in inside and not parts & {blocks.kind, *(each.kind for each in kept)}:
            kept.append(blocks)
            inside |= parts
    return kept or found


def inside_fsdp(module: Module) -> Module:
    """Return the module that FullyShardedDataParallel wraps; of any other, itself."""
    return getattr(module, "_fsdp_wrapped_module", module)


def _is_unit(module: Module) -> bool:
    """Return whether this is one step of a block, as convolution, norm and activation in a class
    that is a Sequential.
    """
    return type(module) is not Sequential and type(module).forward is Sequential.forward


def _inside(module: Module) -> Iterator[Module]:
    return (part for part in module.modules() if part is not module)


def _size(modules: Iterable[Module]) -> int:
    """Return the number of values in the parameters of modules, shared ones counted once."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


def width_of(module: Module) -> int | None:
    """Return the last dimension of a module's likely input: that of its first linear layer or norm.

    ``None`` if unknown, or if a convolution comes first, whose last dimension is spatial. Nothing
    is run, and only plain attributes are read.
    """
    for part in module.modules():
        if isinstance(part, (Conv1d, Conv2d, Conv3d)):
            return None
        if isinstance(part, Linear):
            width = vars(part).get("in_features")
        elif isinstance(part, (LayerNorm, RMSNorm)):
            shape = vars(part).get("normalized_shape")
            width = shape[-1] if isinstance(shape, tuple) and shape else None
        else:
            continue
        return width if isinstance(width, int) and width > 0 else None
    return None


def has_relu_and_batch_norm(module: Module) -> bool:
    """Return whether a module holds ReLU and BatchNorm.

    A restored input then flips signs, which the norm's statistics spread.
    """
    parts = list(module.modules())
    return any(isinstance(part, (ReLU, ReLU6)) for part in parts) and any(
        isinstance(part, (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)) for part in parts
    )
