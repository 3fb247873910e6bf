"""What every test starts from."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_hooks_left_by_torch():
    """torch before 2.12 leaves its hooks on the stack when a checkpointed forward raises: not for the next test."""
    yield
    if not hasattr(torch._C._autograd, "_make_saved_tensor"):
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory):
    from direct_kernels import HostKernels

    return HostKernels(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="session")
def device_kernels(tmp_path_factory):
    from direct_kernels import DeviceKernels

    return DeviceKernels(tmp_path_factory.mktemp("device"))
