"""What `import gradckpt` changes: one finder, and one callback of transformers;
and the finder itself."""

import importlib
import importlib.machinery
import importlib.util
import logging
import os
import subprocess
import sys
import threading

import pytest
from checkout import ROOT

from gradckpt import _import_hooks
from gradckpt._import_hooks import after_import
from gradckpt.integrations.transformers import trainer_flag


def run(*command, **variables):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.run([sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True, check=False)


# ---- the whole

ORDERS = {"gradckpt first": (), "transformers first": ("transformers.trainer", "transformers.modeling_utils")}


@pytest.mark.parametrize("order", ORDERS)
def test_two_things_differ(order):
    done = run("tests/programs/import_effects.py", "gradckpt", *ORDERS[order])
    assert done.returncode == 0, done.stderr
    changes, _, later = done.stdout.partition("----\n")
    # Our operators in torch's registries, and torch's table of the
    # operators that were looked up, are no effect.
    ours = ("torch.library.", "torch.ops.")
    others = [
        line
        for line in changes.splitlines()
        if not (line.startswith(ours) and "gradckpt" in line) and not line.startswith("torch.jit._builtins._builtin_t")
    ]
    assert len(others) == 1, others
    if order == "transformers first":
        assert others[0].startswith("transformers.trainer.DEFAULT_CALLBACKS.1 new <class 'gradckpt.")
    else:
        assert others[0].startswith("finder.")
        assert " new <gradckpt._import_hooks._AfterImport object" in others[0]
    assert later.splitlines() == ["[]", "['DefaultFlowCallback', 'GradckptFlag']"], "the finder is gone"


# ---- the finder


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """The name of a module that can be imported, and is not yet."""
    (tmp_path / "gradckpt_watched.py").write_text("X = 1\nSPEC, LOADER = __spec__.loader, __loader__\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(_import_hooks, "_finder", _import_hooks._AfterImport())
    yield "gradckpt_watched"
    sys.modules.pop("gradckpt_watched", None)


class Finder:
    """Another's, in front of all that are there."""

    def __init__(self, find):
        self.find = find
        self.asked = 0

    def find_spec(self, name, path=None, target=None):
        if name != "gradckpt_watched":
            return None
        self.asked += 1
        return self.find(name, path, target)


def finders():
    return [finder for finder in sys.meta_path if isinstance(finder, _import_hooks._AfterImport)]


def test_called_once_after_the_module_has_run(watched):
    called = []
    after_import(watched, lambda module: called.append(module.X))
    assert len(finders()) == 1
    module = importlib.import_module(watched)
    assert called == [1]
    assert not finders()
    after_import(watched, called.append)
    assert called == [1, module], "it is there: called at once"
    assert not finders()


def test_several_names_share_a_finder_and_the_last_call_for_a_name_counts(watched):
    called = []
    after_import(watched, lambda module: called.append("first"))
    after_import("gradckpt_no_such_module", lambda module: called.append("other"))
    after_import(watched, lambda module: called.append("last"))
    importlib.import_module(watched)
    assert called == ["last"]
    assert len(finders()) == 1, "for the other name"


def test_module_spec_and_loader_are_as_without_it(watched):
    plain = importlib.import_module(watched)
    del sys.modules[watched]
    called = []
    after_import(watched, called.append)
    looked = importlib.util.find_spec(watched)
    assert watched not in sys.modules, "a look imports nothing"
    assert not called
    assert looked.loader.get_source(watched) == plain.__loader__.get_source(watched)
    module = importlib.import_module(watched)
    assert called == [module]
    assert module.__spec__ == plain.__spec__
    assert type(module.__spec__) is type(plain.__spec__)
    for loader in (looked.loader, module.__loader__, module.__spec__.loader, module.SPEC, module.LOADER):
        assert type(loader) is type(plain.__loader__)
    for loader in (module.__loader__, module.__spec__.loader, module.SPEC, module.LOADER):
        assert vars(loader) == vars(plain.__loader__), "ours has stepped back before the module runs"


def test_the_spec_of_another_finder_is_used_and_stays_what_it_is(watched):
    found = importlib.util.find_spec(watched)
    loader, before = found.loader, dict(vars(found))
    other = Finder(lambda *_: found)
    sys.meta_path.insert(0, other)
    called = []
    after_import(watched, called.append)
    assert sys.meta_path[1] is other
    assert importlib.import_module(watched).__loader__ is loader
    assert other.asked == 1
    assert len(called) == 1
    assert vars(found) == before
    assert found.loader is loader
    assert "exec_module" not in vars(loader)


def ask_all(name, *_):
    """As wrapt's finder does, which then answers None."""
    asking.append(name)
    try:
        return importlib.util.find_spec(name) if len(asking) == 1 else None
    finally:
        asking.pop()


def ask_others(*arguments):
    """As ours does."""
    others = (finder for finder in sys.meta_path if getattr(finder, "find", None) is not ask_others)
    specs = (finder.find_spec(*arguments) for finder in others)
    return next(filter(None, specs), None)


asking = []


@pytest.mark.parametrize("place", [0, 1], ids=["before ours", "behind ours"])
@pytest.mark.parametrize("find", [ask_all, ask_others])
def test_a_finder_that_asks_finders(watched, find, place, caplog):
    called = []
    after_import(watched, called.append)
    sys.meta_path.insert(place, Finder(find))
    module = importlib.import_module(watched)
    assert called == [module]
    assert not finders()
    assert not caplog.text, "no endless recursion on the way"


def raise_it(*_):
    raise RuntimeError("the finder is broken")


class Uncopied:
    """A loader that makes trouble when it is copied."""

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.X = 2

    def __copy__(self):
        raise RuntimeError("not to be copied")


def test_a_loader_that_cannot_be_followed_loads(watched, caplog):
    sys.meta_path.insert(0, Finder(lambda name, *_: importlib.util.spec_from_loader(name, Uncopied())))
    called = []
    after_import(watched, called.append)
    with caplog.at_level(logging.WARNING, "gradckpt"):
        assert importlib.import_module(watched).X == 2
    assert not called
    assert "cannot follow the import of gradckpt_watched" in caplog.text


def test_the_error_of_another_finder_is_the_others(watched):
    sys.meta_path.insert(0, Finder(raise_it))
    after_import(watched, lambda module: None)
    with pytest.raises(RuntimeError, match="the finder is broken") as raised:
        importlib.import_module(watched)
    assert "gradckpt/_import_hooks" not in str(raised.traceback[-2].path), "raised as without ours"


def test_what_fails_afterwards_is_logged_and_the_import_is_not_disturbed(watched, caplog):
    after_import(watched, raise_it)
    assert importlib.import_module(watched).X == 1
    assert "gradckpt: a hook on the import of gradckpt_watched failed: the finder is broken" in caplog.text
    assert not finders()


@pytest.mark.parametrize("callbacks", ["", "DEFAULT_CALLBACKS = ()"])
def test_a_trainer_module_that_is_not_what_it_was(watched, callbacks, tmp_path, caplog):
    (tmp_path / "gradckpt_watched.py").write_text(f"X = 1\n{callbacks}\n")
    after_import(watched, trainer_flag._install)
    assert importlib.import_module(watched).X == 1
    assert (
        "has no list DEFAULT_CALLBACKS, so the Trainer's flag does nothing; call gradckpt.enable(model)" in caplog.text
    )


def test_an_import_that_fails_is_followed_when_it_is_tried_again(watched, tmp_path):
    called = []
    after_import(watched, called.append)
    path = tmp_path / "gradckpt_watched.py"
    good = path.read_text()
    path.write_text("1 / 0  # of another length, so that no cached code is taken for it")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(watched)
    assert not called
    path.write_text(good)
    module = importlib.import_module(watched)
    assert called == [module]


def test_another_thread_that_goes_through_the_finders_misses_none(watched, tmp_path):
    """Our finder leaves the list while that thread's import stands behind it."""
    (tmp_path / "gradckpt_innocent.py").write_text("X = 1\n")
    reached, left = threading.Event(), threading.Event()

    class Slow:
        def find_spec(self, name, path=None, target=None):
            if name == "gradckpt_innocent":
                reached.set()
                left.wait(20)

    after_import(watched, lambda module: None)
    sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), Slow())
    module = importlib.util.module_from_spec(importlib.util.find_spec(watched))
    found = []
    thread = threading.Thread(target=lambda: found.append(importlib.util.find_spec("gradckpt_innocent")))
    thread.start()
    assert reached.wait(20)
    module.__spec__.loader.exec_module(module)
    assert not finders()
    left.set()
    thread.join()
    assert found[0] is not None


def test_the_finder_of_a_module_that_was_loaded_before_is_replaced(watched, monkeypatch):
    calls = []
    after_import(watched, lambda module: calls.append("before"))
    monkeypatch.setattr(_import_hooks, "_finder", _import_hooks._AfterImport())
    after_import(watched, lambda module: calls.append("now"))
    assert len(finders()) == 1
    importlib.import_module(watched)
    assert calls == ["now"]
