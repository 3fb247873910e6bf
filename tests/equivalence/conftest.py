"""Torch's first steps in a process are not like the later ones: they load modules,
with warnings and a few leaks.

``pytest tests/equivalence --codec raw`` runs the folder with a codec without loss as the default of
every call. What may come out otherwise then, and has to, is in
tests/helpers/exact_codecs.py.
"""

import warnings
from pathlib import Path

import exact_codecs
import pytest
import torch
import torch.utils.checkpoint
from exact_codecs import difference_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp

for reentrant in (False, True):
    x = torch.ones(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=reentrant).backward()

with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    pass
profile.events()  # before 2.13, with a warning


def pytest_addoption(parser):
    parser.addoption("--codec", choices=exact_codecs.CONFIGS, help="as the default of every call")


def pytest_configure(config):
    if config.getoption("--codec", None) is not None:
        exact_codecs.exchange_defaults(exact_codecs.CONFIGS[config.getoption("--codec")])


def pytest_collection_modifyitems(config, items):
    if config.getoption("--codec", None) is None:
        return
    from behaviours import OtherEvents  # looks up the functions, which are exchanged by now

    for item in items:
        found = difference_of(item.name) if item.path.parent == Path(__file__).parent else None
        if found is not None:
            raises = BaseException if found.values else OtherEvents
            item.add_marker(pytest.mark.xfail(reason=found.why, raises=raises, strict=True))
