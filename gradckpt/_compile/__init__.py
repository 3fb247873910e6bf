"""Regions under torch.compile."""
