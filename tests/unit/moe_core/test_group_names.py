"""What the descriptions of process groups say of their ranks."""

import pytest

from moe_core.parallel.make_groups import _ranks_name


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([3], "3"), ([0, 1, 2, 3], "0-3"), ([1, 9, 17, 25], "1-25 by 8"), ([4, 5], "4-5")],
)
def test_ranks_are_named(ranks, name):
    assert _ranks_name(ranks) == name
