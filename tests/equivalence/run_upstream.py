"""PyTorch's own tests of checkpointing, with our functions in place: a pytest plugin, by hand.

    PYTHONPATH=.:tests/helpers:tests/equivalence python -m pytest -p run_upstream TEST_FILES
    PYTHONPATH=.:tests/helpers:tests/equivalence python -m pytest -p run_upstream --ours TEST_FILES

PyTorch's test files are not part of this repository: give those of a checkout that fits the
installed torch (such as ``test/test_autograd.py``, ``test/test_utils.py`` and
``test/distributed/fsdp/test_checkpoint_wrapper.py``), and install what they import. What fails in
the second run alone is ours; what fails in both, the environment (no GPU, another version of
torch). ``--with raw`` exchanges the function by ours with a codec without loss.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
import types
import unittest
from typing import Any

# A test is taken when its name, its class or its source says that it is about checkpointing.
SELECTED_NAME = re.compile(r"checkpoint|early_stop|_ac_|recompute", re.IGNORECASE)
SELECTED_SOURCE = re.compile(
    r"\b(checkpoint|checkpoint_sequential|checkpoint_wrapper|apply_activation_checkpointing)\("
)
# What is left out although it matches: torch.compile, which has tests of its own, the other
# checkpoints (files on disk), and what calls a private generator of torch.
EXCLUDED = re.compile(
    r"/(dynamo|inductor|export|functorch|higher_order_ops|compile)/|/distributed/(checkpoint|_shard)/"
    r"|/distributed/_composable/test_checkpoint\.py|[Dd]ynamo|_compile|state_dict|load_checkpoint|save_checkpoint"
)


def stub_expecttest() -> None:
    """torch's test classes derive from one class of a package that torch does not depend on."""
    if importlib.util.find_spec("expecttest") is not None:
        return

    class ExpectTestCase(unittest.TestCase):
        longMessage = True

        def assertExpectedInline(self, actual: str, expect: str, skip: int = 0) -> None:
            assert actual.strip() == inspect.cleandoc(expect).strip()

    module: Any = types.ModuleType("expecttest")
    module.TestCase = ExpectTestCase
    module.ACCEPT = False
    sys.modules["expecttest"] = module


def put_ours_in_place(codec: str | None) -> None:
    """Replace torch's functions wherever torch already holds them."""
    import torch.utils.checkpoint as torch_checkpoint
    from exact_codecs import CONFIGS, by_default

    import gradckpt.compat

    ours: dict[str, Any] = {name: getattr(gradckpt.compat, name) for name in ("checkpoint", "checkpoint_sequential")}
    if codec:
        ours["checkpoint"] = functools.partial(by_default, CONFIGS[codec], buffers="torch")
    theirs = {id(getattr(torch_checkpoint, name)): name for name in ours}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").split(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in theirs:
                setattr(module, attribute, ours[theirs[id(value)]])


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--ours", action="store_true", help="gradckpt.compat in place of torch's functions")
    parser.addoption("--with", dest="of_ours", help="of ours: raw and others of exact_codecs.py")


def pytest_configure(config: Any) -> None:
    stub_expecttest()
    if config.getoption("--ours"):
        put_ours_in_place(config.getoption("of_ours"))


def source_of(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    def is_wanted(item: Any) -> bool:
        about = SELECTED_NAME.search(item.name) or SELECTED_SOURCE.search(source_of(item.function))
        return bool(about) and not EXCLUDED.search(f"{item.path.as_posix()} {item.nodeid}")

    wanted = [item for item in items if is_wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted
