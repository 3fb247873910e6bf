"""What frameworks need. ``import gradckpt`` imports none of them."""
