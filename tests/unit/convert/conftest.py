"""A released form of four MoE layers at 16 px, and the command that converts, run in this
process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tool_cases import Finished, command
from torch import nn
from yacs.config import CfgNode

from swinv2_moe.checkpoints.checkpoint import load_weights, open_checkpoint, write_weights
from swinv2_moe.config import load_config, model_config
from swinv2_moe.models import build_model

ROOT = Path(__file__).parents[3]
CFG = str(ROOT / "configs" / "in22k" / "swin_moe_small_window12_192_8expert.yaml")
CLASSES = 5
SMALL = [
    *("MODEL.SWINV2.PATCH_SIZE", "2", "MODEL.SWINV2.EMBED_DIM", "8"),
    *("MODEL.SWINV2.DEPTHS", "[1,2,2]", "MODEL.SWINV2.NUM_HEADS", "[1,2,4]"),
    *("MODEL.SWINV2.WINDOW_SIZE", "4", "MODEL.SWINV2.PRETRAINED_WINDOW_SIZES", "[0,0,0]"),
    *("MODEL.MOE.BLOCKS", "[[],[1],[0,1]]", "MODEL.MOE.NUM_EXPERTS", "4"),
    *(
        "DATA.IMG_SIZE",
        "16",
        "MODEL.NUM_CLASSES",
        str(CLASSES),
        "MODEL.MOE.EVAL_CAPACITY_FACTOR",
        "0.0",
    ),
]


@pytest.fixture(scope="session")
def cfg() -> Callable[..., list[str]]:
    """`cfg("KEY", "VALUE", ...)`: the arguments that describe the small model."""
    return lambda *opts: ["--cfg", CFG, "--opts", *SMALL, *map(str, opts)]


@pytest.fixture(scope="session")
def make_config() -> Callable[..., CfgNode]:
    """`make_config("KEY", "VALUE", ...)`."""
    return lambda *opts: load_config(CFG, [*SMALL, *map(str, opts)])


@pytest.fixture(scope="session")
def load() -> Callable[[Path, CfgNode], nn.Module]:
    """`load(directory, config)`: a model with a checkpoint's weights, strictly, in evaluation
    mode."""

    def load_model(directory: Path, config: CfgNode) -> nn.Module:
        model = build_model(model_config(config), config.MODEL.NUM_CLASSES)
        load_weights(open_checkpoint(directory), model)
        return model.eval()

    return load_model


@pytest.fixture
def make_checkpoint(make_config, tmp_path) -> Callable[..., tuple[Path, nn.Module]]:
    """`make_checkpoint("KEY", "VALUE", ...)`: the directory `ours` and its model; every parameter
    random, of step 7."""

    def make(*opts: object) -> tuple[Path, nn.Module]:
        config = make_config(*opts)
        model = build_model(model_config(config), CLASSES)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        directory = tmp_path / "ours"
        write_weights(directory, model, model.state_dict(), config.dump(), list("abcde"), step=7)
        return directory, model

    return make


@pytest.fixture(scope="session")
def images() -> torch.Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def convert(monkeypatch, capsys) -> Callable[..., Finished]:
    """`convert(*arguments)`: tools/convert_checkpoint.py in this process."""
    return command("convert_checkpoint", monkeypatch, capsys)


@pytest.fixture
def imported(convert, cfg, tmp_path) -> Callable[..., Path]:
    """`imported(kind, source, "KEY", "VALUE", ...)`: the checkpoint that an import writes."""

    def run(kind: str, source: Path, *opts: object, name: str = "new") -> Path:
        finished = convert("import", kind, source, *cfg(*opts), "--output", tmp_path / name)
        assert (finished.status, finished.err) == (0, "")
        return tmp_path / name

    return run


@pytest.fixture
def exported(convert) -> Callable[..., Path]:
    """`exported(kind, checkpoint, output, "--option", ...)`: the path that was exported to."""

    def run(kind: str, checkpoint: Path, output: Path, *options: object) -> Path:
        finished = convert("export", kind, checkpoint, *options, "--output", output)
        assert (finished.status, finished.err) == (0, "")
        return output

    return run
