"""Choose modules by class, name, kind or function, every k-th of them or m of n: ``enable(model, modules=...)``."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any, Union

from torch.nn import Module

from gradckpt import _C
from gradckpt.config import ALIASES
from gradckpt.kinds import KINDS, Tree

__all__ = ["every", "m_of_n"]


@dataclasses.dataclass(frozen=True)
class Subset:
    """Of the modules of another selector, in the model's order, the places ``chosen`` of each run of ``period``,
    after ``offset``. A module with two names counts once."""

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
    """Every ``k``-th module that ``selector`` matches: number ``offset``, ``offset + k``, ... (from 0), in the order of
    ``model.named_modules()``.

    Raises:
        ValueError: ``k`` below 1 or ``offset`` below 0.
        TypeError: not ints.
    """
    return Subset(selector, _count(k, "k", 1), 1, _count(offset, "offset", 0))


def m_of_n(m: int, n: int, selector: Selector) -> Subset:
    """The first ``m`` of each run of ``n`` modules that ``selector`` matches: ``m_of_n(2, 3, "layer")`` leaves out the
    third, the sixth, ...

    Raises:
        ValueError: not 1 <= m <= n.
        TypeError: not ints.
    """
    if _count(m, "m", 1) > _count(n, "n", 1):
        raise ValueError(f"gradckpt: m_of_n takes m of n, and {m} is more than {n}")
    return Subset(selector, n, m)


def _count(value: Any, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"gradckpt: {what} is an int, not {value!r}")
    if value < least:
        raise ValueError(f"gradckpt: {what} is {least} or more, not {value}")
    return value


def describe(selector: Any) -> str:
    """As the user wrote it, nearly."""
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
    return getattr(selector, "__qualname__", None) or repr(selector)


def select(selector: Any, tree: Tree) -> list[str]:
    """The names of the modules that a selector matches; ``ValueError`` when there are none."""
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
        # The model itself has no name, and no pattern that asks for one is meant for it.
        return [name for name, _ in tree.names if match(name) and (name or not selector)]
    if isinstance(selector, re.Pattern):
        return [name for name, _ in tree.names if selector.fullmatch(name)]
    if isinstance(selector, Module):
        return [name for name, module in tree.names if module is selector]
    if isinstance(selector, (type, tuple)):
        classes = selector if isinstance(selector, tuple) else (selector,)
        if not classes or not all(isinstance(each, type) and issubclass(each, Module) for each in classes):
            raise TypeError(
                f"gradckpt: {describe(selector)} does not select modules: a class must be one of modules, and a tuple "
                "of nothing else; write several selectors as a list"
            )
        return [name for name, module in tree.names if isinstance(module, classes)]
    if callable(selector):
        return [name for name, module in tree.names if selector(name, module)]
    raise TypeError(
        "gradckpt: modules are selected by a class, a name pattern, a kind, a module, gradckpt.selectors.every or "
        f"m_of_n, or a function of name and module; not by {selector!r}"
    )


def _subset(subset: Subset, tree: Tree) -> list[str]:
    inner = set(select(subset.selector, tree))
    modules = {id(module): None for name, module in tree.names if name in inner}
    chosen = {
        module
        for place, module in enumerate(modules)
        if place >= subset.offset and (place - subset.offset) % subset.period < subset.chosen
    }
    return [name for name, module in tree.names if name in inner and id(module) in chosen]


#: Where a model without modules of a kind has what belongs in them.
_INSTEAD = {"mlp": 'its feed-forward has no module of its own; "layer" holds it', "moe": "it has no mixture of experts"}


def _what_there_is(selector: Any, tree: Tree) -> str:
    if isinstance(selector, Subset):
        return f"{describe(selector.selector)} matches {len(set(_modules_of(selector.selector, tree)))}"
    if isinstance(selector, str) and (selector in _C.codecs() or selector in ALIASES):
        return f"it is a codec: pass compress={selector!r}"
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
        classes = {type(module).__name__ for name, module in tree.names if name}
        return f"{text}; choose by class instead, one of {', '.join(sorted(classes))}"
    few = [name for name, module in tree.names if id(module) in tree.kinds][:4] or names[:4]
    return f"{text}; names: {', '.join(map(repr, few))}, ..."


def _modules_of(selector: Any, tree: Tree) -> list[int]:
    names = set(_select(selector, tree))
    return [id(module) for name, module in tree.names if name in names]
