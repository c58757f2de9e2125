"""What the ranks compare before they do anything together."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import numpy as np
import pytest
import tool_cases
import torch
from run_cases import ALONE

from swinv2_moe.data.sources import ImageArrays
from swinv2_moe.ranks import agreement
from swinv2_moe.ranks import world as world_module
from swinv2_moe.ranks.agreement import check_same_data, check_same_start, differing_versions
from swinv2_moe.ranks.world import World

VALUES = {
    "TRAIN.BASE_LR": 1e-3,
    "MODEL.MOE.BLOCKS": [[], [0]],
    "DATA.PATH": "/local/0",
    "--resume": None,
    "SEED": 0,
}


@dataclass(frozen=True)
class WithOthers(World):
    """Rank 0 among others; where the ranks gather, `others[i]` is what the others give the i-th
    time."""

    others: list = field(default_factory=list)

    def gather(self, value: object) -> list:
        return [value, *self.others.pop(0)]


def world(*others: list) -> WithOthers:
    return WithOthers(0, 1 + len(others[0]), torch.device("cpu"), others=list(others))


def compare(*others: dict) -> None:
    """`VALUES` on rank 0 beside those of the other ranks."""
    printed = [{key: repr(value) for key, value in values.items()} for values in others]
    check_same_start(VALUES, world(list(map(agreement._digest, printed)), printed))


def refusal(*others: dict) -> str:
    message = tool_cases.refusal(compare, *others)
    return message.removeprefix("the ranks were started differently: ")


def test_a_process_alone_agrees_with_itself():
    check_same_start(VALUES, ALONE)


def test_the_key_and_both_values_are_named_but_places_of_data_may_differ():
    same = {key: value for key, value in VALUES.items() if key != "DATA.PATH"}
    compare(same, same)
    message = refusal(same, same | {"TRAIN.BASE_LR": 1e-2})
    assert message == "TRAIN.BASE_LR is 0.001 on rank 0, 0.01 on rank 2"
    message = refusal(same | {"MODEL.MOE.BLOCKS": [[], []]})
    assert message == "MODEL.MOE.BLOCKS is [[], [0]] on rank 0, [[], []] on rank 1"
    assert refusal(same | {"--resume": "auto"}) == "--resume is None on rank 0, 'auto' on rank 1"
    assert refusal(same | {"SEED": "0"}) == "SEED is 0 on rank 0, '0' on rank 1"


def test_keys_that_one_rank_lacks():
    """Another version of this program has other keys."""
    same = {key: value for key, value in VALUES.items() if key not in ("DATA.PATH", "SEED")}
    message = refusal(same | {"NEW.KEY": 1})
    assert message == "SEED is 0 on rank 0, None on rank 1; NEW.KEY is None on rank 0, 1 on rank 1"


def test_many_differences_are_counted():
    message = refusal(dict.fromkeys(VALUES, 7) | {"A": 1, "B": 2})
    assert message.count(" on rank 0, ") == 3
    assert message.endswith("; and 4 more")


def images(targets: list[int]) -> ImageArrays:
    return ImageArrays("images", np.zeros((len(targets), 2, 2), np.uint8), np.array(targets))


@pytest.mark.parametrize(
    ("train", "val", "names", "says"),
    [
        (
            [0, 1],
            [0],
            "ab",
            "rank 1 finds 2 + 1 images there, rank 0 3 + 1; their number and their",
        ),
        ([0, 1, 1], [0], "ab", "training image 1 is of class 'a' on rank 0 ('images[1]'), 'b' on"),
        (
            [0, 0, 1],
            [1],
            "ab",
            "different data there: validation image 0 is of class 'a' on rank 0 ('images[0]'),"
            " 'b' on rank 1 ('images[0]')",
        ),
        ([0, 0, 1], [0], "ac", "class 1 is 'b' on rank 0, 'c' on rank 1"),
        ([0, 0, 1], [0], "abc", "class 2 is None on rank 0, 'c' on rank 1"),
    ],
)
def test_other_data(train, val, names, says, monkeypatch):
    monkeypatch.setattr(agreement, "_PART", 2)
    meeting, given = Barrier(2, timeout=300), [None, None]

    class Thread(World):
        def gather(self, value: object) -> list:
            given[self.rank] = value
            meeting.wait()
            values = list(given)
            meeting.wait()
            return values

    def check(rank: int, train: list[int], val: list[int], names: str) -> str:
        rank_world = Thread(rank, 2, torch.device("cpu"))
        found = images(train), images(val), list(names)
        return tool_cases.refusal(check_same_data, "data", rank_world, *found)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(check, 0, [0, 0, 1], [0], "ab")
        second = pool.submit(check, 1, train, val, names)
    assert first.result() == second.result()
    assert first.result().startswith("DATA.PATH is 'data': ")
    assert says in first.result()
    check_same_data("data", ALONE, images(train), images(val), list(names))


def test_versions(monkeypatch):
    same = {"torch": "2.11.0", "commit": "abc", "triton": None}
    other = {"torch": "2.10.0", "commit": "abc", "triton": "3"}
    monkeypatch.setattr(agreement, "code_versions", lambda: same)
    assert differing_versions(world([same, same])) == []
    assert differing_versions(world([same, other])) == [
        "rank 0 runs torch 2.11.0, rank 2 2.10.0",
        "rank 0 runs triton None, rank 2 3",
    ]
    assert differing_versions(ALONE) == []


def test_nccl_keeps_the_order_of_the_host_unless_told_otherwise(monkeypatch):
    """NCCL's communicators, which run at the same time, could wait for each other for ever."""
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv(name, "0")
    with world_module.open_world("cuda"):
        assert os.environ[name] == "0"
    monkeypatch.delenv(name)
    with world_module.open_world("cuda"):
        assert os.environ[name] == "1"
