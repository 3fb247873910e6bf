"""What every test starts from, and which of the two targets of the Makefile it belongs to."""

import functools
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # of torch's profiler, before torch is imported

from checkout import ROOT, TESTS
from native_programs import built_once
from targets import LEFT, ROWS, SOAK, is_left

# ---- make test and make test_all


def pytest_addoption(parser):
    parser.addoption("--target", choices=("test", "test_all"), help="only the tests of this target of the Makefile")
    parser.addoption(
        "--rows", type=int, help="of each parametrized test at most so many rows, first and last among them"
    )


def pytest_ignore_collect(collection_path, config):
    """Files are not imported for the target that they have no test for:
    it may lack their packages."""
    target = config.getoption("--target")
    if target is None or not collection_path.is_relative_to(TESTS) or collection_path == TESTS:
        return None
    name = collection_path.relative_to(TESTS).as_posix()
    if target == "test":
        return is_left(name) or None
    return not (is_left(name) or any(key.startswith((f"{name}/", f"{name}::")) for key in LEFT)) or None


def _of_target(config, items):
    target = config.getoption("--target")
    if target is None:
        return
    _keep(config, items, {i for i in items if is_left(i.nodeid.removeprefix("tests/")) == (target == "test_all")})


def _keep(config, items, kept):
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _spread(items, most):
    """Items evenly apart, first and last among them."""
    n = min(most, len(items))
    return [items[(len(items) - 1) * i // max(n - 1, 1)] for i in range(n)]


def _some_rows(config, items):
    """Of a test with many rows those that lie evenly apart."""
    most = config.getoption("--rows")
    if most is None:
        return
    rows = {}
    for item in items:
        rows.setdefault((item.path, item.parent.name, getattr(item, "originalname", item.name)), []).append(item)
    _keep(config, items, {item for each in rows.values() for item in _spread(each, most)})


def _mark_soak(items):
    """What targets.py leaves to `make soak`."""
    names = [(item, item.nodeid.removeprefix("tests/")) for item in items]
    left = {item for item, name in names if name.startswith(tuple(SOAK))}
    for test, most in ROWS.items():
        rows = [item for item, name in names if re.match(rf"{re.escape(test)}($|\[|::)", name)]
        left |= {*rows} - {*_spread(rows, most)}
    for item in left:
        item.add_marker(pytest.mark.soak)


# ---- a session


def pytest_sessionstart(session):
    """torch's log of operators (``debug=True``) has records that cannot be formatted. It keeps them
    to itself, unless an import meanwhile sets the loggers up again; pytest's handlers would then
    raise within the operator."""
    plugin = session.config.pluginmanager.get_plugin("logging-plugin")
    # A shell that starts this in the background has it ignore Ctrl-C,
    # and the tests of Ctrl-C would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for handler in (plugin.caplog_handler, plugin.report_handler):
        handler.addFilter(lambda record: record.name != "LoggingTensor")


@pytest.fixture(scope="module", autouse=True)
def _collections_are_short():
    """A collection in a test looks at what was made since its file began, not at the million
    objects of the modules that were imported before; nor does ``gc.get_objects()`` show those. A
    test that wants them calls ``gc.unfreeze()``."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_report_on_earlier_tests():
    """The first two steps since ``stats.reset()`` are judged by all that was counted. A test that
    expects a report resets; in any other, these may be steps of tests before it."""
    warning = sys.modules.get("gradckpt._models.inactivity_warning")
    if warning is not None:
        warning._now().steps = warning.PATIENCE


@pytest.fixture(autouse=True)
def _says_it_again():
    """What a place of payloads says once, and is an error here, does not depend on the tests
    before: neither those words nor the place are known from them."""
    places = sys.modules.get("gradckpt._engine.places")
    if places is not None:
        places._say.cache_clear()
        places.figures(restart=True)  # or those that end later would count in a test
        places._latest.clear()
        places._places.clear()


@pytest.fixture(autouse=True)
def _no_payload_left_by_a_test(request):
    """Many tests count live bytes from 0. Cycles (torch's logs and compile errors make some) are
    collected, so that no payload in them is counted for the next test; what then lives on,
    something leaked."""
    yield
    gradckpt = sys.modules.get("gradckpt")
    if hasattr(gradckpt, "stats") and gradckpt.stats()["live_bytes"]:
        gc.collect()
        # A failed test is kept by its traceback, and its payloads with it.
        kept = request.session.testsfailed or request.node.get_closest_marker("failed_backward")
        assert kept or gradckpt.stats()["live_bytes"] == 0, "payloads outlive their test"


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory):
    """The package with a C half under ASan and UBSan; environment to run it in."""
    # libstdc++ too: else ASan cannot intercept the exceptions that torch throws.
    names = ("libasan.so", "libstdc++.so.6")
    found = [
        subprocess.run(["gcc", f"-print-file-name={n}"], capture_output=True, text=True).stdout.strip() for n in names
    ]
    if not all(os.path.isabs(path) for path in found):
        pytest.skip("gcc has no libasan or no libstdc++")
    runtime = " ".join(found)
    tree = tmp_path_factory.mktemp("sanitized")
    for name in ("csrc", "gradckpt", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tree / name)
    for built in (tree / "gradckpt").glob("_C*.so"):
        built.unlink()
    env = {**os.environ, "GRADCKPT_SANITIZE": "address,undefined", "GRADCKPT_CUDA": "0"}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, env=env, check=True)
    options = {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0,abort_on_error=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(tree),
        "HF_HUB_OFFLINE": "1",
    }
    return tree, {**os.environ, **options}


#: Files whose module fixtures start processes or build something, which takes long:
#: one worker runs all that use them.
WORLDS = {
    "test_budget_sharded",
    "test_cuda_build",
    "test_cuda_emulation",
    "test_cuda_errors",
    "test_deepspeed",
    "test_devices",
    "test_distributed",
    "test_distributed_compiled",
    "test_distributed_pipeline",
    "test_distributed_trainer",
    "test_docs",
    "test_first_run",
    "test_gpu",
    "test_lightning",
    "test_operator_faults",
    "test_packaging",
    "test_places_in_plans",
    "test_plan_budget_command",
    "test_ranks",
    "test_timm",
    "test_toy_codec",
}


def _world_of(item):
    """The file's name, and parameters of such a fixture, when the test needs one; else None."""
    name = item.module.__name__
    fixtures = [each[-1] for each in item._fixtureinfo.name2fixturedefs.values() if each[-1].scope == "module"]
    if name not in WORLDS or not fixtures:
        return None
    return " ".join([name, *(str(item.callspec.params[each.argname]) for each in fixtures if each.params)])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """A test over codecs and dtypes goes over the pairs that exist; what shares a world stays
    together; rows are counted without those that marks leave out."""
    for item in items:
        if (world := _world_of(item)) is not None:
            item.add_marker(pytest.mark.xdist_group(world))
    from gradckpt import codecs

    def exists(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        codec, dtype = params.get("codec"), str(params.get("dtype", "")).removeprefix("torch.")
        dtypes = ("float32", "float16", "bfloat16", "bool")
        return codec not in codecs.names() or dtype not in dtypes or dtype in codecs.info(codec)["dtypes"]

    items[:] = [item for item in items if exists(item)]
    _mark_soak(items)
    _of_target(config, items)
    yield
    _some_rows(config, items)


# ---- transformers before 5.23: what it has not is skipped, with the reason


def _older_transformers():
    model = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return model is not None and not hasattr(model, "activation_checkpointing_enable")


#: Our own sentence, and Python's.
_LACKS = re.compile(
    r"needs transformers >= |[Uu]nexpected keyword arguments?:? '?(activation_checkpointing|every_n_layers|offload)"
    r"|transformers.* has no attribute 'save_on_cpu'|cannot import name 'modeling_layers'|Unknown type for trial"
)


def _skip_what_it_lacks():
    try:
        return (yield)
    except (ValueError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        if not _older_transformers() or not _LACKS.search(str(error)):
            raise
        pytest.skip(f"older transformers: {error}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from _skip_what_it_lacks())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from _skip_what_it_lacks())


# ---- configs


@pytest.fixture
def write_config(tmp_path):
    """Writes a config.json as the hub has it, and returns its folder."""

    def write(architecture, config, **entries):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        text = json.dumps({**config.to_dict(), "architectures": [architecture], **entries}, default=str)
        (folder / "config.json").write_text(text)
        return str(folder)

    return write


# ---- libraries that gcc makes


@pytest.fixture(scope="session")
def host_kernels(request, tmp_path_factory):
    from codec_libraries import HostKernels

    build = functools.partial(HostKernels.build, emulated=True)
    return HostKernels(built_once(request, tmp_path_factory, "host", build))


@pytest.fixture(scope="session")
def device_kernels(request, tmp_path_factory):
    from codec_kernels import DeviceKernels

    return DeviceKernels(built_once(request, tmp_path_factory, "device", DeviceKernels.build))


@pytest.fixture(scope="session")
def ampere_kernels(request, tmp_path_factory):
    """The same as sm_80 and later run them."""
    from codec_kernels import DeviceKernels

    build = functools.partial(DeviceKernels.build, arch=800)
    return DeviceKernels(built_once(request, tmp_path_factory, "ampere", build))


@pytest.fixture(scope="module")
def fresh_device(request, tmp_path_factory):
    """Makes kernels whose library has a state of its own: no word or error of another test."""
    from codec_kernels import DeviceKernels

    built = built_once(request, tmp_path_factory, "device", DeviceKernels.build)
    return lambda: DeviceKernels(shutil.copytree(built, tmp_path_factory.mktemp("fresh") / "device"))
