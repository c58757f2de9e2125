"""The collectives of docs/how-to/write-a-collective.md run as they are written there."""

import re
from pathlib import Path

import torch
import torch.distributed as dist

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-collective.md"


def code() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def documented(rank: int, blocks: list[str]) -> None:
    names: dict = {}
    for block in blocks:
        exec(block, names)
    process_group = dist.group.WORLD
    size = process_group.size()
    my_all_to_all = names["MyAllToAll"](process_group, 8 * 1000)
    for turn in range(3):
        rows = torch.arange(size * 1000).view(size, 1000) + 10_000 * rank + turn
        expected = torch.empty_like(rows)
        dist.all_to_all_single(expected, rows)
        assert torch.equal(my_all_to_all(rows), expected)


def test_the_page_runs(run_processes):
    blocks = code()
    assert len(blocks) == 1
    class_lines = blocks[0].split("\n\n\n")[1].strip().splitlines()
    assert len(class_lines) <= 30  # the page promises an all-to-all in a screenful
    run_processes(documented, 4, blocks)
