"""Code for single frameworks. ``import gradckpt`` imports none of them."""

__all__: list[str] = []
