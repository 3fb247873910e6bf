"""What frameworks need. ``import gradckpt`` imports none of them."""

__all__: list[str] = []
