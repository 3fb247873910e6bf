"""``gradckpt run --compress int8 train.py args...``: a script as it is,
with compressed checkpoints.

``python -m gradckpt.run`` is the same, for torchrun and accelerate. Runs the script (or, with
``-m``, a module; or a console script in Python that is on ``PATH``) as ``__main__`` of this process
under :class:`gradckpt.patched`, and prints to stderr what that did when the process ends. Processes
that the script starts with multiprocessing are covered: forked ones inherit the patch, spawned ones
are told of it in the data that multiprocessing prepares them with.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import functools
import json
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradckpt import _import_hooks, _script
from gradckpt._codec_names import ALIASES, for_activations
from gradckpt._compression import CompressionConfig, parse_compress
from gradckpt._engine.places import place_of
from gradckpt._engine.selective import contexts_of
from gradckpt._offload import PLACES
from gradckpt._patching import patched
from gradckpt._stats import format_bytes

__all__ = ["main"]

#: Options that are followed by a value.
_VALUED = ("--compress", "--policy", "--offload", "--min-numel", "--stats")

#: Of those, what each takes, and one that would do.
_TAKES = {
    "--compress": ("a codec", "int8"),
    "--policy": ("a policy", "save_matmuls"),
    "--offload": ("a place", "cpu"),
    "--min-numel": ("a number", "1024"),
}

#: Options of no parser here, and what they mean.
_MEANT = {"--codec": "--compress"}

#: Options that change the training. Those of the report are words that scripts have, too.
_CHANGING = ("--compress", "--policy", "--offload", "--fake-quantize", "--min-numel")

_EXAMPLES = """examples:
  gradckpt run train.py --lr 1e-4
  gradckpt run --compress int4 --fake-quantize -m package.train --lr 1e-4
  torchrun --nproc-per-node 8 -m gradckpt.run --compress int8 train.py --lr 1e-4
  accelerate launch -m gradckpt.run --compress int8 train.py --lr 1e-4

The script has to use activation checkpointing: torch.utils.checkpoint, activation_checkpointing=True of the
Hugging Face Trainer, set_grad_checkpointing() of timm, and so on. The launcher changes what those calls keep."""


# ---- the command line ----


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options before the script."""
    parser = argparse.ArgumentParser(
        prog="gradckpt run",
        usage="%(prog)s [options] script.py [arguments of the script]\n"
        "       %(prog)s [options] -m module [arguments of the module]\n"
        "       %(prog)s [options] program [arguments of the program]",
        description="Run a training script as it is, with the inputs of checkpointed regions kept compressed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = ", ".join([*for_activations(), *ALIASES])
    parser.add_argument("--compress", metavar="CODEC", default="int8", help=f"none, or one of {names}; default int8")
    parser.add_argument(
        "--policy",
        metavar="POLICY",
        help='keep outputs inside the regions, too: "save_matmuls:int8"; with --compress none "save_attention"',
    )
    parser.add_argument(
        "--offload", metavar="PLACE", choices=PLACES, help="where checkpoints live meanwhile: cpu (host memory) or disk"
    )
    parser.add_argument("--fake-quantize", action="store_true", help="let the forward, too, run on the restored values")
    parser.add_argument(
        "--min-numel", metavar="N", type=int, help="keep tensors of fewer values as they are; default 1024"
    )
    parser.add_argument(
        "--stats", metavar="FILE", help="write what happened as JSON; with several ranks, that of rank 0"
    )
    parser.add_argument("--quiet", action="store_true", help="print no report and no hints")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse options; of an unknown one, name the nearest."""
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        known, name = parser._option_string_actions, unknown[0].partition("=")[0]
        near = [each for each in (_MEANT.get(name),) if each in known] or difflib.get_close_matches(name, known, 1)
        meant = f"did you mean {near[0]}?" if near else f"{parser.prog} --help lists the options"
        parser.error(f"unknown option {unknown[0]}; {meant}")
    return given


def _split(argv: Sequence[str], valued: Sequence[str] = _VALUED) -> tuple[list[str], list[str]]:
    """Return the options and the rest, which begins with the script.

    Nothing after the script is ours, not even a ``--``.
    """
    i = 0
    while i < len(argv) and argv[i].startswith("-") and argv[i] != "-":
        if argv[i] == "--":
            return list(argv[:i]), list(argv[i + 1 :])
        if re.match("-m.", argv[i]):
            return [*argv[:i], "-m"], [argv[i][2:], *argv[i + 1 :]]
        i += 2 if argv[i] in valued else 1
    return list(argv[:i]), list(argv[i:])


def _find_slip(options: list[str], rest: list[str]) -> str | None:
    """Return what is wrong with the form of the command, and the line to write."""
    for i, option in enumerate(options[:-1]):
        value = options[i + 1]
        if option in _TAKES and re.search(r"^--?[a-z]|\.pyz?$", value):
            what, such = _TAKES[option]
            line = ["gradckpt", "run", *options[: i + 1], such, *options[i + 1 :], *rest]
            return f"{option} takes {what}, which {value} is not; write:\n  {shlex.join(line)}"
    if rest and "-m" not in options and _is_interpreter(rest[0]):
        flags, script = _split(rest[1:], ("-W", "-X"))
        module = ["-m"] * ("-m" in flags)
        flags = [each for each in flags if each != "-m"]
        command = [rest[0], *flags, "-m", "gradckpt", "run"] if flags else ["gradckpt", "run"]
        line = [*command, *options, *module, *(script or ["script.py"])]
        return f"{rest[0]} is not needed, the script runs in this Python; write:\n  {shlex.join(line)}"
    return None


def _is_interpreter(program: str) -> bool:
    """Return whether it is Python, and no script or folder of that name."""
    is_script = os.path.isdir(program) or (os.path.exists(program) and not os.access(program, os.X_OK))
    return re.fullmatch(r"python[\d.]*", os.path.basename(program)) is not None and not is_script


def _config(given: argparse.Namespace) -> CompressionConfig | None:
    """Return the config that the options ask for.

    Raises:
        ValueError: The options do not fit together; the message is the sentence for the user.
    """
    config = parse_compress(None if given.compress.lower() == "none" else given.compress)
    contexts_of(given.policy)
    place_of(given.offload)
    fields = {} if given.min_numel is None else {"min_numel": given.min_numel}
    if given.fake_quantize:
        fields["fake_quantize"] = True
    if config is None and fields:
        names = " and ".join("--" + name.replace("_", "-") for name in fields)
        raise ValueError(f"{names} would do nothing with --compress none")
    if config is not None and fields:
        config = CompressionConfig.from_dict({**config.to_dict(), **fields})
    return config


def _check_stats(given: argparse.Namespace) -> None:
    """``ValueError`` when there is nowhere to write them."""
    if given.stats is not None and not os.path.isdir(os.path.dirname(os.path.abspath(given.stats))):
        raise ValueError(f"--stats {given.stats}: there is no such folder")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script. Comes back only if it ends without ``sys.exit``."""
    own = parser()
    options, rest = _split(sys.argv[1:] if argv is None else argv)
    slip = _find_slip(options, rest)
    if slip is not None:
        own.error(slip)
    given = parse(own, options)
    if not rest:
        own.error("which module?" if given.module else "which script?")
    given.script, given.arguments = rest[0], rest[1:]
    if given.module and not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # as python -m has it; of a console script it is the script's folder
    try:
        config = _config(given)
        given.script = _script.find(given)
        _check_stats(given)
    except (ValueError, TypeError) as error:
        own.error(str(error).removeprefix("gradckpt: "))
    if given.stats is not None:
        given.stats = os.path.abspath(given.stats)
        if _rank()[0] == 0 and os.path.exists(given.stats):
            os.remove(given.stats)
    run = _Run(config, given.policy, given.offload, given.stats, given.quiet)
    if not given.quiet and _rank()[0] == 0:
        _hint_at_late_options(options, given.arguments)
    run.begin()
    os.register_at_fork(after_in_parent=run.count_child)
    atexit.register(run.end)  # registered first, so it runs last: after the script's own handlers and its threads
    try:
        if given.module:
            _script.run_module(given.script, given.arguments)
        else:
            _script.run_script(given.script, given.arguments)
    except BaseException as error:
        run.end_of_script = _end_by(error)
        _script.hide_own_frames()
        raise


def _hint_at_late_options(options: list[str], arguments: list[str]) -> None:
    """Name what looks like an option of ours, was given to the script, and was not given to us."""
    given = {each.partition("=")[0] for each in options}
    late = [each for each in arguments if each.partition("=")[0] in {*_CHANGING} - given]
    if late:
        print(
            f"gradckpt run: after the script, so given to it: {', '.join(late)}; options of gradckpt come before it",
            file=sys.stderr,
            flush=True,
        )


def _end_by(error: BaseException) -> str:
    """Return what ended the script; nothing for a ``sys.exit()`` that means success."""
    if not isinstance(error, SystemExit):
        return f"by {type(error).__name__}"
    return f"with status {error.code if isinstance(error.code, int) else 1}" if error.code else ""


# ---- one run ----


class _Run:
    """The patch of one process, its children, and the report at the end."""

    def __init__(
        self,
        config: CompressionConfig | None,
        policy: str | None,
        offload: str | None,
        stats: str | None,
        quiet: bool,
    ) -> None:
        self.options = (config, policy, offload, stats, quiet)
        self.stats, self.quiet = stats, quiet
        self.policy, self.offload = policy, offload
        self.patched = patched(config, policy=policy, offload=offload)
        self.end_of_script = ""  # an exception, or a status that is not 0
        self.child = False
        self.children = 0  # started by this process
        self.undo: list[Callable[[], None]] = []
        multiprocessing.util.register_after_fork(self, _Run.begin_in_child)

    def begin(self) -> None:
        """Patch this process, and prepare its children."""
        self.pid = os.getpid()
        self.rank: tuple[int, int] = _rank()
        self.patched.__enter__()  # as a block: the script may start() a patch of its own inside
        hook = register_optimizer_step_post_hook(self.look_at_rank)
        self.undo = [hook.remove, _tell_spawned(self)]

    def begin_in_child(self) -> None:
        """Begin in a forked child (called by multiprocessing) or a spawned one (by
        :func:`_inherit`).
        """
        self.patched.remove()
        for undo in self.undo:
            undo()
        self.child, self.children = True, 0
        self.begin()
        multiprocessing.util.Finalize(None, self.end, exitpriority=0)

    def count_child(self) -> None:
        self.children += 1

    def look_at_rank(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Read the rank while this is possible: at the end, the process group may be gone."""
        if self.rank == (0, 1) and not torch.compiler.is_compiling():
            self.rank = _rank()

    def end(self) -> None:
        """Undo everything and report, unless this process was forked without multiprocessing."""
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
        # If the children of a parent did the work, they have already reported it.
        if self.stats is not None and (counted["calls"] or not os.path.exists(self.stats)):
            self.write(counted, reason)
        if not self.quiet:  # last: stderr may be closed
            print("\n".join(self.report(counted, reason)), file=sys.stderr, flush=True)

    def report(self, counted: dict[str, Any], reason: str | None) -> list[str]:
        config = self.patched.config
        what = config.codec if config is not None else "none"
        what += ", fake-quantized" if config is not None and config.fake_quantize else ""
        what += f", policy {self.policy}" if self.policy else ""
        what += f", offloaded to {self.offload}" if self.offload else ""
        ranks = f", rank {self.rank[0]} of {self.rank[1]}" if self.rank[1] > 1 else ""
        where = f", process {os.getpid()} ({multiprocessing.current_process().name})" if self.child else ""
        lines = [f"gradckpt run ({what}{ranks}{where})"]
        own = counted["regions"] - self.patched._regions
        by_script = f", {own} of them by settings of the script's own" if own > 0 else ""
        ran = f"gradckpt ran {counted['regions']} regions with grad{by_script}"
        lines.append(f"  {counted['calls']} calls of checkpoint; {ran}")
        if counted["compressed"]:
            size, ratio, codecs = format_bytes(counted["bytes_out"]), counted["ratio"], ", ".join(counted["codecs"])
            lines.append(
                f"  compressed {counted['compressed']} of {counted['eligible']} tensors in {codecs}: "
                f"{format_bytes(counted['bytes_in'])} -> {size} ({ratio:.3f}), "
                f"at most {format_bytes(counted['peak_live_bytes'])} at a time"
            )
        elif reason is not None:
            lines += self.why_nothing(counted, reason)
        if config is not None and counted["uncompressed"]:
            kept = ", ".join(f"{name} ({n})" for name, n in counted["uncompressed"].items())
            lines.append(f"  tensors kept as they are: {kept}")
        if counted["reentrant"] and (config is not None or self.policy):
            can = "compress" if config is not None else "follow a policy"
            lines.append(f"  left to torch: calls with use_reentrant=True, which cannot {can}: {counted['reentrant']}")
        if counted["traced"]:
            sizes = format_bytes(counted["compiled_bytes_in"]), format_bytes(counted["compiled_bytes_out"])
            kept = f"; {counted['compiled_tensors']} of their tensors compressed, {' -> '.join(sizes)} per call"
            known = config is not None or counted["compiled_tensors"]  # of a policy's, from a cache, nothing is known
            lines.append(f"  in compiled graphs: {counted['traced']} regions{kept if known else ''}")
        return lines

    def why_nothing(self, counted: dict[str, Any], reason: str) -> list[str]:
        """Return lines for a run that compressed nothing: an accusation only if it trained."""
        nothing = "NOTHING WAS COMPRESSED" if self.patched.config is not None else "THE POLICY DID NOTHING"
        trained = counted["calls"] or counted["regions"] or counted["eligible"] or self.patched._steps
        if self.end_of_script and not (trained and self.end_of_script.startswith("with")):
            return [f"  the script ended {self.end_of_script}, and nothing was compressed until then"]
        if self.children and not counted["calls"]:
            return [
                f"  this process started {self.children} others; those of rank 0 that called checkpoint said so above",
                f"  if none did, {nothing}: {reason}",
            ]
        lines = [f"  {nothing}: {reason}"]
        if not trained:
            lines = ["  no training was seen: no call of checkpoint, no step of a torch optimizer"]
        if not counted["calls"] and not counted["regions"]:
            lines.append("  programs that it starts with subprocess are not reached: start those with gradckpt run")
        return lines

    def write(self, counted: dict[str, Any], reason: str | None) -> None:
        assert self.stats is not None
        config = self.patched.config
        found = {
            "compress": config.to_dict() if config is not None else None,
            "policy": self.policy,
            "offload": self.offload,
            "rank": self.rank[0],
            "world_size": self.rank[1],
            **counted,
            "inactive_reason": reason,
        }
        with open(self.stats, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)
            file.write("\n")


def _rank() -> tuple[int, int]:
    """Return (rank, world size) of the process group if it exists, else of torchrun."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else (0, 1)


# ---- spawned processes ----


def _tell_spawned(run: _Run) -> Callable[[], None]:
    """Add an entry to the data for spawned processes that acts when it is unpickled."""
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


#: Run in a spawned process. Such a process imports torch, and this package with it, only if its
#: work does. Therefore the code that waits for torch is run from its source.
_WAIT = """
import pathlib, pickle
namespace = {{"__name__": "gradckpt._import_hooks"}}
exec(pathlib.Path({source!r}).read_text(encoding="utf-8"), namespace)
namespace["after_import"]("torch", lambda torch: pickle.loads({begin!r})())
"""


class _Inherited:
    """A pickle that begins the same run where it is loaded, once torch is imported."""

    def __init__(self, options: tuple[Any, ...]) -> None:
        self.options = options

    def __reduce__(self) -> Any:
        begin = pickle.dumps(functools.partial(_inherit, *self.options))
        return exec, (_WAIT.format(source=_import_hooks.__file__, begin=begin), {})


_inherited: list[_Run] = []  # multiprocessing refers to it weakly


def _inherit(*options: Any) -> None:
    run = _Run(*options)
    _inherited.append(run)
    run.begin_in_child()


if __name__ == "__main__":
    from gradckpt.run import main as imported  # by its own name: __main__ will be the script

    imported()
