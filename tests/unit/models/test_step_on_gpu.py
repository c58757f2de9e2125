"""A whole training step on a CUDA device (`pytest -m gpu`): nothing read back to the host, and one
CUDA graph."""

import pytest
import torch
import torch.nn.functional as F
from trainer_cases import QUICKSTART, SMALL
from triton_cases import captured, no_reads_from_the_device

from swinv2_moe.config import load_config, model_config
from swinv2_moe.models import build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Step:
    """Forward, both losses, backward, clipping and update of a small model with experts, in
    bf16."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = build_model(
            model_config(load_config(QUICKSTART, SMALL.split())), num_classes=10
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, capturable=True)
        size = self.model.patch_embed.img_size
        self.images = torch.randn(16, 3, *size, device="cuda")
        self.labels = torch.arange(16, device="cuda") % 10

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            logits, aux_loss = self.model.forward_with_aux(self.images)
        loss = F.cross_entropy(logits.float(), self.labels) + 0.01 * aux_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        return loss.detach()


def test_a_step_reads_nothing_back():
    step = Step()
    step()  # what is compiled or made on first use is there now
    with no_reads_from_the_device():
        step()


def test_a_step_is_one_cuda_graph():
    eager, replayed = Step(), Step()
    graph, loss = captured(replayed)
    for _ in range(3):
        eager()
    for _ in range(4):
        graph.replay()
        expected = eager()
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    parameters = zip(replayed.model.parameters(), eager.model.parameters(), strict=True)
    for found, wanted in parameters:
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)
