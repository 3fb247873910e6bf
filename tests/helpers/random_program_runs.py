"""What running a random program shows, and the comparison of two runs.

``python random_program_runs.py 'Program(...)'`` runs one under torch's checkpoint and under ours.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
import weakref
from collections import Counter, namedtuple
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import behaviours
import torch
import torch.utils.checkpoint as torch_checkpoint
from nestings import Tail
from random_operators import BETWEEN, CONTEXTS, CUSTOM, ENDINGS, IN_PLACE, OPERATORS, ProgramError, fingerprint, total
from random_programs import Custom, Diverge, InnerGrad, InPlace, Norm, Op, Program, Raise, Region, Scope, features
from torch.utils._pytree import tree_leaves

Pair = namedtuple("Pair", "first second")
# A reentrant recompute that reaches its own node (an input changed in
# place) calls itself for ever, in torch too.
RUNAWAY = 40


# ---- what a program can be seen to do ----


class Logged:
    """A context that says when it is entered and left; as often as one likes."""

    def __init__(self, run: Run, label: str, kind: str) -> None:
        self.run, self.label, self.kind = run, label, kind
        self.entered: list[Any] = []

    def __enter__(self) -> None:
        self.run.note("entered", self.label)
        context = CONTEXTS[self.kind]()
        context.__enter__()
        self.entered.append(context)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.run.note("left", (self.label, kind and kind.__name__))
        self.entered.pop().__exit__(kind, error, traceback)


@contextlib.contextmanager
def one_shot(context: Any) -> Any:
    """What @contextmanager makes can be entered once: a second recompute fails."""
    with context:
        yield


EXCEPTIONS = {"program": ProgramError, "runtime": RuntimeError, "interrupt": KeyboardInterrupt, "exit": GeneratorExit}


class Run:
    """One execution of a program. `log` is what it showed, in order, each with a label."""

    def __init__(self, program: Program, checkpoint: Callable[..., Any]) -> None:
        self.program = program
        self.checkpoint = checkpoint
        self.log: list[tuple[str, Any]] = []
        self.calls: Counter[str] = Counter()
        self.hooked: Counter[str] = Counter()
        self.functions: list[weakref.ref[Any]] = []
        self.alive = 0
        self.inside = 0  # functions of regions that are running
        torch.manual_seed(program.seed)
        values = torch.randn(5, 3, 3)
        self.x, self.y, self.w = (v.clone().requires_grad_() for v in values[:3])
        self.fixed = values[3].clone()
        self.leaves = [self.x, self.y, self.w]
        self.norm = torch.nn.BatchNorm1d(3)

    def note(self, label: str, value: Any) -> None:
        self.log.append((label, value))

    def attempt(self, label: str, function: Callable[[], Any]) -> Any:
        """The result; of an exception, class and text go to the log."""
        try:
            return function()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not str(error).startswith("call"):
                raise
            cause = type(error.__cause__).__name__
            self.note(label, ("raised", type(error).__module__, type(error).__name__, str(error), cause))
            return None

    # -- statements --

    def block(self, body: tuple[Any, ...], env: list[torch.Tensor], function: str) -> None:
        for node in body:
            getattr(self, "do_" + type(node).__name__.lower())(node, env, function)

    def do_op(self, node: Op, env: list[torch.Tensor], function: str) -> None:
        env.append(OPERATORS[node.name](pick(env, node.a), pick(env, node.b)))

    def do_inplace(self, node: InPlace, env: list[torch.Tensor], function: str) -> None:
        target = pick(env, node.a)
        if not node.strict:
            target = changeable(target)
        IN_PLACE[node.name](target, pick(env, node.b))
        env.append(target)

    def do_custom(self, node: Custom, env: list[torch.Tensor], function: str) -> None:
        a = pick(env, node.a)
        result = CUSTOM[node.name].apply(changeable(a) if node.name == "changes input" else a, pick(env, node.b))
        env.extend(result if isinstance(result, tuple) else [result])

    def do_norm(self, node: Norm, env: list[torch.Tensor], function: str) -> None:
        env.append(self.norm(pick(env, node.a).float()))

    def do_innergrad(self, node: InnerGrad, env: list[torch.Tensor], function: str) -> None:
        a, b = pick(env, node.a), pick(env, node.b)
        if not (a.requires_grad and b.requires_grad and torch.is_grad_enabled()):
            return
        if node.kind == "backward":
            a.sum().backward()
            return
        if node.kind == "of a new graph":
            a = b.sin() * a.detach()
        flags = {"retain_graph": node.kind != "grad", "create_graph": node.kind == "create_graph"}
        grad = torch.autograd.grad(a.sum(), b, allow_unused=True, **flags)[0]
        if grad is not None:
            env.append(grad)

    def do_diverge(self, node: Diverge, env: list[torch.Tensor], function: str) -> None:
        a = pick(env, node.a)
        if self.calls[function] < node.call:
            result = a.sin()
        elif node.kind == "more":
            result = a.sin().tanh()
        elif node.kind == "fewer":
            result = a + 1
        elif node.kind == "shape":
            result = a[:1].sin().expand(3, 3)
        else:
            result = a.double().sin()
        env.append(result)

    def do_raise(self, node: Raise, env: list[torch.Tensor], function: str) -> None:
        if self.calls[function] == node.call:
            raise EXCEPTIONS[node.kind](f"call {node.call} of {function}")

    def do_scope(self, node: Scope, env: list[torch.Tensor], function: str) -> None:
        with self.context(node.kind):
            self.block(node.body, env, function)

    def context(self, kind: str) -> Any:
        if kind.startswith("hooks"):

            def pack(x: torch.Tensor) -> torch.Tensor:
                self.hooked["pack"] += 1
                return x.clone() if kind == "hooks that clone" else x

            def unpack(x: torch.Tensor) -> torch.Tensor:
                self.hooked["unpack"] += 1
                return x

            return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        return CONTEXTS[kind]()

    def do_region(self, node: Region, env: list[torch.Tensor], function: str) -> None:
        captured = [pick(env, i) for i in node.captured]
        options = {k: v for k, v in node.options._asdict().items() if v is not None and k != "contexts"}
        if node.options.contexts is not None:
            options["context_fn"] = functools.partial(self.make_contexts, node.name, node.options.contexts)

        def body(*args: Any, **kwargs: Any) -> Any:
            self.calls[node.name] += 1
            if self.calls[node.name] > RUNAWAY:
                raise ProgramError(f"{node.name} runs away")
            fixed = self.fixed if node.options.use_reentrant is False else self.fixed.clone()
            inner = [self.w, fixed, *captured]
            inner += [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.inside += 1
            try:
                self.block(node.body, inner, node.name)
            finally:
                self.inside -= 1
            return build(node.result, inner)

        called: Any = body
        if node.callable == "partial":
            called = functools.partial(body)
        elif node.callable == "module":
            called = Tail(body)
        elif node.callable == "method":
            called = Tail(body).forward
        self.functions.append(weakref.ref(body))
        args = [build(tree, env) for tree in node.args]
        kwargs = {name: build(tree, env) for name, tree in node.kwargs}
        result = self.checkpoint(called, *args, **kwargs, **options)
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                env.append(value)
            else:
                self.note(f"result of {node.name}", fingerprint(value))

    def make_contexts(self, name: str, kind: str) -> Any:
        self.note("contexts made", name)
        pair = Logged(self, f"{name} forward", kind), Logged(self, f"{name} recompute", kind)
        return tuple(one_shot(context) for context in pair) if kind == "one shot" else pair

    # -- from the first statement to the last gradient --

    def execute(self) -> Run:
        operators = behaviours.Operators()
        collecting = gc.isenabled()
        gc.disable()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with operators if self.program.count_operators else contextlib.nullcontext():
                    self.forward_and_backward()
            texts = [(w.category.__name__, str(w.message)) for w in caught]
            self.note("warnings", [t for t in texts if "Triggered internally" not in t[1]])
            self.note("operators", dict(Counter(operators.names)))
            self.alive = sum(f() is not None for f in self.functions)
        finally:
            self.leave_no_trace()
            if collecting:
                gc.enable()
        return self

    def forward_and_backward(self) -> None:
        env = [self.x, self.w, self.y]
        self.attempt("forward", lambda: self.block(self.program.body, env, "program"))
        for i, register in enumerate(env):
            self.note(f"register {i}", fingerprint(register))
        self.note_state("after forward")
        self.finish(env)
        self.note("grads", [None if t.grad is None else fingerprint(t.grad) for t in self.leaves])
        self.note_state("after backward")

    def note_state(self, when: str) -> None:
        self.note(f"calls {when}", dict(self.calls))
        self.note(f"outer hooks {when}", dict(self.hooked))
        self.note(f"statistics {when}", [fingerprint(b) for b in self.norm.buffers()])
        self.note(f"rng {when}", hash(bytes(torch.get_rng_state().numpy())))
        ambient = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled())
        modes = (torch._C._len_torch_function_stack(), torch._C._get_graph_exec_group())
        self.note(f"ambient {when}", (*ambient, *modes, hooks_left()))

    def finish(self, env: list[torch.Tensor]) -> None:
        kind, between, outputs = self.program.ending
        chosen = [t for t in env[3:] if t.requires_grad][-outputs:]
        if not chosen:
            self.note("outputs", None)
            return
        if kind != "drop nothing":
            del env[:]
        wrap: Any = contextlib.nullcontext()
        if between in BETWEEN:
            self.attempt("between", lambda: BETWEEN[between](self, chosen))
        elif between != "nothing":
            wrap = CONTEXTS[between]()
        with wrap:
            self.attempt("ending", lambda: ENDINGS[kind](self, chosen))

    def backward(self, label: str, tensors: list[torch.Tensor], **options: Any) -> bool:
        """True when it raised nothing."""
        before = len(self.log)
        self.attempt(label, lambda: total(tensors).backward(**options))
        raised = any(entry[0] == label for entry in self.log[before:])
        self.note(f"{label}: calls", dict(self.calls))
        return not raised

    def leave_no_trace(self) -> None:
        """What a wrong engine leaves behind must not reach the next program."""
        while hooks_left():
            torch._C._autograd._pop_saved_tensors_default_hooks()
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()


def pick(env: list[torch.Tensor], index: int) -> torch.Tensor:
    return env[-1 - index % len(env)]


def build(tree: Any, env: list[torch.Tensor]) -> Any:
    """A container of registers from its description."""
    if isinstance(tree, int):
        return pick(env, tree)
    kind, *items = tree
    if kind == "value":
        return items[0]
    if kind == "mask":
        return pick(env, items[0]) > 0
    if kind == "detached":
        return pick(env, items[0]).detach()
    values = [build(item, env) for item in items]
    if kind == "dict":
        return {f"k{i}": v for i, v in enumerate(values)}
    if kind == "pair":
        return Pair(values, None)
    return tuple(values) if kind == "tuple" else values


def hooks_left() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def changeable(tensor: torch.Tensor) -> torch.Tensor:
    """Return it, unless it must not be changed in place: (a view of) a leaf that requires grad,
    or an expanded tensor."""
    base = tensor if tensor._base is None else tensor._base
    return tensor * 1 if (base.is_leaf and base.requires_grad) or 0 in tensor.stride() else tensor


# ---- two runs ----


torchs = functools.partial(behaviours.call, torch_checkpoint.checkpoint)


def as_told(entry: Any) -> Any:
    """An entry of a log, without the exception of a forward
    where torch does not tell its contexts."""
    name, value = entry
    blind = name == "left" and value[0].endswith(" forward") and value[1] is not None and not behaviours.TELLS_CONTEXTS
    return (name, (value[0], "some exception")) if blind else entry


def noticed(program: Program, mine: Run) -> bool:
    """Did a program whose runs differ raise where torch takes other tensors of the same shape?

    torch does not notice either that an input was written to that it keeps by reference: one in a
    container, or a captured one.
    """
    differs = any(feature.startswith(("Diverge", "in place", "Custom changes input")) for feature in features(program))
    return differs and any("saved other tensors than its forward" in str(event) for event in mine.log)


#: Keywords of checkpoint, not of the function.
KEYWORDS = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state", "buffers")


def plain(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """No checkpoint."""
    return function(*args, **{name: value for name, value in options.items() if name not in KEYWORDS})


def writes_in_inner_region(body: tuple[Any, ...], depth: int = 0) -> bool:
    """May an inner region write into what it gets? Done twice, that may be the same by chance."""
    for node in body:
        if isinstance(node, (InPlace, Custom)) and depth > 1:
            return True
        if writes_in_inner_region(getattr(node, "body", ()), depth + isinstance(node, Region)):
            return True
    return False


def overwritten(program: Program, mine: Run, theirs: Run) -> bool:
    """Did a region raise since it had changed what it saved, where autograd raises too, or torch's
    checkpoint has other gradients than autograd?"""
    if not any("changed in place after this region had saved it" in str(event) for event in mine.log):
        return False
    exact = Run(program, plain).execute()
    refused = any("modified by an inplace operation" in str(event) for event in exact.log)
    differ = dict(exact.log).get("grads") != dict(theirs.log).get("grads")
    # Where other hooks keep what is saved, autograd compares no versions, either.
    return refused or differ or writes_in_inner_region(program.body) or "kind='hooks" in repr(program)


def unreadable(run: Run) -> bool:
    """Did torch refuse to tell what a view is? It is asked of an argument, or of what uses that."""
    return any("A view was created in " in str(event) for event in run.log)


def difference(program: Program, ours: Callable[..., Any]) -> str | None:
    """The first thing in which a program shows that `ours` is not torch's checkpoint."""
    theirs = Run(program, torchs).execute()
    mine = Run(program, ours).execute()
    if noticed(program, mine) or overwritten(program, mine, theirs) or (unreadable(mine) and unreadable(theirs)):
        return None
    for expected, found in zip_longest(map(as_told, theirs.log), map(as_told, mine.log)):
        if expected != found:
            return f"with torch: {expected}\nwith ours:  {found}"
    # What another thread held goes when it ends, which may be after join() returned.
    if mine.alive > theirs.alive and program.ending.kind != "thread":
        return f"{mine.alive} graphs live on without the collector, with torch {theirs.alive}"
    return None


def implementation(program: Program) -> Callable[..., Any]:
    """Ours, by the name that the program asks for."""
    import gradckpt

    if program.api == "compat":
        return gradckpt.compat.checkpoint
    if program.api == "gradckpt":
        return gradckpt.checkpoint
    return functools.partial(gradckpt.checkpoint, buffers="torch")


if __name__ == "__main__":
    import random_programs

    this = eval(sys.argv[1], vars(random_programs))
    print(difference(this, implementation(this)) or "no difference")
