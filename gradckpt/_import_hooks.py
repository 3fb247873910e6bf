"""Call a function once a module of another package has been imported, without importing it."""

from __future__ import annotations

import copy
import functools
import importlib.abc
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

logger = logging.getLogger("gradckpt")

Then = Callable[[ModuleType], None]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Wrap the loader of another finder's spec, in copies, so that an import is reported; theirs do
    not change.

    An error here never stops the import.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, Then] = {}
        self.asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting or getattr(self.asking, "now", False):
            return None
        self.asking.now = True  # other finders may ask all finders in their turn
        try:
            found = self._of_others(fullname, path, target)
            return None if found is None else self._told(found)
        except Exception as error:  # raised again when the import machinery asks that finder
            logger.warning("gradckpt: cannot follow the import of %s (%r); import gradckpt after it", fullname, error)
            return None
        finally:
            self.asking.now = False

    def _of_others(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec and finder is not self else None
            if spec is not None:
                return spec
        return None

    def _told(self, found: ModuleSpec) -> ModuleSpec:
        """Return a copy of the spec with a copied loader that reports the import.

        The copy has the same class and attributes, since other code reads both.
        """
        theirs: Any = found.loader
        spec, loader = copy.copy(found), copy.copy(theirs)
        if theirs is None or isinstance(theirs, type) or loader is theirs:
            raise TypeError(f"gradckpt: {theirs!r} cannot be copied")
        loader.exec_module = functools.partial(self._execute, spec, loader, theirs)
        spec.loader = loader
        return spec

    def _execute(self, spec: ModuleSpec, ours: Any, theirs: Any, module: ModuleType) -> None:
        for holder, name in ((spec, "loader"), (module, "__loader__")):
            if getattr(holder, name, None) is ours:
                setattr(holder, name, theirs)
        theirs.exec_module(module)  # if it fails, the next import is followed again
        then = self.waiting.pop(spec.name, None)
        if then is not None:
            _call(then, module)
        if not self.waiting:
            _leave(self)


def _call(then: Then, module: ModuleType) -> None:
    """Call ``then``; its errors never fail the import of the other package."""
    try:
        then(module)
    except Exception as error:
        logger.warning("gradckpt: a hook on the import of %s failed: %s", module.__name__, error, exc_info=True)


def _leave(*finders: Any) -> None:
    # This makes a new list: a thread that iterates over the old one would skip the finder behind a
    # removed one.
    sys.meta_path = [each for each in sys.meta_path if not any(each is finder for finder in finders)]


_finder = _AfterImport()


def after_import(name: str, then: Then) -> None:
    """Call ``then(module)`` now if that module is already imported, else once it is.

    The last call for a name counts. Exceptions of ``then`` are logged.
    """
    module = sys.modules.get(name)
    if module is not None:
        _call(then, module)
        return
    if not any(finder is _finder for finder in sys.meta_path):
        earlier = [f for f in sys.meta_path if (type(f).__module__, type(f).__name__) == (__name__, "_AfterImport")]
        if earlier:  # from this module, loaded before; no list is made without need
            _leave(*earlier)
        sys.meta_path.insert(0, _finder)
    _finder.waiting[name] = then
