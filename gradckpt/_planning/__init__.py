"""A training step on paper: a model from its config, devices, sizes; nothing is computed."""
