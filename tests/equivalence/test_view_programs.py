"""Random programs of views: nothing differs between the two runs, so nothing raises."""

import pytest
from view_programs import wrong

SHARE = 150


@pytest.mark.parametrize("share", [*range(4), *(pytest.param(n, marks=pytest.mark.soak) for n in range(4, 60))])
def test_programs_of_views(share):
    found = [text for seed in range(share * SHARE, (share + 1) * SHARE) for text in wrong(seed)]
    assert found == []
