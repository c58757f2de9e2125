"""One training step without a data set, a loop or a run directory."""

import pytest
import torch
import torch.nn.functional as F
import triton_cases
from triton_cases import INTERPRETED, StubDriver

from swinv2_moe.config import model_config, train_config
from swinv2_moe.data.datasets import Batch
from swinv2_moe.errors import UserError
from swinv2_moe.models import build_model
from swinv2_moe.ranks.world import World, seed_everything
from swinv2_moe.train.graph import compile_kernels
from swinv2_moe.train.optim import LossScaler
from swinv2_moe.train.step import TrainingStep

CLASSES = 7


@pytest.fixture
def make_step(make_config, tmp_path):
    """`make_step({"KEY": value})`: a step of a small model in this process."""

    def make(keys: dict[str, object] | None = None) -> TrainingStep:
        config = make_config(tmp_path, {"AUG.MIXUP": 0, "AUG.CUTMIX": 0} | (keys or {}))
        seed_everything(0)
        model = build_model(model_config(config), CLASSES)
        step = TrainingStep(train_config(config), World(0, 1, torch.device("cpu")), model, CLASSES)
        step.wrapped.train()
        return step

    return make


@pytest.fixture
def batch() -> Batch:
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return Batch(images, torch.arange(8) % CLASSES, [])


def test_a_step_depends_on_its_number_and_weights_alone(make_step, batch):
    results = [make_step().run([batch], step) for step in (3, 3, 4)]
    assert results[0] == results[1] != results[2]
    assert results[0].has_finite_loss
    assert not results[0].was_skipped
    assert not results[0].stopping


def test_accumulated_batches_are_one_step(make_step, batch):
    keys = {"MODEL.MOE.GATE_NOISE": 0, "MODEL.DROP_PATH_RATE": 0, "MODEL.MOE.CAPACITY_FACTOR": 0}
    keys |= {"MODEL.MOE.AUX_LOSS_WEIGHT": 0}
    halves = [Batch(batch.images[i : i + 4], batch.targets[i : i + 4], []) for i in (0, 4)]
    together, apart = make_step(keys).run([batch], 0), make_step(keys).run(halves, 0)
    assert apart.loss == pytest.approx(together.loss, rel=1e-4)
    assert apart.grad_norm == pytest.approx(together.grad_norm, rel=1e-3)


def test_the_signal_is_in_the_result(make_step, batch):
    step = make_step()
    step.stop.received = "SIGTERM"
    assert step.run([batch], 0).stopping


def test_a_loss_that_is_not_finite_is_skipped_then_raised(make_step, batch):
    step = make_step({"TRAIN.SKIP_NON_FINITE": 1})
    before = [parameter.clone() for parameter in step.model.parameters()]
    bad = batch._replace(images=batch.images * float("nan"))
    result = step.run([bad], 0)
    assert result.was_skipped
    assert not result.has_finite_loss
    assert all(map(torch.equal, before, step.model.parameters()))
    with pytest.raises(UserError, match=r"step 2: .* begins at the input images"):
        step.run([bad], 1)


def test_a_skipped_step_does_not_count_for_the_average(make_step, batch):
    step = make_step({"TRAIN.SKIP_NON_FINITE": 1, "TRAIN.EMA_DECAY": 0.9})
    for number in range(2):  # the average of one step is its weights
        step.run([batch], number)
    before = [parameter.clone() for parameter in step.ema.module.parameters()]
    step.run([batch._replace(images=batch.images * float("nan"))], 2)
    assert all(map(torch.equal, before, step.ema.module.parameters()))


def test_the_targets_of_mixup_are_not_smoothed_again(make_step, batch):
    keys = {"AUG.MIXUP": 0.8, "MODEL.LABEL_SMOOTHING": 0.1, "MODEL.MOE.AUX_LOSS_WEIGHT": 0}
    step, logits = make_step(keys), torch.randn(8, CLASSES)
    step.mixup = lambda images, targets: (images, F.one_hot(targets, CLASSES).float())
    step.wrapped = lambda images: (logits, torch.zeros(()))
    torch.testing.assert_close(
        step.losses(*step._inputs(batch))["loss"], F.cross_entropy(logits, batch.targets)
    )


def test_an_overflow_begins_the_count_of_good_steps_anew():
    scaler = LossScaler(enabled=True)
    scaler.good_steps = scaler.GROWTH_INTERVAL - 1
    scaler.update(False)
    scaler.update(True)
    assert scaler.scale == scaler.INITIAL / 2


@pytest.fixture
def triton_on_cpu(monkeypatch):
    """The forms of Triton take a CPU's tensors, for a GPU that is not here."""
    triton = pytest.importorskip("triton")
    launch = pytest.importorskip("moe_core.ops.launch")
    if INTERPRETED or not launch._IS_KNOWN:
        pytest.skip("Triton launches its kernels itself")
    from moe_core.ops import backend

    monkeypatch.setattr(triton.runtime.driver, "_active", StubDriver())
    with triton_cases.triton_on_cpu(monkeypatch):
        yield launch
    for form in (
        "route.triton",
        "route.loss_triton",
        "plan.triton",
        "combine.triton",
        "ffn.triton",
    ):
        for kernel in vars(backend.load(*form.split("."))).values():
            if isinstance(kernel, launch.RecordableKernel):  # what was prepared for that GPU
                kernel.kernel.device_caches.clear()


def test_the_kernels_of_a_step_are_compiled_before_it(triton_on_cpu, monkeypatch, make_step, batch):
    """By passes of a copy that launch none of them."""
    found = []
    monkeypatch.setattr(triton_on_cpu, "compile_together", found.extend)
    step = make_step({"MODEL.MOE.KERNELS": "triton"})
    weights = {name: value.clone() for name, value in step.model.state_dict().items()}
    shape = batch.images.shape
    compile_kernels(step.model, shape, step.world.device, step.compute_dtype, step.autocast)
    names = {job.args[0].__name__ for job in found}
    assert names >= {"route_kernel", "hidden_kernel", "hidden_grad_kernel", "weight_grad_kernel"}
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert all(parameter.grad is None for parameter in step.model.parameters())
