"""The order of rows within a 2DH exchange."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_core.parallel.hierarchical import _transpose_blocks


@st.composite
def tables(draw):
    num_rows, num_columns = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    row = st.lists(st.integers(0, 4), min_size=num_columns, max_size=num_columns)
    return torch.tensor(draw(st.lists(row, min_size=num_rows, max_size=num_rows)))


@given(tables())
def test_blocks_are_transposed(sizes):
    rows = torch.arange(int(sizes.sum())).unsqueeze(1)
    blocks = iter(rows.split(sizes.flatten().tolist()))
    table = [[next(blocks) for _ in row] for row in sizes]
    expected = torch.cat([block for column in zip(*table, strict=True) for block in column])
    assert torch.equal(_transpose_blocks(rows, sizes), expected)
