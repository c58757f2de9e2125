"""CUDA graphs of a model's pass: what is refused, and that a pass waits for no device."""

from types import SimpleNamespace

import pytest
import torch
from host_reads import count_reads
from trainer_cases import make_batch, make_step

from moe_core import moe_layers
from swinv2_moe.errors import UserError
from swinv2_moe.measure.rounds import capture
from swinv2_moe.measure.throughput import Subject, _captured, check_graph
from swinv2_moe.train.step import TrainingStep


class RowsThemselves(torch.nn.Module):
    """Experts that do nothing: a CPU's loop over experts reads where their rows end, a GPU's
    kernels do not (tests/distributed/test_host_reads.py)."""

    def forward(self, rows, offsets):
        return rows


def make_step_without_experts(options: str) -> TrainingStep:
    step = make_step(0, 1, options)
    for layer in moe_layers(step.model).values():
        layer.experts = RowsThemselves()
    return step


KINDS = ["", "MODEL.MOE.TOP_K 2", "MODEL.MOE.BATCH_PRIORITIZED True", "MODEL.MOE.ROUTER cosine"]


@pytest.mark.parametrize("factor", [0, 1.25])
@pytest.mark.parametrize("options", KINDS)
def test_a_pass_reads_nothing_on_the_host(options, factor):
    step = make_step_without_experts(f"MODEL.MOE.EVAL_CAPACITY_FACTOR {factor} {options}")
    model = step.model.eval()
    images = make_batch(4).images
    with torch.inference_mode():
        model(images)
        assert count_reads(lambda: model(images)) == []


@pytest.mark.parametrize("factor", [0, 1.25])
def test_a_pass_with_gradients_reads_nothing_on_the_host(factor):
    step = make_step_without_experts(f"MODEL.MOE.CAPACITY_FACTOR {factor}")
    batch = make_batch(4)

    def forward_and_backward() -> None:
        loss = step.losses(*step._inputs(batch))["loss"]
        loss.backward()

    forward_and_backward()
    assert count_reads(forward_and_backward) == []


def test_what_cannot_be_captured_is_refused():
    for compiled, size, device, message in (
        ("on", 1, "cuda", "--graph .* --compile is 'on'"),
        ("off", 2, "cuda", "--graph needs one rank, not 2"),
        ("off", 1, "cpu", "--graph needs a GPU, the device is 'cpu'"),
    ):
        world = SimpleNamespace(size=size, device=torch.device(device))
        with pytest.raises(UserError, match=message):
            check_graph([compiled], world)
    one_gpu = SimpleNamespace(size=1, device=torch.device("cuda"))
    check_graph(["off"], one_gpu)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGPU:
    def test_a_replay_reads_its_inputs_again(self):
        x = torch.ones(4, device="cuda")
        y = torch.zeros(4, device="cuda")
        replay = capture(lambda: y.copy_(2 * x))
        x.fill_(3)
        replay()
        assert y.tolist() == [6, 6, 6, 6]

    def test_a_pass_that_reads_on_the_host_is_named(self):
        x = torch.ones(4, device="cuda")
        with pytest.raises(UserError, match="--graph: a sum cannot be captured"):
            _captured(Subject(torch.nn.Identity(), lambda: x.sum().item(), None), "a sum")
        torch.rand(1, device="cuda")  # the failed capture has let go of the generator
