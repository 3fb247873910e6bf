"""``python -m gradckpt.run --compress int8 train.py args...``: a script as it is, with compressed checkpoints.

Runs the script (or, with ``-m``, a module) as ``__main__`` of this process under :class:`gradckpt.patched`, and prints
to stderr what that did when the process ends. Processes that the script starts with multiprocessing are covered: forked
ones inherit the patch, spawned ones are told of it in the data that multiprocessing prepares them with.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import functools
import importlib.machinery
import importlib.util
import json
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradckpt import imports
from gradckpt.config import ALIASES, CompressionConfig, for_activations, parse_compress
from gradckpt.patched import patched
from gradckpt.policies import contexts_of
from gradckpt.stats import format_bytes

__all__ = ["main"]

#: Modules and programs that start the script in processes of their own, where we would not be; what to write instead.
_LAUNCHERS = {
    "torch.distributed.run": "torchrun ... -m",
    "torch.distributed.launch": "torchrun ... -m",
    "torchrun": "torchrun ... -m",
    "accelerate.commands.launch": "accelerate launch ... -m",
    "accelerate.commands.accelerate_cli": "accelerate launch ... -m",
    "accelerate": "accelerate launch ... -m",
    "accelerate-launch": "accelerate launch ... -m",
    "deepspeed": "deepspeed ... --module",
    "deepspeed.launcher.runner": "deepspeed ... --module",
}

#: Options that are followed by a value.
_VALUED = ("--compress", "--policy", "--min-numel", "--stats")

_EXAMPLES = """examples:
  python -m gradckpt.run train.py --lr 1e-4
  python -m gradckpt.run --compress int4 --replay -m package.train --lr 1e-4
  torchrun --nproc-per-node 8 -m gradckpt.run --compress int8 train.py --lr 1e-4
  accelerate launch -m gradckpt.run --compress int8 train.py --lr 1e-4

The script has to use activation checkpointing: torch.utils.checkpoint, gradient_checkpointing=True of the
Hugging Face Trainer, set_grad_checkpointing() of timm, and so on. The launcher changes what those calls keep."""


# ---- the command line ----


def _parser() -> argparse.ArgumentParser:

    parser = argparse.ArgumentParser(
        prog="python -m gradckpt.run",
        usage="%(prog)s [options] script.py [arguments of the script]\n"
        "       %(prog)s [options] -m module [arguments of the module]",
        description="Runs a training script as it is, with the inputs of checkpointed regions kept compressed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = ", ".join([*for_activations(), *ALIASES])
    parser.add_argument("--compress", metavar="CODEC", default="int8", help=f"none, or one of {names}; default int8")
    parser.add_argument(
        "--policy",
        metavar="POLICY",
        help='keep outputs inside the regions, too: "save_attention", "save_matmuls:int8", combined with "|"',
    )
    parser.add_argument("--replay", action="store_true", help="let the forward, too, run on the restored values")
    parser.add_argument(
        "--min-numel", metavar="N", type=int, help="keep tensors of fewer values as they are; default 1024"
    )
    parser.add_argument(
        "--stats", metavar="FILE", help="write what happened as JSON; with several ranks, that of rank 0"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing at the end")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the rest, which begins with the script: nothing after that is ours, not even a ``--``."""
    i = 0
    while i < len(argv) and argv[i].startswith("-") and argv[i] != "-":
        if argv[i] == "--":
            return list(argv[:i]), list(argv[i + 1 :])
        i += 2 if argv[i] in _VALUED else 1
    return list(argv[:i]), list(argv[i:])


def _config(given: argparse.Namespace) -> CompressionConfig | None:
    """``ValueError`` with the sentence for the user."""
    config = parse_compress(None if given.compress.lower() == "none" else given.compress)
    contexts_of(given.policy)
    asked = {} if given.min_numel is None else {"min_numel": given.min_numel}
    if given.replay:
        asked["replay"] = True
    if config is None and asked:
        names = " and ".join("--" + name.replace("_", "-") for name in asked)
        raise ValueError(f"{names} would do nothing with --compress none")
    if config is not None and asked:
        config = CompressionConfig.from_dict({**config.to_dict(), **asked})
    return config


def _check_script(given: argparse.Namespace) -> None:
    """``ValueError`` when it cannot be run from here."""
    script = given.script
    launcher = _LAUNCHERS.get(script if given.module else os.path.basename(script))
    if launcher is not None:
        raise ValueError(
            f"{script} starts the script in processes of its own, which this one cannot reach; put it first:\n"
            f"  {launcher} gradckpt.run --compress {given.compress} script.py [arguments of the script]"
        )
    if given.module:
        if importlib.util.find_spec(script.partition(".")[0]) is None:
            raise ValueError(f"there is no module {script!r}")
    elif not os.path.exists(script):
        raise ValueError(f"there is no script {script!r} (from {os.getcwd()})")
    if given.stats is not None and not os.path.isdir(os.path.dirname(os.path.abspath(given.stats))):
        raise ValueError(f"--stats {given.stats}: there is no such folder")


def main(argv: Sequence[str] | None = None) -> None:
    """What ``python -m gradckpt.run`` does. Comes back only if the script ends without ``sys.exit``."""
    parser = _parser()
    options, rest = _split(sys.argv[1:] if argv is None else argv)
    given = parser.parse_args(options)
    if not rest:
        parser.error("which module?" if given.module else "which script?")
    given.script, given.arguments = rest[0], rest[1:]
    try:
        config = _config(given)
        _check_script(given)
    except (ValueError, TypeError) as error:
        parser.error(str(error).removeprefix("gradckpt: "))
    if given.stats is not None:
        given.stats = os.path.abspath(given.stats)
        if _rank()[0] == 0 and os.path.exists(given.stats):
            os.remove(given.stats)
    run = _Run(config, given.policy, given.stats, given.quiet)
    run.begin()
    os.register_at_fork(after_in_parent=run.count_child)
    atexit.register(run.end)  # first in, so last out: after the script's own, and after its threads
    try:
        if given.module:
            _run_module(given.script, given.arguments)
        else:
            _run_script(given.script, given.arguments)
    except BaseException:
        _hide_own_frames()
        raise


# ---- the script as __main__ ----


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv[:] = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_script(script: str, arguments: list[str]) -> None:
    """As ``python script``, but that the interpreter runs already."""
    sys.argv[:] = [script, *arguments]
    path = os.path.join(os.getcwd(), script)
    if os.path.isdir(path) or path.endswith((".pyc", ".zip", ".pyz")):
        runpy.run_path(script, run_name="__main__")
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __cached__=None, __loader__=loader, __builtins__=builtins)
    sys.modules["__main__"] = module  # stays: threads, exit handlers and pickles of the script want it
    exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), vars(module))


def _hide_own_frames() -> None:
    """The traceback of an exception that ends the script starts in the script."""
    own = {_run_script.__code__.co_filename, runpy.run_module.__code__.co_filename}
    show = sys.excepthook  # perhaps the script's own

    def excepthook(kind: Any, error: BaseException, traceback: Any) -> None:
        while traceback is not None and traceback.tb_frame.f_code.co_filename in own:
            traceback = traceback.tb_next
        show(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = excepthook


# ---- one run ----


class _Run:
    """The patch of one process, its children, and what is said at the end."""

    def __init__(self, config: CompressionConfig | None, policy: str | None, stats: str | None, quiet: bool) -> None:
        self.options = (config, policy, stats, quiet)
        self.stats, self.quiet = stats, quiet
        self.policy = policy
        self.patched = patched(config, policy=policy)
        self.child = False
        self.children = 0  # started by this process
        self.undo: list[Callable[[], None]] = []
        multiprocessing.util.register_after_fork(self, _Run.begin_in_child)

    def begin(self) -> None:
        """The patch, and what tells children of it."""
        self.pid = os.getpid()
        self.rank: tuple[int, int] = _rank()
        self.patched.__enter__()  # a block: the script may start() one of its own inside
        hook = register_optimizer_step_post_hook(self.look_at_rank)
        self.undo = [hook.remove, _tell_spawned(self)]

    def begin_in_child(self) -> None:
        """Called by multiprocessing in what it forked, by :func:`_inherit` in what it spawned."""
        self.patched.remove()
        for undo in self.undo:
            undo()
        self.child, self.children = True, 0
        self.begin()
        multiprocessing.util.Finalize(None, self.end, exitpriority=0)

    def count_child(self) -> None:
        self.children += 1

    def look_at_rank(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """While it can be asked: at the end, the process group may be gone."""
        if self.rank == (0, 1) and not torch.compiler.is_compiling():
            self.rank = _rank()

    def end(self) -> None:
        """Undoes everything and reports; not in a process that somebody forked without multiprocessing."""
        if not self.patched.active or os.getpid() != self.pid:
            return
        self.look_at_rank(None, (), {})
        reason = self.patched.inactive_reason
        self.patched.remove()
        for undo in self.undo:
            undo()
        counted = self.patched.stats()
        if self.rank[0] or (self.child and not counted["calls"]):
            return
        # Of a parent whose children did the work, there is nothing to say that they have not said.
        if self.stats is not None and (counted["calls"] or not os.path.exists(self.stats)):
            self.write(counted, reason)
        if not self.quiet:  # last: stderr may be closed
            print("\n".join(self.report(counted, reason)), file=sys.stderr, flush=True)

    def report(self, counted: dict[str, Any], reason: str | None) -> list[str]:
        config = self.patched.config
        what = config.codec if config is not None else "none"
        what += ", replay" if config is not None and config.replay else ""
        what += f", policy {self.policy}" if self.policy else ""
        ranks = f", rank {self.rank[0]} of {self.rank[1]}" if self.rank[1] > 1 else ""
        where = f", process {os.getpid()} ({multiprocessing.current_process().name})" if self.child else ""
        nothing = "NOTHING WAS COMPRESSED" if config is not None else "THE POLICY DID NOTHING"
        lines = [f"gradckpt.run ({what}{ranks}{where})"]
        lines.append(f"  {counted['calls']} calls of checkpoint; gradckpt ran {counted['regions']} regions with grad")
        if counted["compressed"]:
            size, ratio = format_bytes(counted["bytes_out"]), counted["ratio"]
            lines.append(
                f"  compressed {counted['compressed']} of {counted['asked']} tensors: "
                f"{format_bytes(counted['bytes_in'])} -> {size} ({ratio:.3f}), "
                f"at most {format_bytes(counted['peak_live_bytes'])} at a time"
            )
        elif reason is not None and self.children and not counted["calls"]:
            lines.append(
                f"  this process started {self.children} others; those of rank 0 that called checkpoint said so above"
            )
            lines.append(f"  if none did, {nothing}: {reason}")
        elif reason is not None:
            lines.append(f"  {nothing}: {reason}")
        if config is not None and counted["kept"]:
            kept = ", ".join(f"{name} ({n})" for name, n in counted["kept"].items())
            lines.append(f"  tensors kept as they are: {kept}")
        if counted["reentrant"] and (config is not None or self.policy):
            can = "compress" if config is not None else "follow a policy"
            lines.append(f"  left to torch: {counted['reentrant']} calls with use_reentrant=True, which cannot {can}")
        if counted["traced"]:
            sizes = format_bytes(counted["compiled_bytes_in"]), format_bytes(counted["compiled_bytes_out"])
            kept = f"{counted['compiled_tensors']} of their tensors compressed, {' -> '.join(sizes)} per call"
            lines.append(f"  in compiled graphs: {counted['traced']} regions; {kept}")
        return lines

    def write(self, counted: dict[str, Any], reason: str | None) -> None:
        assert self.stats is not None
        config = self.patched.config
        found = {
            "compress": config.to_dict() if config is not None else None,
            "policy": self.policy,
            "rank": self.rank[0],
            "world_size": self.rank[1],
            **counted,
            "inactive_reason": reason,
        }
        with open(self.stats, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)
            file.write("\n")


def _rank() -> tuple[int, int]:
    """(rank, world size): of the process group if there is one, else of torchrun's variables."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else (0, 1)


# ---- spawned processes ----


def _tell_spawned(run: _Run) -> Callable[[], None]:
    """From now on the data for a spawned process carries one more entry, which acts when it is unpickled."""
    spawn: Any = multiprocessing.spawn
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        run.count_child()
        return {**original(name), "gradckpt": _Inherited(run.options)}

    def undo() -> None:
        if spawn.get_preparation_data is get_preparation_data:
            spawn.get_preparation_data = original

    spawn.get_preparation_data = get_preparation_data
    return undo


#: Run in a spawned process. It imports torch only if its work does, and this package with it; so what waits for that is
#: run by its source.
_WAIT = """
import pathlib, pickle
room = {{"__name__": "gradckpt.imports"}}
exec(pathlib.Path({source!r}).read_text(encoding="utf-8"), room)
room["after_import"]("torch", lambda torch: pickle.loads({begin!r}))
"""


class _Inherited:
    """In a pickle: begins the same run where it is loaded, once torch is there."""

    def __init__(self, options: tuple[Any, ...]) -> None:
        self.options = options

    def __reduce__(self) -> Any:
        begin = pickle.dumps(_Begin(self.options))
        return exec, (_WAIT.format(source=imports.__file__, begin=begin), {})


class _Begin:
    """In a pickle: begins the run."""

    def __init__(self, options: tuple[Any, ...]) -> None:
        self.options = options

    def __reduce__(self) -> Any:
        return _inherit, self.options


_inherited: list[_Run] = []  # multiprocessing refers to it weakly


def _inherit(config: CompressionConfig | None, policy: str | None, stats: str | None, quiet: bool) -> None:
    run = _Run(config, policy, stats, quiet)
    _inherited.append(run)
    run.begin_in_child()


if __name__ == "__main__":
    from gradckpt.run import main as imported  # by its own name: __main__ will be the script

    imported()
