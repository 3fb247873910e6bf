"""Module: knows the names of its regions, and which of them a policy saves."""

from __future__ import annotations

import fnmatch

from torch import nn

from torchtitan.config import Configurable


class Module(nn.Module, Configurable):
    def __init__(self) -> None:
        super().__init__()
        self._remat_fqn = ""
        self._remat_save_patterns: list[str] = []
        self._remat_recompute_patterns: list[str] = []

    def configure_remat_regions(self, save_patterns: list[str], recompute_patterns: list[str]) -> None:
        for fqn, module in self.named_modules():
            if isinstance(module, Module):
                module._remat_fqn = fqn
                module._remat_save_patterns = save_patterns
                module._remat_recompute_patterns = recompute_patterns

    def remat_region_name(self, name: str) -> str:
        return f"{self._remat_fqn}.{name}" if self._remat_fqn else name

    def remat_should_recompute(self, name: str) -> bool:
        full = self.remat_region_name(name)
        saved, again = (
            any(fnmatch.fnmatch(full, pattern) for pattern in patterns)
            for patterns in (self._remat_save_patterns, self._remat_recompute_patterns)
        )
        return again or not saved
