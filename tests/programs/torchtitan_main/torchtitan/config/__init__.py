"""Configurable: a class with a dataclass Config, which builds it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **kwargs: Any) -> Any:
            return self._owner(config=dataclasses.replace(self), **kwargs)

        def to_dict(self) -> dict[str, Any]:
            return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        config = cls.__dict__.get("Config")
        if config is not None:
            if "__slots__" not in vars(config) or not all(f.kw_only for f in dataclasses.fields(config)):
                raise TypeError(f"{cls.__name__}.Config must use @dataclass(kw_only=True, slots=True)")
            config._owner = cls
