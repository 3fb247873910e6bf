"""Random programs that use checkpoint: the language, and drawing one with hypothesis,
so that a failing one is shrunk.

A program is a tree of named tuples, printed as the expression that makes it again. Registers are
tensors of 3x3 floats; an index counts from the latest register backwards, modulo their number, so
that every tree is a program. What a program does is in random_program_runs.py.

All choices of a program are read from one drawn string of bytes. Drawn one by one, hypothesis would
spend five of six examples on variants of the one before, most of them with the same few simplest
choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st
from random_operators import CUSTOM, IN_PLACE, OPERATORS, RANDOM, VIEWS

# ---- the language ----


class Op(NamedTuple):
    """A new register: an operator of two registers (most look at the first only)."""

    name: str
    a: int
    b: int


class InPlace(NamedTuple):
    """Change register a. What torch would refuse to change is copied first, but if strict."""

    name: str
    a: int
    b: int
    strict: bool


class Custom(NamedTuple):
    """New registers: the results of an autograd Function."""

    name: str
    a: int
    b: int


class Norm(NamedTuple):
    """BatchNorm, whose running statistics a recompute updates again."""

    a: int


class InnerGrad(NamedTuple):
    """autograd.grad of a by b, or a.backward(), at this point of the program."""

    kind: str
    a: int
    b: int


class Diverge(NamedTuple):
    """An operator that saves something else from the given call of the function on."""

    kind: str
    call: int
    a: int


class Raise(NamedTuple):
    """An exception at the given call of the function (1: the forward)."""

    kind: str
    call: int


class Scope(NamedTuple):
    """A body under a context manager."""

    kind: str
    body: tuple[Any, ...]


class Options(NamedTuple):
    """The keywords of checkpoint; None: not passed."""

    use_reentrant: bool | None = False
    early_stop: bool | None = None
    preserve_rng_state: bool | None = None
    determinism_check: str | None = None
    contexts: str | None = None


class Region(NamedTuple):
    """checkpoint(function, ...) where function is `body` on registers of its own:
    captured ones, then arguments.

    Containers are ("list", items...), ("tuple", ...), ("dict", ...), ("pair", ...), ("value",
    anything); an int is a register; in results ("mask", register) is a bool tensor and ("detached",
    register) what it says.
    """

    name: str
    callable: str
    options: Options
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    captured: tuple[int, ...]
    body: tuple[Any, ...]
    result: Any


class Ending(NamedTuple):
    """What happens after the forward: `between`,
    then backward of the last `outputs` registers in the way of `kind`."""

    kind: str
    between: str
    outputs: int


class Program(NamedTuple):
    seed: int
    api: str
    count_operators: bool
    body: tuple[Any, ...]
    ending: Ending


# ---- drawing one ----

MAX_DEPTH = 3


LENGTH = 600  # bytes: enough for nearly all programs; after them every choice is the simplest, which ends the program


def weighted(**weights: int) -> list[str]:
    return [name.replace("__", " ") for name, n in weights.items() for _ in range(n)]


def one_in(n: int) -> list[bool]:
    return [False] * (n - 1) + [True]


# Of every list of choices the first is the simplest.
INDEX = [0, 0, 0, 1, 1, 2, 3, 4, 5]
RESULT = [0, 0, 0, 0, 0, 1, 2, 5]
SAVING = ["sin", "tanh", "softmax", "mul", "mm", "linear"]
# Random operators and views twice: they are what a checkpoint can get wrong.
# And enough that saves something.
OPERATOR = [*OPERATORS, *sorted(RANDOM), *sorted(VIEWS), *SAVING, *SAVING]
IN_PLACE_OPERATOR = list(IN_PLACE)
CUSTOM_FUNCTION = [*CUSTOM, "saves inputs", "saves output", "two outputs"]
RARE, SOMETIMES, OFTEN, EVEN = one_in(30), one_in(8), one_in(3), one_in(2)

OUTSIDE = weighted(op=5, region=9, inplace=1, custom=1, scope=3)
INSIDE = weighted(op=20, region=4, inplace=3, custom=4, scope=3, norm=1, innergrad=2, diverge=1, throw=1)
INNERMOST = weighted(op=20, inplace=3, custom=4, scope=1, norm=1, innergrad=2, diverge=1, throw=1)
SCOPE = weighted(
    autocast=5,
    autocast__without__cache=1,
    autocast__off=1,
    no_grad=2,
    enable_grad=1,
    inference=1,
    device=1,
    early__stop__off=1,
    early__stop__on=1,
    hooks__that__count=2,
    hooks__that__clone=2,
    catch=2,
    catch__all=1,
)
INNER_GRAD = weighted(grad=2, retain_graph=2, create_graph=2, backward=2, of__a__new__graph=2)
DIVERGENCE = weighted(more=1, fewer=1, shape=1, dtype=1)
# gradckpt.checkpoint updates running statistics once a step, and means to: no Norm there,
# but with buffers="torch".
API = ["gradckpt", "gradckpt", "compat", "gradckpt, buffers as torch"]
EXCEPTION = weighted(program=5, runtime=1, interrupt=1, exit=1)
DETERMINISM = weighted(none=9, default=5, wrong=1)
CONTEXT = weighted(logged=4, autocast=2, no_grad=1, one__shot=1)
OUTPUTS = [3, 2, 1]
CALL = [1, 2, 2, 2, 3, 3]
CALLABLE = weighted(function=4, partial=1, module=1, method=1)
CONTAINER = weighted(list=2, tuple=2, dict=2, pair=2, value=1)
LEAF_RESULT = weighted(register=9, mask=1, detached=1, value=1)
VALUE = [None, 3, 2.5, "text"]
ENDING = weighted(
    backward=8,
    drop__nothing=2,
    inputs=2,
    twice=3,
    pieces=3,
    partial=3,
    grad=3,
    double=3,
    group=2,
    hooked=2,
    saved=2,
    thread=1,
    never=1,
)
# torch allows no other for use_reentrant=True
REENTRANT_ENDING = weighted(backward=5, drop__nothing=1, pieces=2, partial=2, twice=3, grad=1)
BETWEEN = weighted(
    nothing=7,
    draw=6,
    seed=1,
    change__an__input=1,
    change__a__parameter=1,
    change__data=1,
    change__an__output=1,
    detach__an__output=1,
    autocast=2,
    no_grad=1,
    device=1,
)


class _Drawer:
    """The choices of one program, read from bytes."""

    def __init__(self, data: bytes) -> None:
        self.bytes = iter(data)
        self.regions = 0
        self.reentrant = False
        self.in_place = False
        self.buffers = False

    def draw(self, choices: Sequence[Any]) -> Any:
        return choices[next(self.bytes, 0) % len(choices)]

    def indices(self, most: int) -> tuple[int, ...]:
        return tuple(self.draw(INDEX) for _ in range(self.draw(range(most + 1))))

    def tree(self, depth: int, leaf: Any) -> Any:
        if depth == 0 or not self.draw(OFTEN):
            return leaf()
        kind = self.draw(CONTAINER)
        if kind == "value":
            return ("value", self.draw(VALUE))
        return (kind, *(self.tree(depth - 1, leaf) for _ in range(self.draw(range(1, 4)))))

    def result_leaf(self) -> Any:
        kind = self.draw(LEAF_RESULT)
        if kind == "value":
            return ("value", self.draw(VALUE))
        return self.draw(RESULT) if kind == "register" else (kind, self.draw(INDEX))

    def body(self, depth: int, least: int, most: int) -> tuple[Any, ...]:
        return tuple(self.statement(depth) for _ in range(self.draw(range(least, most + 1))))

    def statement(self, depth: int) -> Any:
        draw = self.draw
        kind = draw(OUTSIDE if depth == 0 else INSIDE if depth < MAX_DEPTH and self.regions < 6 else INNERMOST)
        if depth and kind == ("innergrad" if self.in_place else "inplace"):
            kind = "op"
        if kind == "norm" and self.buffers:
            return Norm(draw(INDEX))
        if kind in ("op", "norm"):
            return Op(draw(OPERATOR), draw(INDEX), draw(INDEX))
        if kind == "region":
            return self.region(depth + 1)
        if kind == "inplace":
            return InPlace(draw(IN_PLACE_OPERATOR), draw(INDEX), draw(INDEX), draw(RARE))
        if kind == "custom":
            name = draw(CUSTOM_FUNCTION)
            if name == "changes input" and not self.in_place:
                name = "saves inputs"
            return Custom(name, draw(INDEX), draw(INDEX))
        if kind == "innergrad":
            return InnerGrad(draw(INNER_GRAD), draw(INDEX), draw(INDEX))
        if kind == "diverge":
            return Diverge(draw(DIVERGENCE), draw(range(2, 4)), draw(INDEX))
        if kind == "throw":
            return Raise(draw(EXCEPTION), draw(CALL))
        # Not below depth MAX_DEPTH: else scopes in scopes have no end.
        return Scope(draw(SCOPE), self.body(max(depth, 1) if depth else 0, 1, 3))

    def options(self) -> Options:
        draw = self.draw
        if self.reentrant and not draw(SOMETIMES):
            use: bool | None = None if draw(SOMETIMES) else True
            return Options(use, preserve_rng_state=False if draw(SOMETIMES) else None)
        return Options(
            False,
            early_stop=draw([False, True]) if draw(OFTEN) else None,
            preserve_rng_state=draw([False, True]) if draw(SOMETIMES) else None,
            determinism_check=draw(DETERMINISM) if draw(SOMETIMES) else None,
            contexts=draw(CONTEXT) if draw(SOMETIMES) else None,
        )

    def region(self, depth: int) -> Region:
        draw = self.draw
        name = f"f{self.regions}"
        self.regions += 1
        options = self.options()
        plain = options.use_reentrant is not False
        deep = 0 if plain and not draw(RARE) else 2
        args = tuple(self.tree(deep, lambda: draw(INDEX)) for _ in range(draw(range(1, 4))))
        kwargs: tuple[tuple[str, Any], ...] = ()
        if deep and draw(OFTEN):
            names = ["p", "q"][: draw(range(1, 3))]
            kwargs = tuple((n, self.tree(1, lambda: draw(INDEX))) for n in names)
        result = self.tree(2, self.result_leaf)
        if plain and not draw(RARE):  # torch's autograd.Function takes a tensor or a tuple
            result = ("tuple", draw(RESULT), self.result_leaf()) if draw(OFTEN) else draw(RESULT)
        captured, body = self.indices(1), self.body(depth, 1, 5)
        if not draw(OFTEN):  # else too many regions save nothing of their own
            body += (Op(draw(SAVING), 0, draw(INDEX)), Op(draw(OPERATOR), 0, draw(INDEX)))
        return Region(name, draw(CALLABLE), options, args, kwargs, captured, body, result)


def program_of(data: bytes) -> Program:
    drawer = _Drawer(data)
    draw = drawer.draw
    drawer.reentrant = draw(one_in(7))
    # Never both inside: a recompute whose input was changed in place can reach the node that is
    # waiting for it through a backward of its own, and torch stands still on that node's mutex.
    drawer.in_place = draw(EVEN)
    api = "compat" if drawer.reentrant else draw(API)
    drawer.buffers = api != "gradckpt"
    seed = 256 * draw(range(40)) + draw(range(256))
    body = (*drawer.body(0, 0, 2), drawer.region(1), *drawer.body(0, 0, 1))
    ending = Ending(draw(REENTRANT_ENDING if drawer.reentrant else ENDING), draw(BETWEEN), draw(OUTPUTS))
    return Program(seed, api, draw(OFTEN), body, ending)


def programs() -> st.SearchStrategy[Program]:
    return st.binary(min_size=LENGTH, max_size=LENGTH).map(program_of)


# ---- what is in a program ----


def features(program: Program) -> set[str]:
    """Names of everything that a program does, for counting how often each occurs."""
    found = {f"ending {program.ending.kind}", f"between {program.ending.between}", f"api {program.api}"}
    if program.count_operators:
        found.add("operators counted")
    for node, depth in _walk(program.body, 0):
        found.update(_node_features(node, depth))
    return found


def _walk(body: tuple[Any, ...], depth: int) -> Iterator[tuple[Any, int]]:
    for node in body:
        yield node, depth
        if isinstance(node, (Region, Scope)):
            yield from _walk(node.body, depth + isinstance(node, Region))


def _kinds(tree: Any) -> Iterator[str]:
    if isinstance(tree, tuple):
        yield tree[0]
        for item in tree[1:]:
            yield from _kinds(item)


def _node_features(node: Any, depth: int) -> Iterator[str]:
    if isinstance(node, Region):
        yield f"depth {depth + 1}"
        yield f"callable {node.callable}"
        yield from (f"option {k}={v}" for k, v in node.options._asdict().items() if v is not None)
        yield from (f"argument {kind}" for tree in node.args for kind in _kinds(tree))
        yield from (f"result {kind}" for kind in _kinds(node.result))
        if node.kwargs:
            yield "kwargs"
        if node.captured:
            yield "captured"
        return
    where = "inside" if depth else "outside"
    if isinstance(node, Op):
        kind = "view" if node.name in VIEWS else "random" if node.name in RANDOM else "operator"
        yield f"{kind} {where}"
        if node.name in ("detach", "item", "index", "empty", "double", "bf16"):
            yield f"operator {node.name}"
    elif isinstance(node, Norm):
        yield "running statistics"
    elif isinstance(node, InPlace):
        yield f"in place {where}"
    elif isinstance(node, (Custom, InnerGrad, Diverge, Raise)):
        label = node.name if isinstance(node, Custom) else node.kind
        yield f"{type(node).__name__} {label}"
        if isinstance(node, Raise):
            yield f"Raise at call {node.call}"
    else:
        yield f"scope {node.kind}"
