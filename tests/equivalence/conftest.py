"""Torch's first steps in a process are not like the later ones: they load modules, with warnings and a few leaks."""

import warnings

import torch
import torch.utils.checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp

for reentrant in (False, True):
    x = torch.ones(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=reentrant).backward()
