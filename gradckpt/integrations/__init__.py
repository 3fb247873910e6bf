"""What frameworks need. ``import gradckpt`` imports none of them; ``trainer_callback``, which a user imports, does."""

__all__: list[str] = []
