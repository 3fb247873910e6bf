"""A stage's job on the CPU, for tests of benchmarks/gpu.py."""

import sys
from types import SimpleNamespace

from checkout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_device
from gpu_job import Job


class Card(gpu_device.Device):
    """A CPU that is judged as a card."""

    @property
    def is_cuda(self):
        return True


def job_of(folder, device=None, small=True):
    options = SimpleNamespace(small=small, out=folder, result=folder / "result.json", stage="test", seconds=600)
    return Job(device or gpu_device.Device("cpu"), options)
