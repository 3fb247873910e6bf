"""Sizes and devices as people write them."""

import pytest

from gradckpt._offload import parse_bytes
from gradckpt._planning.devices import DEVICES, find


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("80 gb", 80 * 10**9),
        (" 1.5TiB ", 3 * 2**39),
        ("0.1GB", 10**8),
        ("16g", 16 * 10**9),
        ("512 KiB", 2**19),
        ("1 B", 1),
        (25769803776, 25769803776),
        ("25769803776", 25769803776),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["50%", "-1", "-3GiB", "0", "0GiB", "0.2", "GiB", "", "24 GBit", "1e9", 0, -5, True, None, "24iB"]
)
def test_what_is_not_a_size(text):
    with pytest.raises(ValueError, match=r"^gradckpt: .*; "):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("RTX-4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("rtx_pro_6000", "RTX-PRO-6000"),
        ("a100 80gb", "A100-80GB"),
        ("a100-80", "A100-80GB"),
        ("h100 sxm", "H100-SXM"),
        ("mi300x", "MI300X"),
        ("L4", "L4"),
        ("rtx6000ada", "RTX-6000-Ada"),
    ],
)
def test_devices_by_their_names(asked, name):
    assert find(asked).name == name


@pytest.mark.parametrize(
    ("asked", "candidates"), [("A100", ["A100-40GB", "A100-80GB"]), ("h100", ["H100-PCIe", "H100-SXM"])]
)
def test_a_name_of_several_devices_lists_them(asked, candidates):
    with pytest.raises(ValueError, match="several forms; choose one of: " + ", ".join(candidates) + "$"):
        find(asked)


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown device 'RTX-4091'; did you mean 'RTX-4090'") as caught:
        find("RTX-4091")
    assert all(device.name in str(caught.value) for device in DEVICES)
    with pytest.raises(ValueError, match="unknown device ''; choose one of"):
        find("")


def test_figures_are_plausible():
    """Memory is a little less than the name says; no rate has a wrong unit."""
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        assert 14 * 2**30 < device.memory < 256 * 2**30
        assert device.fp32 <= device.bf16 < 5000
        assert 10 < device.link < 500 <= 2 * device.bandwidth
    assert 23 * 2**30 < find("RTX-4090").memory < 24 * 2**30
