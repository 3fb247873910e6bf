"""Select modules by class, name, kind or function, and parts of a selection:
``enable(modules=...)``.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any, Union

from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from gradckpt import _C
from gradckpt._codec_names import ALIASES
from gradckpt._compression import written
from gradckpt._engine.arguments import check_int
from gradckpt._models.kinds import KINDS, Tree, has_forward

__all__ = ["every", "m_of_n"]


@dataclasses.dataclass(frozen=True)
class Subset:
    """A part of the modules of another selector, in the model's order.

    Of each run of ``period`` modules, the first ``chosen`` are taken, after ``offset``. A module
    with two names counts once.
    """

    selector: Any
    period: int
    chosen: int
    offset: int = 0

    def __str__(self) -> str:
        inner = describe(self.selector)
        if self.chosen == 1:
            return f"every({self.period}, {inner}{f', offset={self.offset}' if self.offset else ''})"
        return f"m_of_n({self.chosen}, {self.period}, {inner})"


#: What selects modules.
Selector = Union[
    str, "re.Pattern[str]", type[Module], tuple[type[Module], ...], Module, Subset, Callable[[str, Module], bool]
]


def every(k: int, selector: Selector, offset: int = 0) -> Subset:
    """Select every ``k``-th module that ``selector`` matches.

    These are number ``offset``, ``offset + k``, ... (from 0), in the order of
    ``model.named_modules()``.

    Raises:
        ValueError: ``k`` is below 1 or ``offset`` below 0.
        TypeError: A number is not an int.
    """
    return Subset(selector, check_int("k", k, 1), 1, check_int("offset", offset, 0))


def m_of_n(m: int, n: int, selector: Selector) -> Subset:
    """Select the first ``m`` of each run of ``n`` modules that ``selector`` matches.

    ``m_of_n(2, 3, "layer")`` leaves out the third, the sixth, ...

    Raises:
        ValueError: 1 <= m <= n does not hold.
        TypeError: A number is not an int.
    """
    if check_int("m", m, 1) > check_int("n", n, 1):
        raise ValueError(f"gradckpt: m_of_n takes m of n, and {m} is more than {n}")
    return Subset(selector, n, m)


def describe(selector: Any) -> str:
    """Return the selector nearly as the user wrote it."""
    if isinstance(selector, re.Pattern):
        return f"re.compile({selector.pattern!r})"
    if isinstance(selector, tuple):
        return f"({', '.join(map(describe, selector))})"
    if isinstance(selector, Module):
        return f"the module {type(selector).__name__}"
    if isinstance(selector, Subset):
        return str(selector)
    if isinstance(selector, list):
        return f"[{', '.join(map(describe, selector))}]"
    if isinstance(selector, Mapping):
        return f"{{{', '.join(f'{describe(key)}: {value!r}' for key, value in selector.items())}}}"
    return getattr(selector, "__qualname__", None) or written(selector)


def select(selector: Any, tree: Tree) -> list[str]:
    """Return the names of the modules that a selector matches.

    Raises:
        ValueError: It matches none.
    """
    names = _select(selector, tree)
    if not names:
        raise ValueError(f"gradckpt: no module matches {describe(selector)}; {_what_there_is(selector, tree)}")
    return names


def _select(selector: Any, tree: Tree) -> list[str]:
    if isinstance(selector, Subset):
        return _subset(selector, tree)
    if isinstance(selector, str):
        if selector in KINDS:
            return tree.of_kind(selector)
        match = re.compile(fnmatch.translate(selector)).match
        # The model itself has the empty name, which a pattern such as "*" must not match.
        return [name for name, _ in tree.names if match(name) and (name or not selector)]
    if isinstance(selector, re.Pattern):
        return [name for name, _ in tree.names if selector.fullmatch(name)]
    if isinstance(selector, Module):
        meant = _meant_by(selector, tree)
        return [name for name, module in tree.names if module in meant]
    if isinstance(selector, (type, tuple)):
        classes = selector if isinstance(selector, tuple) else (selector,)
        if not classes or not all(isinstance(each, type) and issubclass(each, Module) for each in classes):
            raise TypeError(
                f"gradckpt: {describe(selector)} does not select modules; pass a subclass of torch.nn.Module, a tuple "
                "of such classes, or a list of selectors"
            )
        return [name for name, module in tree.names if isinstance(module, classes)]
    if callable(selector):
        return [name for name, module in tree.names if selector(name, module)]
    if isinstance(selector, Tensor):
        raise TypeError(
            f"gradckpt: modules= takes no parameters, and got {written(selector)}; pass the modules that hold them, or "
            "their class"
        )
    raise TypeError(
        "gradckpt: modules are selected by class, name pattern, kind, module, every(), m_of_n() or a function of name "
        f"and module; not by {selector!r}"
    )


def _meant_by(module: Module, tree: Tree) -> set[Module]:
    """Return the modules that a given module selects: itself, or those in a list of modules.

    ``model.layers`` has no forward, and ``model.layers[::2]`` is a new list that no model holds.

    Raises:
        ValueError: Some modules of a list are in the model, and some are not.
    """
    held = {each for _, each in tree.names}
    if not isinstance(module, (ModuleList, ModuleDict, Sequential)) or (module in held and has_forward(module)):
        return {module}
    parts = set(module.children())
    strange = next((part for part in parts if part not in held), None)
    if strange is not None and parts & held:
        raise ValueError(
            f"gradckpt: the {type(module).__name__} in modules= has a {type(strange).__name__} that is not in this "
            f"{type(tree.model).__name__}; leave it out"
        )
    return parts


def _subset(subset: Subset, tree: Tree) -> list[str]:
    inner = set(select(subset.selector, tree))
    modules = {id(module): None for name, module in tree.names if name in inner}
    chosen = {
        module
        for place, module in enumerate(modules)
        if place >= subset.offset and (place - subset.offset) % subset.period < subset.chosen
    }
    return [name for name, module in tree.names if name in inner and id(module) in chosen]


#: Where the layers of a kind are, in a model that has no modules of that kind.
_INSTEAD = {"mlp": 'its feed-forward has no module of its own; "layer" holds it', "moe": "it has no mixture of experts"}


def _what_there_is(selector: Any, tree: Tree) -> str:
    if isinstance(selector, Subset):
        inner = set(_select(selector.selector, tree))
        return (
            f"{describe(selector.selector)} matches {len({id(module) for name, module in tree.names if name in inner})}"
        )
    if isinstance(selector, str) and (selector in _C.codecs() or selector in ALIASES):
        return f"it is a codec: pass compress={selector!r}"
    classes = {type(module).__name__ for name, module in tree.names if name}
    if isinstance(selector, Module):
        return f"pass modules of this {type(tree.model).__name__}, or a class, one of {', '.join(sorted(classes))}"
    named = {each.lower(): each for each in classes}.get(selector.lower()) if isinstance(selector, str) else None
    if named is not None and selector not in KINDS:
        return f"it is the name of a class: pass the class itself, modules={named}"
    kinds = ", ".join(f'"{kind}" ({count})' for kind, count in tree.counts()) or "none"
    text = f"kinds in this {type(tree.model).__name__}: {kinds}"
    if isinstance(selector, str) and selector in _INSTEAD:
        return f"{_INSTEAD[selector]}; {text}"
    names = [name for name, _ in tree.names if name]
    if isinstance(selector, str) and selector not in KINDS:
        loose = re.compile(fnmatch.translate(f"*.{selector}"))
        if any(loose.match(name) for name in names):
            return f"a pattern is for the whole name, so write {f'*.{selector}'!r}; {text}"
    if not names:
        return f"{text}; it has no modules inside"
    if isinstance(selector, str) and selector in KINDS:
        return f"{text}; choose by class instead, one of {', '.join(sorted(classes))}"
    few = [name for name, module in tree.names if id(module) in tree.kinds][:4] or names[:4]
    return f"{text}; names: {', '.join(map(repr, few))}, ..."
