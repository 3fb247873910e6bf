"""The virtual device: a device for tests, in the memory of the host.

``load()`` builds it once (tests/device/virtual_device, into build/), and registers it with torch as
"virtual", before the first backward of the process. Afterwards:

* ``torch.virtual`` is the module of the device, and ``torch.accelerator`` finds it.
* ``reports()`` is what had no order; ``places(True)`` adds lines of Python.
* ``late()`` and ``random(seed)`` choose when queued work runs.
* ``device_kind()`` is the address of its gck_device_kind; ``load_kernels()`` first.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import codec_libraries
import torch
from checkout import CODEC, CSRC, NATIVE, ROOT, TESTS

import gradckpt

SOURCES = TESTS / "device" / "virtual_device"
NAME = "virtual"
CAPACITY = 8 << 30

FLAGS = shlex.split("-std=c++20 -O1 -fPIC -shared -fvisibility=hidden -Wall -Wextra -Werror")
KERNEL_FLAGS = shlex.split(
    f"""-x c++ -std=c++17 -O1 -fPIC -fno-exceptions -fno-rtti -ffp-contract=off -Wall -Wextra -Werror
    -Wno-unknown-pragmas -Wno-unused-function -DGCK_EMULATE_CUDA '-DGCK_CUDA_ARCHS="emulated"'
    -include '{NATIVE / "cuda_emulation.h"}'"""
)


# ---- building


def _built(name, texts, commands):
    """build/virtual_device/<name>-<hash>/<name>.so, made by the commands if it is not there."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    folder = ROOT / "build" / "virtual_device" / f"{name}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{name}.lock", "w") as lock:  # the first process makes it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            work = folder.with_name(f"{folder.name}.{os.getpid()}")
            work.mkdir()
            try:
                for command in commands(work):
                    made = subprocess.run(command, capture_output=True, text=True)
                    assert made.returncode == 0, f"{' '.join(map(str, command))}\n{made.stderr}"
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder / f"{name}.so"


def _texts(paths):
    return [path.read_text(encoding="utf-8") for path in sorted(paths)]


def build_device():
    """The extension, one translation unit: torch's headers take most of the time."""
    files = sorted(SOURCES.glob("*.cpp"))
    include, library = Path(torch.__file__).parent / "include", Path(torch.__file__).parent / "lib"
    texts = [
        *_texts([*files, *SOURCES.glob("*.h")]),
        *_texts([CSRC / "gradckpt.h"]),
        *FLAGS,
        torch.__version__,
        sys.version,
    ]

    def commands(folder):
        whole = folder / "whole.cpp"
        whole.write_text("".join(f'#include "{path}"\n' for path in files), encoding="utf-8")
        libraries = ["-L", library, "-ltorch_python", "-ltorch_cpu", "-lc10"]
        yield ["g++", *FLAGS, "-isystem", include, f"-I{CSRC}", whole, "-o", folder / "device.so", *libraries]

    return _built("device", texts, commands)


def build_kernels():
    """The device's codecs, compiled for the host."""
    files = [*sorted(CODEC.rglob("*.cu")), SOURCES / "kernels" / "overflow_words.cpp"]
    headers = [p for p in CODEC.rglob("*") if p.suffix in (".cuh", ".h")]
    texts = [*_texts([*files, *headers]), *KERNEL_FLAGS]
    texts += _texts([CSRC / "gradckpt.h", NATIVE / "cuda_emulation.h"])

    def commands(folder):
        for path in files:
            yield ["g++", *KERNEL_FLAGS, f"-I{CSRC}", "-c", path, "-o", folder / f"{path.name}.o"]
        yield ["g++", "-shared", *(folder / f"{path.name}.o" for path in files), "-o", folder / "kernels.so", "-lm"]

    return _built("kernels", texts, commands)


def build_host_codecs():
    """csrc/codec as a library: the host's codecs, and the descriptions of all."""
    texts = _texts([p for p in CODEC.rglob("*") if p.suffix in (".c", ".h")])

    def commands(folder):
        codec_libraries.CodecLibrary.build(folder)
        yield ["cp", folder / "codecs.so", folder / "host_codecs.so"]

    return _built("host_codecs", texts, commands)


# ---- the library


@functools.cache
def library():
    """The extension, loaded; functions that may fail return a text."""
    lib = ctypes.CDLL(str(build_device()))
    size = ctypes.c_size_t
    for name, *arguments in (
        ("virtual_start", size),
        ("virtual_set_mode", ctypes.c_int, ctypes.c_uint64),
        ("virtual_take_reports",),
        ("virtual_begin_capture", ctypes.c_int, ctypes.c_int64),
        ("virtual_end_capture", ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p)),
        ("virtual_replay", ctypes.c_void_p),
        ("virtual_load_kernels", ctypes.c_char_p, ctypes.c_int),
    ):
        getattr(lib, name).restype, getattr(lib, name).argtypes = ctypes.c_char_p, arguments
    lib.virtual_pending.restype, lib.virtual_pending.argtypes = ctypes.c_int64, (ctypes.c_int, ctypes.c_int64)
    lib.virtual_destroy_graph.argtypes = (ctypes.c_void_p,)
    lib.virtual_device_kind.restype = ctypes.c_void_p
    lib.virtual_begin_timeline.argtypes = (ctypes.c_double,)
    lib.virtual_link_fails.restype, lib.virtual_link_fails.argtypes = (
        ctypes.c_longlong,
        (ctypes.c_longlong, ctypes.c_int),
    )
    return lib


def _call(name, *arguments):
    """Raise what the function returned, if it returned a text."""
    error = getattr(library(), name)(*arguments)
    if error is not None:
        raise RuntimeError(error.decode())


def reports():
    """The unordered pairs since the last call, each with at least one write, and uses of memory
    that is not allocated. A dict each: kind, first, second (name, device, stream, writes, place),
    address, nbytes, times."""
    return json.loads(library().virtual_take_reports())


@contextlib.contextmanager
def in_order():
    """A block in which nothing unordered happens, or the block takes its reports itself."""
    late()
    reports()
    yield
    assert reports() == []


def late():
    """Run queued work as late as possible (this is the default)."""
    _call("virtual_set_mode", 0, 0)


def random(seed):
    """Run queued work at random, as the seed says."""
    _call("virtual_set_mode", 1, seed)


@contextlib.contextmanager
def ordered_threads():
    """A block in which all know what one host thread waited for: their hand-overs are not seen."""
    library().virtual_order_threads(1)
    try:
        yield
    finally:
        library().virtual_order_threads(0)


class Timeline:
    """Of the work queued since timeline(); see streams.h. Pairs: in, out."""

    def read(self):
        found = (ctypes.c_double * 6)()
        library().virtual_read_timeline(found)
        *counts, self.ends = found
        self.copies, self.nbytes = tuple(map(int, counts[:2])), tuple(map(int, counts[2:4]))
        self.host_waits = int(counts[4])


@contextlib.contextmanager
def timeline(rate):
    """When queued work would run: an operation takes 1, a copy over the link its bytes / rate, the
    host nothing. The Timeline is filled at the end."""
    made = Timeline()
    library().virtual_begin_timeline(rate)
    yield made
    made.read()


def pending(stream):
    """Operations in the stream's queue."""
    return library().virtual_pending(stream.device_index, stream.stream_id)


_PLACE = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t)


@_PLACE
def _place(text, size):
    frame = sys._getframe().f_back
    while frame is not None and frame.f_code.co_filename.startswith(str(Path(torch.__file__).parent)):
        frame = frame.f_back
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "autograd's thread"
    data = line.encode()[: size - 1] + b"\0"
    ctypes.memmove(text, data, len(data))


def places(on):
    """Ask Python for the line of every operation, for reports, which costs 10 microseconds each."""
    library().virtual_set_place_callback(_place if on else None)


def device_kind():
    """The address of the gck_device_kind."""
    return library().virtual_device_kind()


def load_kernels():
    """Build and load the emulated kernels of the codecs."""
    _call("virtual_load_kernels", str(build_kernels()).encode(), 0)


def introduce():
    """Make the device one of gradckpt's, with the emulated kernels."""
    load_kernels()
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    gradckpt._C.add_device(make(device_kind(), _CAPSULE, None))


#: A capsule keeps the address of its name.
_CAPSULE = ctypes.c_char_p(b"gck_device_kind")


def use_host_codecs(on):
    """Whether the codecs of the host run in place of the emulated kernels: for whole models."""
    if on:
        _call("virtual_load_kernels", str(build_host_codecs()).encode(), 1)
    else:
        library().virtual_forget_host_codecs()


@contextlib.contextmanager
def host_codecs():
    """A block in which they run: they are faster than the kernels' emulation, whose bytes other
    tests compare."""
    use_host_codecs(True)
    try:
        yield
    finally:
        use_host_codecs(False)


def kernel_errors():
    """Kernels that ran and did not return 0, and calls of the link that CUDA would refuse."""
    return library().virtual_kernel_errors() + library().virtual_link_misused()


def link_fails(call=0, all_after=False):
    """How many calls of the link (copies, events, pinning) there were since the last question.

    From now on the one with this number fails, and all after it."""
    return library().virtual_link_fails(call, int(all_after))


def link_refuses_to_pin(on):
    library().virtual_link_refuses_to_pin(int(on))


_captured = set()


class Graph:
    """Work that was captured on a stream; replay() runs it again on the current stream."""

    def __init__(self):
        self._graph = ctypes.c_void_p()

    def capture_begin(self, stream=None):
        self._stream = stream or torch.accelerator.current_stream()
        _call("virtual_begin_capture", self._stream.device_index, self._stream.stream_id)
        _captured.add(self._stream)

    def capture_end(self):
        where = self._stream.device_index, self._stream.stream_id
        _captured.discard(self._stream)
        _call("virtual_end_capture", *where, ctypes.byref(self._graph))

    def replay(self):
        _call("virtual_replay", self._graph)

    def reset(self):
        if self._graph:
            library().virtual_destroy_graph(self._graph)
            self._graph = ctypes.c_void_p()


@contextlib.contextmanager
def graph(made, stream=None):
    """As torch.cuda.graph(): waits for the device, and captures what runs in the block."""
    torch.accelerator.synchronize()
    with stream or torch.Stream(device=NAME):
        made.capture_begin()
        try:
            yield
        finally:
            made.capture_end()


# ---- torch.virtual


def _index(device):
    if device is None:
        return torch.accelerator.current_device_index()
    device = torch.device(NAME, device) if isinstance(device, int) else torch.device(device)
    return torch.accelerator.current_device_index() if device.index is None else device.index


class _Device:
    """``with torch.virtual.device(1):``"""

    def __init__(self, device):
        self.index = _index(device)

    def __enter__(self):
        self.before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *_):
        torch.accelerator.set_device_index(self.before)
        return False


def _default_stream(device=None):
    return torch.Stream(
        stream_id=0, device_index=_index(device), device_type=int(torch._C._autograd.DeviceType.PrivateUse1)
    )


def _of_a_device(name):
    return lambda device=None: getattr(torch.accelerator, name)(_index(device))


def _module():
    """torch.virtual"""
    module = types.ModuleType(f"torch.{NAME}")
    lib = ctypes.PyDLL(str(build_device()))
    lib.virtual_default_generator.restype = ctypes.py_object
    generators = tuple(lib.virtual_default_generator(i) for i in range(2))

    def manual_seed_all(seed):
        for generator in generators:
            generator.manual_seed(seed)

    members = {
        "default_generators": generators,
        "device": _Device,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "set_stream": torch.accelerator.set_stream,
        "default_stream": _default_stream,
        "CUDAGraph": Graph,
        "graph": graph,
        "device_count": lambda: 2,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: torch.accelerator.current_stream() in _captured,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": lambda seed: generators[_index(None)].manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "seed": lambda: generators[_index(None)].seed(),
        "seed_all": lambda: manual_seed_all(generators[0].seed()),
        "initial_seed": lambda: generators[_index(None)].initial_seed(),
        "get_rng_state": lambda device=NAME: generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device=NAME: generators[_index(device)].set_state(state),
        "get_rng_state_all": lambda: [g.get_state() for g in generators],
        "set_rng_state_all": lambda states: [g.set_state(s) for g, s in zip(generators, states, strict=True)],
        "empty_cache": torch.accelerator.empty_cache,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16, torch.float32],
        "is_bf16_supported": lambda *_: True,
    }
    for name in ("current_stream", "synchronize", "memory_stats",
                 "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
                 "reset_peak_memory_stats", "reset_accumulated_memory_stats"):  # fmt: skip
        members[name] = _of_a_device(name)
    for name, member in members.items():
        setattr(module, name, member)
    return module


@functools.cache
def load(capacity=CAPACITY):
    """Register the device with torch, and return torch.virtual."""
    torch.utils.rename_privateuse1_backend(NAME)
    _call("virtual_start", capacity)
    module = _module()
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if not faulthandler.is_enabled():
        faulthandler.enable()
    library().virtual_watch_faults()
    # A thread of autograd that lets go of its last graph while Python ends would abort the process.
    atexit.register(time.sleep, 0.2)
    return module
