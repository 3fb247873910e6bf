"""Random states of devices, on a machine without any:
torch in a process of its own is made to believe in some."""

import json

import pytest
from checkout import HELPERS
from processes import printed_by

ALIKE = [
    "one",
    "same twice",
    "in a container",
    "none",
    "not preserved",
    "keyword",
    "two types",
    "two types, not preserved",
    "meta",
    "wakes",
    "wakes, not preserved",
]


@pytest.fixture(scope="module")
def reports():
    return json.loads(printed_by(HELPERS / "pretend_devices.py"))


def once(report):
    """Torch looks at the devices twice, and warns each time: the text counts, and that it comes."""
    return {**report, "warnings": sorted({*report["warnings"]})} if isinstance(report, dict) else report


@pytest.mark.parametrize("name", ALIKE)
def test_states_as_torch_keeps_them(reports, name):
    assert once(reports["compat"][name]) == once(reports["torch"][name])


def test_the_programs_are_all_compared(reports):
    assert [*reports["torch"]] == ALIKE


@pytest.mark.parametrize("name", [n for n in ALIKE if n != "keyword" and not n.startswith("two types")])
def test_gradckpt_keeps_what_torch_keeps(reports, name):
    assert reports["gradckpt"][name] == reports["torch"][name]


def test_difference_device_rng(reports):
    """Found in keywords too, and of a second device type: what was kept is drawn again,
    and put back."""
    keyword, two = reports["gradckpt"]["keyword"], reports["gradckpt"]["two types"]
    assert keyword["recompute"]["cuda"][0] == keyword["forward"]["cuda"][0]
    assert reports["torch"]["keyword"]["recompute"]["cuda"][0] != reports["torch"]["keyword"]["forward"]["cuda"][0]
    assert two["recompute"]["xpu"] == two["forward"]["xpu"]
    assert two["after"]["xpu"] == [two["forward"]["xpu"][0] + 1]
    assert two["warnings"] == []


def test_a_device_that_wakes_up_in_the_region_is_refused(reports):
    assert "device state was initialized in the forward pass" in reports["torch"]["wakes"]
    assert reports["torch"]["wakes, not preserved"] is None


def test_device_without_kernels(reports):
    said = reports["without kernels"]
    if said is None:
        pytest.skip("this torch makes no tensors of a device that is written in Python")
    assert said["device"] == "odd:0"
    assert said["uncompressed"] == {"device without kernels": 1}
    assert "with codec 'int8' (device without kernels); it takes plain strided float32" in said["encode"]
