"""`swinv2-moe compress`: which experts stay, how much the output changes, and the new run."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from tool_cases import assert_one_line, command

from moe_core import MoEConfig, MoELayer, moe_layers
from swinv2_moe.checkpoints.checkpoint import open_newest, write_weights
from swinv2_moe.checkpoints.deployed import open_deployed
from swinv2_moe.config import config_from_text, load_config, model_config
from swinv2_moe.convert.fewer_experts import Sample, fewer_experts
from swinv2_moe.measure.report import render
from swinv2_moe.measure.report_validation import ReportValidation
from swinv2_moe.measure.run_record import read_run
from swinv2_moe.models import build_model

DIM, HIDDEN = 12, 20
CONFIGS = {
    "linear": {"normalize_gates": False},
    "cosine": {"router": "cosine", "top_k": 2},
    "sigmoid": {"gate_activation": "sigmoid", "top_k": 2, "normalize_gates": False},
    "bias": {"balance": "bias", "num_shared_experts": 1},
    "gated": {"gated": True, "top_k": 2, "output_bias": False},
}
FINE = ["MODEL.MOE.HIDDEN_RATIO", "0.25", "MODEL.MOE.TOP_K", "4", "MODEL.MOE.NUM_EXPERTS", "12"]
SMALL = ["MODEL.SWINV2.EMBED_DIM", "16", "MODEL.SWINV2.DEPTHS", "[1,1,1]", "DEVICE", "cpu"]
SMALL += ["MODEL.MOE.BLOCKS", "[[],[0],[0]]", "MODEL.MOE.NUM_EXPERTS", "4"]


def random_layer(**config) -> MoELayer:
    """In fp64: a change is 1 less a quotient of sums, which fp32 rounds to some 1e-7."""
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(DIM, HIDDEN, 6, **config)).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
        if layer.balance is not None:
            layer.balance.bias.copy_(torch.randn(6) * 0.2)
    return layer


def smaller(layer: MoELayer, num_experts: int, tensors: dict) -> MoELayer:
    config = vars(layer.config) | {"num_experts": num_experts}
    result = MoELayer(MoEConfig(**config)).double().eval()
    result.load_state_dict(tensors)
    return result


def tokens(seed: int, count: int = 600) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, DIM, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_sample_computes_what_the_layer_computes(name):
    layer, x = random_layer(**CONFIGS[name]), tokens(1)
    with torch.no_grad():
        expected = layer(x)[0]
        if layer.shared is not None:
            expected = expected - layer.shared(x)
        torch.testing.assert_close(Sample(layer, x).target, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_change_is_that_of_the_new_layer(name):
    """Half of the experts, on tokens that the command has not seen."""
    layer, x = random_layer(**CONFIGS[name]), tokens(2)
    result = fewer_experts(layer, tokens(1, 1200), 3)
    with torch.no_grad():
        old, new = layer(x)[0], smaller(layer, 3, result.tensors)(x)[0]
        if layer.shared is not None:
            old, new = old - layer.shared(x), new - layer.shared(x)
    change = float((old - new).square().sum() / old.square().sum())
    assert 0.05 < result.change < 0.9
    assert change == pytest.approx(result.change, rel=0.25)


def test_an_expert_without_tokens_and_a_copy_are_removed_first():
    layer, x = random_layer(gate_activation="sigmoid", normalize_gates=False), tokens(1)
    with torch.no_grad():
        router, experts = layer.router.weight, layer.experts
        x[:, 0] = 3.0
        router[4], router[2] = 0.0, router[1]  # 4: its logit is the lowest of most tokens
        router[4, 0] = -9.0
        order = torch.randperm(HIDDEN)
        for name, p in experts.named_parameters():
            p[2] = p[1] if name == "b2" else p[1][order]
    result = fewer_experts(layer, x, 4)
    assert result.change < 1e-9
    assert 4 not in result.kept
    assert {1, 2} - set(result.kept)
    with torch.no_grad():
        found = smaller(layer, 4, result.tensors)(x)[0]
        torch.testing.assert_close(found, layer(x)[0], rtol=1e-3, atol=1e-3)


# --- the command


@pytest.fixture
def compress(monkeypatch, capsys):
    return command("compress", monkeypatch, capsys)


@pytest.fixture
def make_run(tmp_path):
    """`make_run("KEY", "VALUE", ...)`: a run of the digits with random weights, of step 7."""

    def make(*opts: str):
        run = tmp_path / "run"
        config = load_config("quickstart_digits", [*SMALL, *opts], output=str(run))
        torch.manual_seed(0)
        model = build_model(model_config(config), 10)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        names = [str(digit) for digit in range(10)]
        tensors = model.state_dict()
        checkpoint = run / "checkpoints" / "step-00000007"
        write_weights(checkpoint, model, tensors, config.dump(), names, 7)
        return run

    return make


@pytest.mark.parametrize(
    ("opts", "num_experts"),
    [([], 2), (FINE, 6), (["MODEL.TYPE", "swin_moe"], 2)],
    ids=["", "fine", "pre"],
)
def test_a_new_run_is_one_that_every_command_reads(compress, make_run, tmp_path, opts, num_experts):
    run, output = make_run(*opts), tmp_path / "new"
    finished = compress(run, f"--experts {num_experts} --images 48 --output", output)
    assert (finished.status, finished.err) == (0, ""), finished
    assert "next: " in finished.out
    source = open_newest(output)
    text = (output / "config.yaml").read_text()
    assert num_experts == config_from_text(text, "new").MODEL.MOE.NUM_EXPERTS
    assert source.meta["config"] == text
    assert (source.meta["step"], source.meta["class_names"][3]) == (7, "3")
    with open_deployed(str(output)) as deployed:
        model = deployed.model(10)
        assert {layer.config.num_experts for layer in moe_layers(model).values()} == {num_experts}
    (line,) = (output / "metrics.jsonl").read_text().splitlines()
    assert f"-> {json.loads(line)['loss']:.3f}" in finished.out
    record = read_run(output)
    assert record.steps[0]["step"] == 7
    page = render([record], [ReportValidation()])
    assert f", {num_experts} experts in 2 layers" in page
    assert "; compressed from another run, not trained" in page
    assert "images/s, median" not in page


def test_the_printed_command_distils_the_original(
    compress, make_run, tmp_path, monkeypatch, capsys
):
    size_of_its_own_teacher = ("TRAIN.DISTILL.IMG_SIZE", "40")
    run = make_run("AUG.MIXUP", "0.8", *size_of_its_own_teacher)
    output = tmp_path / "new"
    words = shlex.split(compress(run, "--experts 2 --output", output).out.splitlines()[-1])
    arguments = words[words.index("--cfg") :]
    assert words[words.index("--cfg") - 1].removesuffix(".py").endswith("train")
    train = command("train", monkeypatch, capsys)
    quick = ["TRAIN.MAX_STEPS", "2", "TRAIN.DISTILL.CACHE", tmp_path / "cache"]
    finished = train(*map(Path, arguments), *quick)
    assert finished.status == 0, finished
    distilled = read_run(tmp_path / "new_distilled")
    assert distilled.steps[-1]["teacher_loss"] > 0
    assert str(run) == distilled.config.TRAIN.DISTILL.TEACHER
    assert str(output) == distilled.config.MODEL.PRETRAINED
    assert distilled.config.TRAIN.BASE_LR == 1.6e-2
    assert (distilled.config.TRAIN.EPOCHS, distilled.config.TRAIN.WARMUP_EPOCHS) == (10, 1)


def test_bad_input_is_one_line(compress, make_run, tmp_path, monkeypatch):
    run, output = make_run("MODEL.MOE.TOP_K", "2"), tmp_path / "new"

    def refused(says: str, *words: object, source=run) -> None:
        assert_one_line(compress(source, "--images 8 --output", output, *words), says)
        assert not output.exists()

    refused("--experts 4: must be below the run's number of experts (4)", "--experts 4")
    refused("--experts 1: must be at least MODEL.MOE.TOP_K (2)", "--experts 1")
    refused("--experts is 0, it must be at least 1", "--experts 0")
    refused("--epochs has left: run the command that is printed", "--experts 2 --epochs 1")
    refused("--images is 0", "--experts 2 --images 0")
    refused("RUN nowhere: no such directory", "--experts 2", source="nowhere")
    output.mkdir()
    assert_one_line(compress(run, "--experts 2 --output", output), "already exists")
    output.rmdir()
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("WORLD_SIZE is 2", "--experts 2")


@pytest.mark.parametrize(
    ("opts", "says"),
    [
        (["MODEL.MOE.NUM_EXPERTS", "0"], "a dense model, it has no experts"),
        (["MODEL.MOE.ROUTER", "soft"], "MODEL.MOE.ROUTER is 'soft'"),
    ],
)
def test_a_run_that_cannot_be_compressed_is_one_line(compress, make_run, tmp_path, opts, says):
    output = tmp_path / "new"
    assert_one_line(compress(make_run(*opts), "--experts 2 --output", output), says)
    assert not output.exists()
