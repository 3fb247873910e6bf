"""gradckpt._planning.comparison.longest: a length that fits, and 1.03 times it that does not."""

import random

import pytest

from gradckpt._planning.comparison import longest
from gradckpt._planning.simulated_tensors import NotSimulated


@pytest.mark.parametrize("seed", range(200))
def test_it_fits_and_more_does_not(seed):
    """Sizes that grow with the length or its square, in the steps of an allocator."""
    draw = random.Random(seed)
    slope, bend = draw.random() * 1e6, draw.choice([0, 0, 100 * draw.random()])
    held, limit = int(draw.random() * 1e10), int(draw.random() * 8e10)
    tokens = draw.choice([64, 512, 4096, 32768])
    tried = []

    def needed(length):
        tried.append(length)
        return int(held + slope * length + bend * length**2 + random.Random(length).random() * 2e7)

    found = longest(tokens, needed(tokens), needed, held, limit, None)
    assert found is not None
    assert len(tried) < 12
    if found:
        assert needed(found) <= limit
    if held <= limit:
        assert any(found < length <= max(found + 1, int(found * 1.03)) and needed(length) > limit for length in tried)


def test_no_more_than_the_positions():
    assert longest(100, 1100, lambda length: 1000 + length, 1000, 10**9, 512) == 512


def test_what_is_held_alone_does_not_fit():
    assert longest(100, 1100, pytest.fail, 1000, 900, None) == 0


def test_lengths_that_cannot_be_tried():
    def refuse(error):
        def needed(length):
            raise error

        return needed

    assert longest(100, 1100, refuse(NotSimulated("values")), 1000, 5000, None) == 100
    assert longest(100, 1100, refuse(ValueError("a multiple of 64")), 1000, 5000, None) is None


def test_sizes_that_do_not_grow():
    assert longest(100, 1000, lambda length: 1000, 1000, 5000, 4096) == 4096
