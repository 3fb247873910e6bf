"""Random programs of views: nothing differs between the two runs, so nothing raises."""

import pytest
from view_programs import wrong

SHARE = 150


def check(share):
    found = [text for seed in range(share * SHARE, (share + 1) * SHARE) for text in wrong(seed)]
    assert found == []


@pytest.mark.parametrize("share", range(4))
def test_programs_of_views(share):
    check(share)


@pytest.mark.soak
@pytest.mark.parametrize("share", range(4, 60))
def test_many_more_programs_of_views(share):
    check(share)
