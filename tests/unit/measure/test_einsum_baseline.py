"""The einsum baseline has the model's outputs, and another model is noticed."""

from pathlib import Path

import pytest
import torch

from moe_core import moe_layers
from swinv2_moe.config import load_config, model_config
from swinv2_moe.errors import UserError
from swinv2_moe.measure.einsum_baseline import check_same_outputs, einsum_config, use_einsum_layers
from swinv2_moe.measure.throughput_options import Options
from swinv2_moe.measure.throughput_plan import combinations
from swinv2_moe.models import build_model

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart_digits.yaml"


class OneRank:
    def gather(self, value):
        return [value]


def models() -> list:
    config = load_config(QUICKSTART, [])
    made = []
    for each in (config, einsum_config(config)):
        torch.manual_seed(0)
        made.append(build_model(model_config(each), 10))
    use_einsum_layers(made[1])
    return made


def test_outputs_are_compared_in_evaluation():
    model, baseline = models()
    size = model.input_shape()
    images = torch.randn(3, *size)
    check_same_outputs(model, baseline, images, OneRank())
    assert baseline.training
    layer = next(iter(moe_layers(baseline).values()))
    with torch.no_grad():
        layer.experts.w2[0].normal_()  # one expert of many
    with pytest.raises(UserError, match=r"einsum: the outputs of \S+ differ .*% of the tokens"):
        check_same_outputs(model, baseline, images, OneRank())


def test_float16_sets_the_dtype_of_autocast():
    ((_, config, dense),) = combinations(
        QUICKSTART, [], Options(dtypes=("float16",), batch_sizes=(2,))
    )
    for each in (config, dense):
        assert (each.AMP_ENABLE, each.AMP_DTYPE) == (True, "float16")
