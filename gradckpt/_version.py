"""The version, which pyproject.toml reads and graph caches depend on."""

__version__ = "0.1.0"
