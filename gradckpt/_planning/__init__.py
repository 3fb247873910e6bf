"""What a training step needs, computed before it runs: :func:`gradckpt.plan`."""
