"""A run with fewer experts from a run with experts and a sample of its images."""

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from yacs.config import CfgNode

from moe_core import MoEConfig, moe_layers
from moe_core.files import publish_directory
from swinv2_moe.checkpoints.checkpoint import write_weights
from swinv2_moe.checkpoints.deployed import Deployed, check_alone, open_deployed
from swinv2_moe.config import as_opts, config_from_text, model_config
from swinv2_moe.convert.fewer_experts import ROUTERS, Compressed, fewer_experts
from swinv2_moe.convert.files import check_new
from swinv2_moe.data.build import evaluation_loader
from swinv2_moe.data.datasets import IGNORE
from swinv2_moe.data.sources import Subset, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.files import new_directory, writing
from swinv2_moe.models import MoEModel, build_model, load_strict
from swinv2_moe.ranks.world import World
from swinv2_moe.tables import Bar, Console
from swinv2_moe.train.evaluation import Accuracy, evaluate
from swinv2_moe.train.routing import evenly_spaced, sample_tokens

TOKENS = 4096  # of each layer
_EPOCHS = 10  # of the distillation
# Keys about the start of the original training and its ranks, with the values of a new run.
_OF_THE_TRAINING = {
    "MODEL.PRETRAINED": "",
    "MODEL.UPCYCLE": "",
    "MODEL.CLASS_MAP": "",
    "MODEL.MOE.FREEZE": False,
    "MODEL.MOE.EXPERT_PARALLEL_SIZE": 0,
    "MODEL.MOE.STRATEGY": "r1 d1 linear",
}


@dataclass(frozen=True)
class Result:
    """What `compress` has written."""

    layers: dict[str, Compressed]
    before: Accuracy  # on the sample of training images
    after: Accuracy
    images: int


def compress(
    resume: str,
    output: Path,
    num_experts: int,
    data: str | None = None,
    dataset: str | None = None,
    opts: Sequence[str] = (),
    images: int = 512,
) -> Result:
    """Write the new run `output` from a run or checkpoint with experts. The method is that of
    `swinv2_moe.convert.fewer_experts`.

    The run has config.yaml, one checkpoint of weights, and one line of metrics.jsonl: its loss on
    the sample.

    Args:
        num_experts: experts of each layer.
        data, dataset, opts: as in `open_deployed`.
        images: training images of the sample, evenly spaced.

    Raises:
        UserError: input that cannot be used; nothing is written.
    """
    check_alone()
    if images < 1:
        raise UserError(f"--images is {images}, it must be at least 1")
    check_new(output)
    with open_deployed(resume, data, dataset, opts) as deployed:
        layer = deployed.model_config.experts.layer
        if layer is None:
            raise UserError(
                f"checkpoint {deployed.source.directory}: a dense model, it has no experts"
            )
        _check(layer, num_experts)
        config = _config_of(deployed, num_experts, output)
        sample = _Images(deployed, images)
        num_classes = len(deployed.class_names())
        model = deployed.model(num_classes).cpu()
        smaller = build_model(model_config(config), num_classes).eval()
        layers = _compress_layers(model, smaller, sample)
        load_strict(smaller, _tensors(model, layers), f"checkpoint {deployed.source.directory}")
        before, after = sample.measure(model), sample.measure(smaller)
        _write(output, config, deployed, smaller, after)
    return Result(layers, before, after, len(sample))


def distillation_keys(run: Path, teacher: str) -> dict[str, object]:
    """The keys with which a compressed run learns from its original: as in its training, with an
    epoch of warm-up and without mixed pictures. (A tenth of the rate was worse: docs/log.md.)

    Args:
        run: the directory of the compressed run.
        teacher: the original run or checkpoint.
    """
    return {
        "MODEL.PRETRAINED": run,
        "TRAIN.DISTILL.TEACHER": teacher,
        "TRAIN.DISTILL.IMG_SIZE": 0,  # not that of the original's own teacher
        "TRAIN.EPOCHS": _EPOCHS,
        "TRAIN.MAX_STEPS": 0,
        "TRAIN.WARMUP_EPOCHS": 1,
        "AUG.MIXUP": 0,
        "AUG.CUTMIX": 0,
    }


def _check(layer: MoEConfig, num_experts: int) -> None:
    """Raise UserError for layers that cannot get `num_experts` experts."""
    if layer.router not in ROUTERS:
        raise UserError(
            f"MODEL.MOE.ROUTER is {layer.router!r}: only experts of the routers"
            f" {' and '.join(ROUTERS)} can be removed and merged"
        )
    if num_experts >= layer.num_experts:
        raise UserError(
            f"--experts {num_experts}: must be below the run's number of experts"
            f" ({layer.num_experts})"
        )
    if num_experts < layer.top_k:
        raise UserError(
            f"--experts {num_experts}: must be at least MODEL.MOE.TOP_K ({layer.top_k}), the"
            " experts of a token"
        )


def _config_of(deployed: Deployed, num_experts: int, output: Path) -> CfgNode:
    """The configuration of the new run."""
    keys = _OF_THE_TRAINING | {
        "MODEL.MOE.NUM_EXPERTS": num_experts,
        "DATA.DATASET": deployed.data.dataset,
        "DATA.PATH": deployed.data.path,
        "OUTPUT": str(output),
    }
    source = deployed.source
    return config_from_text(source.meta["config"], f"checkpoint {source.directory}", as_opts(keys))


class _Images:
    """Training images of a run, evenly spaced, with the transform of evaluation."""

    def __init__(self, deployed: Deployed, count: int) -> None:
        sources, _ = deployed.aligned(load_sources(deployed.data))
        self.deployed = deployed
        self.source = Subset(sources.train, evenly_spaced(len(sources.train), count))

    def __len__(self) -> int:
        return len(self.source)

    def batches(self) -> Iterator[Tensor]:
        """The images of each batch, without padding and unreadable images."""
        for batch in evaluation_loader(self.deployed.data, self.source):
            yield batch.images[batch.targets != IGNORE]

    def measure(self, model: MoEModel) -> Accuracy:
        loader = evaluation_loader(self.deployed.data, self.source)
        return evaluate(model, loader, World(0, 1, torch.device("cpu")), nullcontext)


def _compress_layers(model: MoEModel, smaller: MoEModel, sample: _Images) -> dict[str, Compressed]:
    """The compressed layers by name, with as many experts as those of `smaller`. All see the tokens
    of the original model."""
    layers, fewer = moe_layers(model), moe_layers(smaller)
    per_image = -(-TOKENS // len(sample))
    tokens = sample_tokens(model, layers, sample.batches(), per_image)
    compressed = {}
    with Bar(Console(), "layers", len(layers)) as bar:
        for name, layer in layers.items():
            num_experts = fewer[name].config.num_experts
            compressed[name] = fewer_experts(layer, tokens[name], num_experts)
            bar.advance("")
    return compressed


def _tensors(model: MoEModel, layers: dict[str, Compressed]) -> dict[str, Tensor]:
    """The tensors of the model with compressed layers."""
    tensors = model.state_dict()
    for name, layer in layers.items():
        tensors |= {f"{name}.{key}": tensor for key, tensor in layer.tensors.items()}
    return tensors


def _write(
    output: Path, config: CfgNode, deployed: Deployed, model: MoEModel, after: Accuracy
) -> None:
    """Write the run: all of it or nothing."""
    meta = deployed.source.meta
    step, epoch = meta["step"], (meta["training"] or {}).get("epoch", 0)
    # No step was trained: the line says what `report` needs of a run.
    line = {"step": step, "epoch": epoch, "loss": after.loss, "images_per_second": 0.0}
    line["compressed"] = True
    with new_directory(output) as directory, writing(output):
        (directory / "config.yaml").write_text(config.dump())
        (directory / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        checkpoint = directory / "checkpoints" / f"step-{step:08d}"
        write_weights(
            checkpoint, model, model.state_dict(), config.dump(), meta["class_names"], step
        )
        publish_directory(directory, output)
