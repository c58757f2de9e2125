"""What one rank finds wrong with the data, on its own disk perhaps, ends the run on all of them, at
once."""

from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import torch

from swinv2_moe.config import data_config
from swinv2_moe.errors import UserError
from swinv2_moe.train.distributed import World
from swinv2_moe.train.run import _load_data


@dataclass(frozen=True)
class WithAnother(World):
    """Rank 0 of two, the second of which gives `others` in turn where ranks gather."""

    others: list = field(default_factory=list)

    def gather(self, value: object) -> list:
        return [value, self.others.pop(0)]


def world(*others: object) -> WithAnother:
    return WithAnother(0, 2, torch.device("cpu"), others=list(others))


def fail() -> None:
    raise UserError("no index")


def test_an_error_of_one_rank_is_every_ranks():
    assert world(None).everywhere(lambda: 3) == 3
    with pytest.raises(UserError, match=r"^no index \(rank 1\)$"):
        world("no index").everywhere(lambda: 3)
    with pytest.raises(UserError, match=r"^no index \(rank 0\)$"):
        world(None).everywhere(fail)
    with pytest.raises(UserError, match=r"^no index$"):
        world("no index").everywhere(fail)


def test_other_data_on_another_rank(make_config, tmp_path):
    config = data_config(make_config(tmp_path, {"DATA.BATCH_SIZE": 64}))
    with pytest.raises(
        UserError, match=r"rank 1 finds 24 \+ 6 images there, rank 0 1,437 \+ 360; their number and"
    ):
        _load_data(config, world(None, None, ("24 + 6", "names")), None, ExitStack())
    with pytest.raises(UserError, match="their number and their classes"):
        _load_data(config, world(None, None, ("1,437 + 360", "other names")), None, ExitStack())
