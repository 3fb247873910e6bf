"""The attributes of an object that a step on paper changes: :class:`KeptAttributes`."""

from __future__ import annotations

import collections
import copy
from typing import Any

__all__ = ["KeptAttributes"]

_LISTS = (list, collections.deque)


class KeptAttributes:
    """The attributes of an object, and what is in its containers, to be put back."""

    def __init__(self, owner: Any) -> None:
        self._owner, self._attributes = owner, dict(vars(owner))
        self._contents = [(x, copy.copy(x)) for x in vars(owner).values() if isinstance(x, (*_LISTS, dict, set))]

    def put_back(self) -> None:
        vars(self._owner).clear()
        vars(self._owner).update(self._attributes)
        for container, content in self._contents:
            container.clear()
            (container.extend if isinstance(container, _LISTS) else container.update)(content)
