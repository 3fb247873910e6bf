"""Print what the import of a module changes in other packages, in this process; then what is left
of gradckpt once transformers' Trainer is there.

Arguments: the module, and modules to import before it.
"""

import atexit
import collections
import gc
import importlib
import logging
import signal
import sys
import threading
import types
import warnings
import weakref

#: Whose attributes are compared, with what is in their containers.
LIBRARIES = ("accelerate", "copyreg", "multiprocessing", "numpy", "threading", "torch", "transformers")

MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType)
MAPPINGS = (*MAPPINGS, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
SEQUENCES = (list, tuple, collections.deque)
SETS = (set, frozenset, weakref.WeakSet)


def interpreter():
    """What of the interpreter an import could change."""
    yield "sys", {name: getattr(sys, name) for name in ("path", "path_hooks", "warnoptions")}
    yield "finder", {id(finder): finder for finder in sys.meta_path}
    yield "meta_path", {"list": sys.meta_path}
    yield "hooks", [sys.excepthook, sys.unraisablehook, sys.displayhook, sys.gettrace(), sys.getprofile()]
    yield "streams", [sys.stdin, sys.stdout, sys.stderr]
    yield "limits", [sys.getrecursionlimit(), str(sys.getswitchinterval()), atexit._ncallbacks()]
    yield "warnings", {name: getattr(warnings, name) for name in ("filters", "showwarning", "formatwarning")}
    yield "gc", [gc.callbacks, gc.isenabled(), str(gc.get_threshold())]
    yield "signal", {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield "logging", [logging.root.level, logging.root.handlers, logging.root.filters, logging.getLoggerClass()]
    yield "threads", threading.enumerate()


def flatten(path, value, found, depth):
    """Every value by its path; they are held, so that no address is used again."""
    found[path] = value
    if not depth:
        return
    if type(value) in MAPPINGS:
        inside = list(value.items())
    elif type(value) in SEQUENCES:
        inside = enumerate(list(value))
    elif type(value) in SETS:
        inside = [(id(each), each) for each in list(value)]
    else:
        return
    for key, each in inside:
        flatten((*path, key if type(key) in (int, str, tuple) else id(key)), each, found, depth - 1)


def snapshot():
    found = {}
    for name, value in interpreter():
        flatten((name,), value, found, 1 if name == "meta_path" else 3)
        del found[(name,)]  # made for this
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in LIBRARIES and isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                flatten((module_name, name), value, found, 2)
    return found


def main():
    of, *first = sys.argv[1:]
    for name in ("torch", *first):
        importlib.import_module(name)
    before = snapshot()
    importlib.import_module(of)
    after = snapshot()
    nothing = object()
    for path in [*before, *(path for path in after if path not in before)]:
        old, new = before.get(path, nothing), after.get(path, nothing)
        if old is not new and not (type(old) is type(new) and type(old) in (int, str, float) and old == new):
            what = "new" if old is nothing else "gone" if new is nothing else "changed"
            print(".".join(map(str, path)), what, "" if new is nothing else repr(new)[:200].replace("\n", " "))
    print("----")
    trainer, _ = (importlib.import_module(f"transformers.{name}") for name in ("trainer", "modeling_utils"))
    print([type(finder).__name__ for finder in sys.meta_path if type(finder).__module__.startswith("gradckpt")])
    print([callback.__name__ for callback in trainer.DEFAULT_CALLBACKS])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
