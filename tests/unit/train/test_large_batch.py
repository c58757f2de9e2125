"""LAMB and LARS: timm's, with a trust ratio for each expert."""

import copy

import pytest
import torch
from timm.optim import Lamb, Lars
from torch import nn

from swinv2_moe.config import load_config, train_config
from swinv2_moe.errors import UserError
from swinv2_moe.train.large_batch import ExpertLamb, ExpertLars
from swinv2_moe.train.optim import scaled_learning_rate

EXPERTS, STEPS = 3, 5
NAMES = ("lamb", "lars")


class Stack(nn.Module):
    """A stack of matrices, with values of another size in each, and a plain matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = torch.tensor([0.1, 1.0, 10.0]).reshape(EXPERTS, 1, 1)
        self.stack = nn.Parameter(sizes * torch.randn(EXPERTS, 4, 5))
        self.plain = nn.Parameter(torch.randn(6, 4))


def optimizers(name: str, parameters: list, stacked: list, reference: list) -> tuple:
    """Ours for `parameters` and timm's for `reference`, where each expert is a parameter."""
    ours = [{"params": parameters, "weight_decay": 0.05}]
    theirs = [{"params": reference, "weight_decay": 0.05}]
    if name == "lamb":
        options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6}
        return ExpertLamb(ours, stacked, **options), Lamb(theirs, max_grad_norm=None, **options)
    options = {"lr": 1.0, "momentum": 0.9}
    return ExpertLars(ours, stacked, **options), Lars(theirs, nesterov=True, **options)


@pytest.mark.parametrize("name", NAMES)
def test_an_expert_is_a_matrix_of_its_own(name):
    model = Stack()
    experts = [nn.Parameter(matrix.clone()) for matrix in model.stack.detach()]
    plain = nn.Parameter(model.plain.detach().clone())
    ours, theirs = optimizers(name, [model.stack, model.plain], [model.stack], [*experts, plain])
    for _ in range(STEPS):
        model.stack.grad, model.plain.grad = torch.randn(EXPERTS, 4, 5), torch.randn(6, 4)
        for expert, gradient in zip(experts, model.stack.grad, strict=True):
            expert.grad = gradient.clone()
        plain.grad = model.plain.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(model.stack, torch.stack(experts))
    torch.testing.assert_close(model.plain, plain)
    together = Stack()
    together.stack.grad = model.stack.grad
    whole, _ = optimizers(name, [together.stack], [], [plain])
    whole.step()
    assert not torch.allclose(together.stack, model.stack)


@pytest.mark.parametrize("name", NAMES)
def test_training_resumes_to_the_same_weights(make_trainer, name):
    """The checkpoint holds the moments, and the number of updates."""
    keys = {"TRAIN.OPTIMIZER.NAME": name, "TRAIN.BASE_LR": 0.1, "TRAIN.EPOCHS": 2}
    keys["TRAIN.WARMUP_EPOCHS"] = 0
    trainer = make_trainer(keys)
    trainer.step.wrapped.train()
    batches = [batch for batch, _ in zip(trainer.data.train_loader, range(4), strict=False)]
    for step in range(2):
        trainer.step.run([batches[step]], step)
    state = copy.deepcopy(trainer.step.state())
    kinds = {"lamb": {"optimizer/exp_avg", "optimizer/exp_avg_sq"}}
    expected = kinds.get(name, {"optimizer/momentum_buffer"})
    assert {section for section in state if section} == expected
    updates = trainer.step.scaler.updates
    for step in (2, 3):
        trainer.step.run([batches[step]], step)

    again = make_trainer(keys)
    again.step.wrapped.train()
    again.step.model.load_state_dict(state.pop(""))
    from swinv2_moe.train.optim import check_optimizer_sections, restore_optimizer

    check_optimizer_sections(again.step.optimizer, state, updates)
    restore_optimizer(again.step.optimizer, again.step.model, state, updates)
    for step in (2, 3):
        again.step.run([batches[step]], step)
    for key, value in trainer.step.model.state_dict().items():
        assert torch.equal(value, again.step.model.state_dict()[key]), key


def test_learning_rate_grows_with_the_root_of_the_batch():
    rates = {}
    for scaling in ("linear", "sqrt"):
        opts = ["DATA.BATCH_SIZE", "1024", "TRAIN.LR_SCALING", scaling]
        config = train_config(load_config("quickstart_digits", opts))
        rates[scaling] = scaled_learning_rate(config, 1e-3, world_size=8)
    assert rates == {"linear": pytest.approx(16e-3), "sqrt": pytest.approx(4e-3)}


@pytest.mark.parametrize("name", NAMES)
def test_sharded_parameters_are_refused(name):
    opts = ["TRAIN.OPTIMIZER.NAME", name, "TRAIN.SHARD_TRUNK", "True"]
    with pytest.raises(UserError, match=f"TRAIN.OPTIMIZER.NAME is '{name}': it needs whole"):
        load_config("quickstart_digits", opts)
