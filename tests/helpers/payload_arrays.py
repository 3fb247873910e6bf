"""A payload in one tensor."""

import torch


def whole(payload):
    """Its bytes: the codes, and then the scales."""
    return torch.cat([payload.codes, payload.scales])
