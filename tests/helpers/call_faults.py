"""Programs in which every call that the extension makes may fail:
``python call_faults.py LIBRARY [PROGRAM...]``

LIBRARY is call_faults.c, compiled. For each program and each of its calls: the exception arrives or
reaches sys.unraisablehook, nothing is left behind, and the program runs as before afterwards."""

from __future__ import annotations

import abc
import argparse
import contextlib
import ctypes
import functools
import gc
import importlib.util
import sys
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import chaos
import torch
import torch.utils.checkpoint as torch_checkpoint

import gradckpt
from gradckpt import _C
from gradckpt._engine import torch_objects
from gradckpt._engine.callbacks import TABLE

#: By what they return when they fail. Left out: what fails on an argument of the wrong type or an
#: index out of range alone (sizes, items of lists and tuples, capsules, weak references), what
#: keeps its error to itself (PyDict_GetItemString).
NULL = (
    "PyObject_GetAttr PyObject_GetAttrString PyObject_GetItem PyObject_Call PyObject_CallFunction PyObject_CallMethod "
    "PyObject_CallFunctionObjArgs PyObject_CallMethodObjArgs PyObject_CallNoArgs PyObject_CallObject PyObject_GetIter "
    "PyIter_Next PySequence_GetItem PySequence_Tuple PySequence_Concat PyMapping_Values PyDict_GetItemWithError "
    "PyMapping_GetItemString PyDict_New PyDict_Items PyDict_Keys PyList_New PyList_AsTuple PyTuple_New PyTuple_Pack "
    "PyLong_FromLongLong PyLong_FromSsize_t PyLong_FromVoidPtr PyLong_AsVoidPtr PyCapsule_New PyCMethod_New "
    "PyUnicode_FromFormat PyUnicode_FromString PyUnicode_InternFromString PyUnicode_AsUTF8AndSize "
    "PyUnicode_EncodeFSDefault PyWeakref_NewRef PyType_GenericAlloc PyType_FromModuleAndSpec PyImport_ImportModule "
    "Py_BuildValue _PyObject_New PyArg_ParseTuple"  # 0, which is the same
)
MINUS = (
    "PyObject_IsInstance PyObject_IsTrue PyObject_RichCompareBool PyObject_SetAttr PyObject_SetAttrString "
    "PySequence_Contains PySequence_Size PyList_Append PyList_SetSlice PyDict_SetItem PyDict_SetItemString "
    "PyDict_Contains PyDict_DelItemString PySet_Contains PyLong_AsLong PyLong_AsLongLong PyLong_AsUnsignedLongLong "
    "PyErr_CheckSignals PyErr_WarnEx PyModule_AddObjectRef PyModule_AddType"
)
SILENT = "malloc calloc realloc dlopen dlsym"  # NULL, and no exception
#: Called by a pointer in torch's table; with MemoryError.
DLPACK = "dltensor_from_py_object_no_sync"
#: What takes something back: torch's functions in C++, which have nothing to fail at.
UNDO = (torch._C._autograd._pop_saved_tensors_default_hooks,)
#: What fails for want of memory alone.
MAKES = ("PyDict_New", "PyList_New", "PyTuple_New", "PyType_GenericAlloc", "_PyObject_New", DLPACK)
FAULTS: list[Any] = []  # the library, once it is installed


def install(library: str) -> Any:
    faults = ctypes.CDLL(library)
    FAULTS.append(faults)
    lists = [
        (ctypes.c_char_p * (len(names) + 1))(*(name.encode() for name in names), None)
        for names in (NULL.split(), MINUS.split(), SILENT.split(), [])
    ]
    faults.call_faults_spare.argtypes = [ctypes.py_object]
    for undoes in UNDO:
        faults.call_faults_spare(undoes)
    faults.call_faults_begin.argtypes = [ctypes.c_long, ctypes.py_object]
    faults.call_faults_end.restype = ctypes.c_long
    faults.call_faults_name.restype = ctypes.c_char_p
    assert faults.call_faults_install(str(_C.__file__).encode(), *lists) > 45
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    dlpack = torch_objects.dlpack
    table = dlpack if isinstance(dlpack, int) else address(dlpack, b"dlpack_exchange_api")
    faults.call_faults_pointer(ctypes.c_void_p(table + 40), DLPACK.encode())  # after a version and four pointers
    return faults


# ---- programs ----

Result = list[torch.Tensor | None]
CASES: dict[str, Callable[[], Result]] = {}


def case(run: Callable[[torch.Tensor], torch.Tensor], name: str = "") -> None:
    """The gradient of what it makes of a tensor with history."""

    def whole() -> Result:
        torch.manual_seed(0)
        leaf = chaos.STARTS[0].clone().requires_grad_()
        run(leaf * 1).sum().backward()
        return [leaf.grad, chaos.WEIGHT.grad, *(p.grad for p in chaos.LINEAR.parameters())]

    CASES[name or run.__name__.replace("_", " ")] = whole


for way in chaos.WAYS:
    for codec in ("int8", "lossless") if way not in (chaos._direct, chaos._torchs) else ():
        CASES[f"{way.__name__.strip('_')} {codec}"] = functools.partial(
            chaos.run, chaos.World(codec), [(way, list(chaos.OPERATORS))], 0
        )

SMALL = {"codec": "int8", "min_numel": 0}


def router(x: torch.Tensor) -> torch.Tensor:
    values, places = (x @ chaos.WEIGHT).topk(3)
    noise = torch.bernoulli(x.detach().sigmoid()) + torch.rand_like(x)
    return x.gather(1, places) * values * noise[:, :3] + torch.multinomial(values.softmax(-1), 3)


@case
def discrete_results_in_nested_regions(x: torch.Tensor) -> torch.Tensor:
    def inner(t: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch_checkpoint.checkpoint(router, t, use_reentrant=False)
        return y + gradckpt.checkpoint(router, t, use_reentrant=True)

    return gradckpt.checkpoint(lambda t: gradckpt.checkpoint(inner, t, compress=SMALL), x, compress=SMALL)


@case
def policy_is_a_function(x: torch.Tensor) -> torch.Tensor:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return gradckpt.policies.save("int8") if op is torch.ops.aten.mm.default else op is torch.ops.aten.sin.default

    contexts = functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, policy)
    return gradckpt.checkpoint(lambda t: router(t.sin()), x, compress=SMALL, context_fn=contexts)


@case
def policy_of_names(x: torch.Tensor) -> torch.Tensor:
    policy = gradckpt.policies.save_named("wanted")
    return gradckpt.SelectiveRecompute.apply(
        lambda t: gradckpt.policies.name(t @ chaos.WEIGHT, "wanted").exp(), policy, x
    )


@case
def kept_call(x: torch.Tensor) -> torch.Tensor:
    kept = gradckpt.policies.region(lambda t: (t @ chaos.WEIGHT).exp(), "kept", recompute=False)
    policy = gradckpt.policies.save_named("other", "kept")
    return gradckpt.checkpoint(lambda t: kept(t.sin()).cos(), x, policy=policy, compress=SMALL)


@case
def fake_quantized(x: torch.Tensor) -> torch.Tensor:
    fake_quantize = {**SMALL, "fake_quantize": True}
    return gradckpt.checkpoint(
        lambda t: gradckpt.checkpoint(torch.sin, t.cos(), compress=fake_quantize), x, compress=fake_quantize
    )


@case
def containers(x: torch.Tensor) -> torch.Tensor:
    out = gradckpt.checkpoint(lambda box, *, also: {"y": box["x"][0] * also}, {"x": [x, 1]}, also=x, compress=SMALL)
    return out["y"]


@case
def hooks_of_parameters(x: torch.Tensor) -> torch.Tensor:
    handle = chaos.WEIGHT.register_hook(lambda g: g * 2)
    try:
        y = gradckpt.SelectiveRecompute.apply(chaos.LINEAR, "save_matmuls:int8", x)
        (y.sum() + (x @ chaos.WEIGHT).sum()).backward()
    finally:
        handle.remove()
    return x.detach().requires_grad_() * 1


@case
def two_backwards(x: torch.Tensor) -> torch.Tensor:
    y = gradckpt.checkpoint(lambda t: (t @ chaos.WEIGHT).sin(), x, compress=SMALL)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return g.square() + y


@case
def views_and_layouts(x: torch.Tensor) -> torch.Tensor:
    with gradckpt.compress_saved(SMALL):
        y = x.t()[2:8].relu().transpose(0, 1).square() * x[:, ::3]
    return gradckpt.checkpoint(torch.sin, y.t(), compress="raw").t()


@case
def decorated(x: torch.Tensor) -> torch.Tensor:
    whole = gradckpt.compress_saved(SMALL)(lambda t: (t @ chaos.WEIGHT).softmax(-1).log())
    return whole(x) + gradckpt.codecs.encode(x.detach(), "int4").decode()


@case
def waits_for_long(x: torch.Tensor) -> torch.Tensor:
    with gradckpt.compress_saved(SMALL):
        y = x.sin()
        for _ in range(1024):
            x + 1  # a node that saves nothing
        return y + x.cos()


SHORT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "discrete results in one node": lambda x: gradckpt.SelectiveRecompute.apply(router, None, x, compress=SMALL),
    "written in place": lambda x: gradckpt.checkpoint(lambda t, u: t.mul_(2).sin() * u, x, x.exp(), compress=SMALL),
    # More than are encoded at once, one of them twice.
    "many arguments": lambda x: gradckpt.checkpoint(
        lambda *xs: sum(xs), x, x, *(x * k for k in range(17)), compress=SMALL
    ),
    "many dimensions": lambda x: gradckpt.checkpoint(torch.sin, x.view(6, *8 * [1], 16)),
    "policy is a function in one node": lambda x: gradckpt.SelectiveRecompute.apply(
        torch.sin, lambda context, op, *args: True, x
    ),
}
for short, run in SHORT.items():
    case(run, short)


def imported_anew() -> Any:
    """The extension as a second module. Where the generator keeps its state is not looked for:
    that takes long."""
    spec = importlib.util.spec_from_file_location("gradckpt._C", _C.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with unittest.mock.patch.object(torch_objects, "generator_window", return_value=0):
        spec.loader.exec_module(module)
    module.bind(TABLE)
    return module


@case
def import_of_the_extension(x: torch.Tensor) -> torch.Tensor:
    module = imported_anew()
    return x * len([*module.codecs(), *module.codec_info("mask"), *module.build_info(), *module.stats()])


#: The type of a device that ACCELERATED believes in.
PRETENDED = "pretended"
with unittest.mock.patch.object(torch_objects, "accelerator", PRETENDED):
    ACCELERATED = imported_anew()


class Abstract(metaclass=abc.ABCMeta):  # noqa: B024
    """An argument that only Python looks into."""


@case
def surroundings(x: torch.Tensor) -> torch.Tensor:
    """Of a torch with a device. They are put back by functions in C++,
    which have nothing to fail at."""

    def fn(t: torch.Tensor, other: Abstract) -> torch.Tensor:
        if ACCELERATED.is_recomputing():
            for faults in FAULTS:
                faults.call_faults_end()
        return (t @ chaos.WEIGHT).sin()

    def generators(*args: Any) -> list[Any]:
        return [("cuda", 0, None)]

    with (
        instead(ACCELERATED, device_rng_capture=generators, device_rng_swap=generators),
        torch.device("cpu"),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            y = ACCELERATED.checkpoint(fn, x, Abstract(), compress=SMALL)
        (g,) = torch.autograd.grad(y.sum(), x)
    return x * g


# ---- one fault ----


Attempt = tuple[int, str | None, BaseException, list[BaseException], Any]


def attempt(faults: Any, k: int, run: Callable[[], Any]) -> Attempt:
    """Calls, the function that failed, what it should raise, what was seen, the result."""
    error = KeyboardInterrupt(f"call {k}")
    unraisable: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda u: unraisable.append(u.exc_value)
    arrived: BaseException | None = None
    result = None
    faults.call_faults_begin(k, error)
    try:
        result = run()
    except BaseException as e:
        arrived = e
    finally:
        calls = faults.call_faults_end()
        sys.unraisablehook = hook
    chaos.forget_gradients()
    name = faults.call_faults_name()
    seen = [e for each in (arrived, *unraisable) for e in chaos.chain_of(each)]
    return calls, name and name.decode(), error, seen, result


def sweep(faults: Any, name: str, only: int | None, verbose: bool) -> Iterator[str]:
    """What is wrong, one line each."""
    run = CASES[name]
    run()  # whatever happens once
    chaos.forget_gradients()
    want = run()
    chaos.forget_gradients()
    calls = attempt(faults, sys.maxsize, run)[0]
    before = chaos.left_behind()
    yield from () if calls > 50 else (f"{name}: only {calls} calls",)
    for k in range(1, calls + 1) if only is None else (only,):
        if verbose:
            print(name, k, file=sys.stderr, flush=True)
        _, function, error, seen, result = attempt(faults, k, run)
        where = f"{name}: call {k}, {function}"
        silent = function in SILENT.split()
        if any(isinstance(e, SystemError) for e in seen):
            yield f"{where}: a call goes on with an error set: {seen!r:.150}"
        elif result is None and not seen:
            yield f"{where}: neither a result nor an error"
        elif function in MAKES and any(isinstance(e, MemoryError) for e in seen):
            pass
        elif not silent and not any(e is error for e in seen):
            yield f"{where}: lost, instead {seen!r:.150}" if seen else f"{where}: lost"
        elif silent and not all(isinstance(e, (ImportError, MemoryError, RuntimeError)) for e in seen):
            yield f"{where}: {seen!r:.150}"
        for e in seen:
            e.__traceback__ = None
        seen.clear()
        try:
            again = run()
            chaos.forget_gradients()
        except BaseException as e:
            yield f"{where}: the next run fails: {e!r:.150}"
            return
        if not chaos.same(again, want):
            yield f"{where}: the next run differs"
        if k % 20 == 0 or k == calls or verbose:
            after = chaos.left_behind()
            if after != before:
                yield f"{where}, or shortly before: {before} -> {after}"
                before = after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("programs", nargs="*", choices=[*CASES, []], metavar="PROGRAM", help="(default: all)")
    parser.add_argument("--call", type=int, help="only this call")
    parser.add_argument("-v", action="store_true", help="each call before it fails, and what it leaves behind at once")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    faults = install(chosen.library)
    for codec in chaos.CODECS:
        chaos.elsewhere(codec)
    gc.collect()
    gc.freeze()  # a collection looks at what programs made, and at nothing else
    wrong = 0
    for name in chosen.programs or CASES:
        for line in sweep(faults, name, chosen.call, chosen.v):
            wrong += 1
            print(line, flush=True)
        print(f"{name}: done", flush=True)
    return int(wrong > 0)


# ---- Other Python functions for C to call, for a test.


@contextlib.contextmanager
def instead(module=_C, **functions):
    """C calls these instead of its own, until the block ends."""
    assert functions.keys() <= TABLE.keys()
    module.bind({**TABLE, **functions})
    try:
        yield
    finally:
        module.bind(TABLE)


if __name__ == "__main__":
    sys.exit(main())
