"""What the phases of a step compute and move, against formulas; and what bounds a phase."""

import os
import statistics
from collections import defaultdict
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from trainer_cases import make_batch, make_step

from moe_core import expert_parameters, moe_layers
from moe_core.ops import backend
from moe_core.ops.ffn.inputs import hidden_rows
from moe_core.ops.native import library
from moe_core.parallel import ParallelStrategy
from moe_core.parallel.cost_model import LayerShape, volume
from swinv2_moe.errors import UserError
from swinv2_moe.measure import phases, roofline
from swinv2_moe.measure.configurations import repeatable_step
from swinv2_moe.measure.phases import Work, bytes_read
from swinv2_moe.measure.roofline import Peak, Phase, Roofline, draw
from swinv2_moe.measure.spread import Times
from swinv2_moe.train.section import CheckpointConfig

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart_digits.yaml"
FLOAT, LONG, INT = 4, 8, 4  # bytes


def work_of(run) -> Work:
    """The work of all operators of `run`, which has no MoE layers."""
    return sum(phases.count(torch.nn.Identity(), run).values(), Work())


def traffic(run) -> int:
    return work_of(run).memory


# Memory


@given(st.integers(1, 300), st.integers(1, 5))
def test_an_operator_reads_what_it_is_given_and_writes_what_it_makes(rows, columns):
    a, b = torch.zeros(rows, columns), torch.zeros(rows, columns)
    size = FLOAT * rows * columns
    assert traffic(lambda: a + b) == 3 * size
    assert traffic(lambda: a + a) == 2 * size  # one tensor is read once
    assert traffic(lambda: a.add_(b)) == 3 * size
    assert traffic(lambda: a.copy_(b)) == 2 * size
    assert traffic(lambda: a.fill_(1.0)) == size
    assert traffic(lambda: torch._foreach_mul_([a, b], 2.0)) == 4 * size
    assert traffic(lambda: a.view(-1)[1:].unsqueeze(0).detach()) == 0
    assert traffic(lambda: torch.empty_like(a)) == 0
    shaped = (torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like)
    shaped += (lambda t: torch.full_like(t, 2.0),)
    shaped += (lambda t: t.new_zeros(t.shape), lambda t: t.new_ones(t.shape))
    assert [traffic(lambda make=make: make(a)) for make in shaped] == [size] * len(shaped)
    assert traffic(lambda: a.bernoulli_(0.5)) == size
    assert traffic(lambda: a.t().contiguous().view(-1)) == (0 if 1 in (rows, columns) else 2 * size)
    assert traffic(lambda: a[:1].expand(rows, columns) + b) == 2 * size + FLOAT * columns


def test_a_linear_layer_forward_and_backward():
    batch, width, out = 7, 5, 3
    layer, grad = torch.nn.Linear(width, out), torch.zeros(batch, out)
    x = torch.zeros(batch, width, requires_grad=True)
    found = work_of(lambda: torch.autograd.grad(layer(x), [x, *layer.parameters()], grad))
    inputs, weights, outputs, bias = batch * width, width * out, batch * out, out
    forward = inputs + weights + bias + outputs
    backward = (outputs + weights + inputs) + (outputs + inputs + weights) + (outputs + bias)
    assert found == Work(flops=3 * 2 * batch * width * out, memory=FLOAT * (forward + backward))


def test_bytes_read(tmp_path):
    if not Path("/proc/self/io").exists():
        pytest.skip("only Linux tells")
    (tmp_path / "file").write_bytes(os.urandom(123_456))
    assert bytes_read(lambda: (tmp_path / "file").read_bytes()) == pytest.approx(123_456, abs=10)
    assert bytes_read(lambda: None) < 10


# Phases, on three blocks, two of them with 4 experts, dropless


@pytest.fixture(scope="module")
def step():
    return make_step(0, 1)


@pytest.fixture(scope="module")
def batch():
    return make_batch(1)


@pytest.fixture(scope="module")
def work(step, batch):
    step.run([batch], 0)  # creates the moments
    return phases.count(step.model, lambda: step.run([batch], 0))


def shapes(step):
    """(tokens T, model dim M, hidden dim H, experts E) of each MoE layer: images of 16 px, patches
    of 2 px, merged once and twice."""
    layers = moe_layers(step.model).values()
    return [
        (tokens, layer.config.model_dim, layer.config.hidden_dim, layer.config.num_experts)
        for tokens, layer in zip((32 * 16, 32 * 4), layers, strict=True)
    ]


def test_flops_of_the_phases_are_those_of_the_step(step, batch, work):
    assert work["router"].flops == sum(3 * 2 * t * m * e for t, m, _, e in shapes(step))
    assert work["experts"].flops == sum(3 * 2 * 2 * t * m * h for t, m, h, _ in shapes(step))
    # `dispatch` is a part of `experts` where one operator does both
    assert set(work) - {"dispatch"} == {"trunk", "router", "experts", "optimiser"}
    with FlopCounterMode(display=False) as counter:
        step.run([batch], 0)
    assert sum(found.flops for found in work.values()) == counter.get_total_flops()


def test_a_backward_pass_that_computes_blocks_again_counts_them_again(batch, work):
    again = make_step(0, 1, "TRAIN.USE_CHECKPOINT true")
    found = phases.count(again.model, lambda: again.run([batch], 0))
    for name in ("router", "experts"):
        assert found[name].flops == work[name].flops * 4 / 3


def test_operators_of_another_thread_do_not_name_nodes(step):
    """On a GPU the backward pass has a thread, whose sequence numbers begin at 0 again."""
    x = torch.ones(1, requires_grad=True)
    with phases.Operators(step.model, defaultdict(Work)) as operators:
        _ = x * 2
        numbered = dict(operators.differentiated)
        thread = Thread(target=operators._phase, args=("aten::mul",))
        thread.start()
        thread.join()
    assert set(numbered.values()) == {"trunk"}
    assert operators.differentiated == numbered


def test_memory_of_dispatch(step, batch, monkeypatch):
    """Without the operator that does both."""
    monkeypatch.setitem(backend.FORMS, "ffn", backend.FORMS["ffn"][-1:])
    work = phases.count(step.model, lambda: step.run([batch], 0))
    expected = 0
    for t, m, *_ in shapes(step):
        rows, places = FLOAT * t * m, LONG * t  # dropless, one expert a token: rows are tokens
        forward = (2 * rows + 2 * places) + (2 * rows + FLOAT * t + 2 * places)
        expected += forward + (3 * rows + 2 * FLOAT * t + 2 * places) + (2 * rows + places)
    assert work["dispatch"].memory == pytest.approx(expected, rel=0.01)


@pytest.mark.skipif(library.chosen() is None, reason="C++ does not compile here")
def test_memory_of_experts(step, work):
    """Of the operator with dispatch and combine."""
    expected = 0
    for t, m, h, e in shapes(step):
        tokens, gates, hidden = FLOAT * t * m, FLOAT * t, FLOAT * hidden_rows(t, e) * h
        parameters = 2 * FLOAT * e * m * h + FLOAT * e * h + FLOAT * e * m
        inputs = tokens + gates + parameters + 2 * LONG * t + INT * e  # choices, slots, offsets
        # the activation happens within it
        expected += inputs + (tokens + hidden)
        expected += (tokens + inputs + hidden) + (tokens + gates + parameters)
    assert work["experts"].memory == pytest.approx(expected, rel=0.02)


def test_the_optimiser_moves_every_parameter(step, work):
    num_bytes = FLOAT * sum(p.numel() for p in step.model.parameters())
    # AdamW reads four tensors and writes three, the norm reads one; besides, a few short ones
    assert 8 * num_bytes < work["optimiser"].memory < 11 * num_bytes
    assert work["optimiser"].flops == 0


def test_every_operator_of_a_step_is_timed_once(step, batch):
    found = phases.milliseconds(step.model, lambda: step.run([batch], 0), "cpu")
    assert set(found) - {"dispatch"} == {"trunk", "router", "experts", "optimiser"}
    assert min(found.values()) > 0
    assert not any(layer._forward_pre_hooks for layer in moe_layers(step.model).values())


def test_what_is_left_of_a_step_is_other():
    world = SimpleNamespace(
        gather=lambda found: [found, [{"trunk": 6.0, "exchange": 1.0}, {"trunk": 1.0}]]
    )
    profiled = [{"trunk": 5.0, "exchange": 9.0}, {"trunk": 12.0, "exchange": 9.0}]
    times = roofline._phase_times(profiled, Times([10.0, 10.0], "r"), world)
    assert times == {"trunk": [6.0, 12.0], "exchange": [9.0, 9.0], "other": [4.0, 0.0]}
    assert {found.run for found in times.values()} == {"r"}


def test_a_checkpoint_is_what_lies_on_the_disk(step, tmp_path):
    with phases.checkpoint(step, CheckpointConfig(), tmp_path / "checkpoints") as (task, costs):
        task.run()
    assert len(costs) == 2
    (latest,) = {p.resolve() for p in (tmp_path / "checkpoints").glob("latest")}
    assert task.work.disk == sum(p.stat().st_size for p in latest.rglob("*.safetensors"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the last checkpoint was not saved"):
        phases.checkpoint(step, CheckpointConfig(), tmp_path / "file" / "checkpoints").__enter__()


def exchange_on_two_ranks(rank: int) -> None:
    step, batch = make_step(rank, 2), make_batch(2)

    def run() -> None:
        step.run([batch], 0)

    run()
    sent = phases.count(step.model, run)["exchange"].exchange
    own = sum(p.numel() for p in expert_parameters(step.model).values())
    # all-reduced by two: n (2 - 1)
    shared = FLOAT * (sum(p.numel() for p in step.model.parameters()) - own)
    layers = list(moe_layers(step.model).values())
    even = [
        LayerShape.of(layer.config, tokens // 2, FLOAT)
        for layer, (tokens, *_) in zip(layers, shapes(step), strict=True)
    ]
    even = sum(
        2 * 2 * FLOAT * volume(shape, 2, ParallelStrategy()).dispatch.elements for shape in even
    )
    everyone = step.world.gather(sent - shared)
    assert 0.3 * even < statistics.mean(everyone) < 1.7 * even  # fresh routers are not quite even
    assert phases.milliseconds(step.model, run, "cpu")["exchange"] > 0
    replicas = make_step(rank, 2, "MODEL.MOE.EXPERT_PARALLEL_SIZE 1")
    replicas.run([batch], 0)
    found = phases.count(replicas.model, lambda: replicas.run([batch], 0))
    # no rows, all gradients, a few flags
    gradients = FLOAT * sum(p.numel() for p in replicas.model.parameters())
    assert found["exchange"].exchange == pytest.approx(gradients, rel=1e-3)
    dist.barrier()


def test_exchange_of_two_ranks(run_processes):
    run_processes(exchange_on_two_ranks, 2)


# The roof


def peaks(run: str = "r") -> dict[str, Peak]:
    """1e9 FLOPs in 1 ms; 1e6 bytes in 1 ms, in every second round in 2 ms."""
    return {
        "flops": Peak("product", 1e9, Times([1, 1, 1], run)),
        "memory": Peak("copy", 1e6, Times([1, 2, 1], run)),
    }


def saving() -> Phase:
    disk = Peak("writing", 1e6, Times([100], "s"))
    return Phase(Work(disk=1e6), Times([500], "s"), {"disk": disk})


def test_a_phase_is_bounded_by_what_takes_longest():
    assert peaks()["flops"].rate == 1e12
    compute = Phase(Work(flops=5e9, memory=1e6), Times([10, 10, 10], "r"), peaks())
    assert compute.shares() == {"flops": 0.5, "memory": 0.1}
    assert compute.bound() == ("flops", 0.5)
    memory = Phase(Work(flops=1e9, memory=3e6), Times([10, 20, 10], "r"), peaks())
    assert memory.bound() == ("memory", pytest.approx(0.3))
    assert memory.rate("memory") == 3e8
    other = Phase(Work(), Times([0, 0, 0], "r"), peaks())
    assert (other.bound(), other.rate("flops")) == (("", 0.0), 0.0)


def test_a_peak_of_another_run_is_no_roof():
    with pytest.raises(ValueError, match="different runs"):
        Phase(Work(flops=1.0), Times([1, 1, 1], "r"), peaks("s")).bound()


def test_what_the_phases_leave_of_a_step(tmp_path):
    work = Work(flops=1e9, memory=1e6)
    found = {
        "data": Phase(Work(memory=1e6), Times([50, 50, 50], "r"), peaks()),
        "trunk": Phase(work, Times([60, 60, 50], "r"), peaks()),
        "optimiser": Phase(work, Times([30, 20, 30], "r"), peaks()),
        "checkpoint": saving(),
    }
    whole = Roofline("a title", "a machine", found, peaks(), Times([100, 100, 80], "r"), 0.1, 2)
    assert whole.share_of_step("trunk") == 0.6
    assert whole.share_of_step("checkpoint") is None
    assert whole.record()["phases"]["checkpoint"]["share_of_roof"] == pytest.approx(0.2)
    draw(whole, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_a_figure_shows_the_shares(monkeypatch):
    work, figures = Work(flops=1e9, memory=1e6), []
    found = {"trunk": Phase(work, Times([4, 4, 4], "r"), peaks()), "checkpoint": saving()}
    title, step = "16 images of /data/$x_$", Times([8, 8, 8], "r")
    whole = Roofline(title, "a machine", found, peaks(), step, 0.1, 2)
    monkeypatch.setattr(roofline, "save_png", lambda figure, path: figures.append(figure))
    draw(whole, Path("r.png"))
    roof, bars = figures[0].axes
    # from below: step, then roof
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([0, 50, 20, 25])
    assert [text.get_text() for text in bars.texts] == ["", "50.0%", "20.0%", "25.0%"]
    labels = [label.get_text() for label in bars.get_yticklabels()]
    assert labels == ["checkpoint\n(disk)", "trunk\n(flops)"]
    (point,) = [line for line in roof.lines if line.get_marker() == "o"]
    assert point.get_xydata().tolist() == [[1000, 250]]  # FLOP a byte, GFLOP/s


# What is measured


def test_a_step_is_one_batch_whatever_the_training_does(tmp_path):
    keys = "TRAIN: {ACCUMULATION_STEPS: 4, EMA_DECAY: 0.9}\nAUG: {MIXUP: 0.5}\n"
    (tmp_path / "mine.yaml").write_text(f"BASE: [{QUICKSTART}]\n{keys}")
    config = repeatable_step(tmp_path / "mine.yaml", ["AUG.CUTMIX", "0"], None, None)
    assert (config.TRAIN.ACCUMULATION_STEPS, config.TRAIN.EMA_DECAY, config.AUG.MIXUP) == (1, 0, 0)


@pytest.mark.parametrize(
    "name", ["tiny_imagenet/finetune_96", "upcycle/swinv2_moe_tiny_window8_256_8expert"]
)
def test_a_step_from_other_weights_needs_none(name, tmp_path):
    model = repeatable_step(f"{QUICKSTART.parent / name}.yaml", [], str(tmp_path), 4).MODEL
    assert (model.CLASS_MAP, model.UPCYCLE) == ("", "")


def test_opts_that_would_be_ignored():
    for opts, message in (
        ("TRAIN.ACCUMULATION_STEPS 4", "ACCUMULATION_STEPS is 4, but what is measured has 1"),
        ("TRAIN.EMA_DECAY 0.9", "EMA_DECAY is 0.9, but what is measured has 0.0"),
        ("PRINT_FREQ 5 AUG.MIXUP 0.5", "MIXUP is 0.5, but what is measured has 0.0"),
        ("DATA.BATCH_SIZE 8", "BATCH_SIZE is 8, but --batch-size decides"),
    ):
        section = opts.split()[-2].split(".")[0]
        with pytest.raises(UserError) as error:
            repeatable_step(QUICKSTART, opts.split(), None, 4)
        assert str(error.value) == f"--opts {section}.{message}"


def test_the_file_that_measures_the_disk(tmp_path):
    roofline.write_file(tmp_path / "file", 3 * 2**20)
    assert (tmp_path / "file").stat().st_size == 3 * 2**20
    roofline.read_file(tmp_path / "file")
    with pytest.raises(UserError, match=r"--output .*none: cannot be written"):
        roofline.write_file(tmp_path / "none" / "file", 2**20)
