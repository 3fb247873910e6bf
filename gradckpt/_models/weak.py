"""A weak reference that copies and pickles."""

from __future__ import annotations

import weakref
from typing import Any

from torch.nn import Module


class WeakModule:
    """A weak reference to a module, or to none. A copy or pickle refers to the module's copy."""

    def __init__(self, module: Module | None) -> None:
        self._reference = None if module is None else weakref.ref(module)

    def __call__(self) -> Any:
        """Return the module; None once it is gone."""
        return None if self._reference is None else self._reference()

    def __reduce__(self) -> Any:
        return WeakModule, (self(),)
