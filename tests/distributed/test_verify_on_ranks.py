"""Ranks of a group select the same forms, though a check of kernels fails on one of them alone."""

import os

import pytest
import torch
import torch.distributed as dist
from gloo_processes import patches
from moe_cases import make_layer

from moe_core.call import agree
from moe_core.ops import backend
from moe_core.parallel import make_expert_groups

FORMS = [f"{operation}.triton" for operation in ("route", "plan", "combine", "ffn")]
OPTIONS = {"top_k": 2, "aux_loss": "none", "dtype": torch.float32}


def selected(rank: int, failing: list[str], runs: bool) -> tuple[list[str], list[str]]:
    """The forms that were checked, and those that are selected; `failing` fail on the last rank.

    Args:
        runs: whether a layer runs, for which all have to fail: there is no GPU.
    """
    os.environ.update(TRITON_INTERPRET="1", MOE_CORE_VERIFY="always")
    checked = []

    def fault(of: backend.Checked) -> str:
        checked.append(of.form)
        return "planted" if rank == dist.get_world_size() - 1 and of.form in failing else ""

    patches.setattr(backend.load("verify"), "_fault", fault)
    backend._verdicts.clear()
    backend._languages.cache_clear()
    layer = make_layer(group=make_expert_groups(2), kernels="triton", **OPTIONS)
    x = torch.randn(5 + rank, 6, generator=torch.Generator().manual_seed(rank))
    if runs:
        single = make_layer(kernels="torch", **OPTIONS)
        for _ in range(2):
            torch.testing.assert_close(layer(x)[0], single(x)[0])
    else:
        agree(layer.config, x, layer.group.ranks)
    request = backend.Request("triton", "cpu", torch.float32, activation="gelu")
    forms = [backend.select(form.removesuffix(".triton"), request) for form in FORMS]
    backend._verdicts.clear()
    backend._languages.cache_clear()
    return checked, forms


@pytest.mark.parametrize(
    ("failing", "runs"), [(FORMS, True), (["plan.triton", "ffn.triton"], False), ([], False)]
)
def test_ranks_decide_alike(run_processes, failing, runs):
    pytest.importorskip("triton")
    expected = [form.replace("triton", "reference") if form in failing else form for form in FORMS]
    for checked, forms in run_processes(selected, 2, failing, runs):
        assert sorted(checked) == sorted(FORMS)  # each once
        assert forms == expected
