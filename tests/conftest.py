"""What every test starts from."""

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_hooks_left_by_torch():
    """torch before 2.12 leaves its hooks on the stack when a checkpointed forward raises: not for the next test."""
    yield
    if not hasattr(torch._C._autograd, "_make_saved_tensor"):
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()


def pytest_collection_modifyitems(config, items):
    """A test over codecs and dtypes goes over the pairs that exist."""
    from gradckpt import codec_info, codecs

    def exists(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        codec, dtype = params.get("codec"), str(params.get("dtype", "")).removeprefix("torch.")
        dtypes = ("float32", "float16", "bfloat16", "bool")
        return codec not in codecs() or dtype not in dtypes or dtype in codec_info(codec)["dtypes"]

    items[:] = [item for item in items if exists(item)]


def pytest_collection_finish(session):
    """Tests call checkpointing by the names of transformers 5.23; before, those names mean the old methods."""
    model = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if model is None or hasattr(model, "activation_checkpointing_enable"):
        return

    def enable(self, activation_checkpointing_kwargs=None, **more):
        self.gradient_checkpointing_enable(gradient_checkpointing_kwargs=activation_checkpointing_kwargs, **more)

    model.activation_checkpointing_enable = enable
    model.activation_checkpointing_disable = lambda self: self.gradient_checkpointing_disable()
    model.is_activation_checkpointing = property(lambda self: self.is_gradient_checkpointing)


@pytest.fixture(scope="session")
def avx512(tmp_path_factory):
    from codec_isas import EmulatedAvx512

    return EmulatedAvx512(tmp_path_factory.mktemp("avx512"))


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory):
    from direct_kernels import HostKernels

    return HostKernels(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="session")
def device_kernels(tmp_path_factory):
    from direct_kernels import DeviceKernels

    return DeviceKernels(tmp_path_factory.mktemp("device"))
