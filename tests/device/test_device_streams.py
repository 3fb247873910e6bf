"""Random programs on several streams: no two accesses of ours are unordered."""

import pytest
import stream_programs
import virtual_device

PROGRAMS = 150
IGNORED = (
    "ignore:.*compression costs memory",
    "ignore:The AccumulateGrad node's stream",
    "ignore:.*leaves payloads",  # rings smaller than one
)


def run(seeds):
    virtual_device.use_host_codecs(True)
    try:
        found = [stream_programs.check(seed) for seed in seeds]
    finally:
        virtual_device.use_host_codecs(False)
        virtual_device.order_threads(False)
    assert sum(one is None for one in found) <= len(found) // 25
    assert [words for one in found if one for words in one] == []


@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.parametrize("part", range(3))
def test_programs(part):
    run(range(part * PROGRAMS, (part + 1) * PROGRAMS))


@pytest.mark.soak
@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.parametrize("part", range(10))
def test_many_programs(part):
    run(range(1000 + 500 * part, 1500 + 500 * part))
