"""A detector that is trained without a configuration: its settings, and the configuration of
mmengine's runner that follows from them. Does not import mmdetection.

The detector is GFL (arXiv 2006.04388), a single-stage one, with two convolutions of 96 channels in
each branch, on the maps of stride 8, 16 and 32.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmengine.config import Config
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from swinv2_moe.errors import UserError
from swinv2_moe.files import read_json, write_json
from swinv2_moe.forms import (
    COUNT,
    OBJECT,
    POSITIVE_COUNT,
    POSITIVE_NUMBER,
    TEXT,
    list_of,
    or_null,
    record,
)

FILE = "detector.json"  # of a run
_CHANNELS = 96  # of neck and head
_MAX_BYTES = 1 << 26
_FORM = record(
    {
        "data": TEXT,
        "class_names": list_of(TEXT),
        "size": list_of(POSITIVE_COUNT, 2),
        "backbone": OBJECT,
        "batch": POSITIVE_COUNT,
        "epochs": POSITIVE_COUNT,
        "lr": POSITIVE_NUMBER,
        "dtype": or_null(TEXT),
        "seed": COUNT,
    },
    {  # missing in runs that followed a plan of epochs; they predict, and cannot go on
        "zoom": list_of(POSITIVE_NUMBER, 2),
        "seconds": or_null(POSITIVE_NUMBER),
        "validations": POSITIVE_COUNT,
    },
)


@dataclass(frozen=True)
class Recipe:
    """What a detector is trained with; the content of `detector.json` of its run.

    Attributes:
        data: the folder of pictures, as an absolute path.
        size: width and height of what the detector sees, in pixels.
        backbone: arguments of SwinV2MoE.
        batch: pictures of a step, in each process.
        dtype: of autocast in training; None: fp32.
        zoom: smallest and largest factor of training pictures.
        seconds: the time of training and validations; None: no limit.
        validations: their number at most, beside the last one.
    """

    data: str
    class_names: list[str]
    size: list[int]
    backbone: dict[str, Any]
    batch: int
    epochs: int
    lr: float
    dtype: str | None = None
    seed: int = 0
    zoom: list[float] = field(default_factory=lambda: [0.6, 1.6])
    seconds: float | None = None
    validations: int = 10

    def write(self, run: Path) -> None:
        """Write `detector.json`. Raises UserError if it cannot be written."""
        write_json(run / FILE, asdict(self))


def read_recipe(run: Path) -> Recipe:
    """The recipe of a run.

    Raises:
        UserError: the run has none, or it cannot be read.
    """
    try:
        content = read_json(run / FILE, _MAX_BYTES)
        _FORM(content, "")
    except FileNotFoundError:
        raise UserError(
            f"RUN {run}: no run of `swinv2-moe detect train FOLDER` (it has no {FILE}); for a run"
            " of a configuration name CONFIG, too"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{run / FILE}: cannot be read ({error})") from error
    names = Recipe.__dataclass_fields__.keys() & content.keys()
    return Recipe(**{name: content[name] for name in names})


def mmengine_config(recipe: Recipe, run: Path) -> Config:
    """The configuration of mmengine's runner; the annotations are those in `data/` of the run."""
    pretrained = recipe.backbone.get("pretrained")
    files = {split: str(run.absolute() / "data" / f"{split}.json") for split in ("train", "val")}
    loaders = _loaders(recipe, files)
    metric = {"type": "FasterCocoMetric", "ann_file": files["val"], "metric": "bbox"}
    store = {"type": "ExpertStoreHook", "interval": None, "keep_last": 1}
    stop = {"type": "EarlyStoppingHook", "monitor": "coco/bbox_mAP", "rule": "greater"}
    cycle = {"type": "CycleHook", "seconds": recipe.seconds, "validations": recipe.validations}
    optimiser = {
        "type": "MoEOptimWrapper",
        "constructor": "LayerDecayConstructor",
        "optimizer": {"type": "AdamW", "lr": recipe.lr, "weight_decay": 0.05, "fused": True},
        "paramwise_cfg": {"layer_decay": 0.85 if pretrained else 1.0},
        "clip_grad": {"max_norm": 10.0},
        "dtype": recipe.dtype,
    }
    return Config(
        {
            "default_scope": "mmdet",
            "runner_type": "MoERunner",
            "work_dir": str(run),
            "model": model(recipe),
            "train_dataloader": loaders["train"],
            "val_dataloader": loaders["val"],
            "test_dataloader": loaders["val"],
            "val_evaluator": metric,
            "test_evaluator": metric,
            "train_cfg": {"type": "EpochBasedTrainLoop", "max_epochs": recipe.epochs},
            "val_cfg": {"type": "ValLoop"},
            "test_cfg": {"type": "TestLoop"},
            "optim_wrapper": optimiser,
            "default_hooks": {
                "logger": {"type": "LoggerHook", "interval": 20},
                "checkpoint": store | {"save_best": "coco/bbox_mAP"},
            },
            "custom_hooks": [cycle, stop | {"patience": 4, "min_delta": 0.001}],
            "randomness": {"seed": recipe.seed},
        }
    )


def _loaders(recipe: Recipe, files: dict[str, str]) -> dict[str, dict[str, Any]]:
    load = {"type": "LoadAnnotations", "with_bbox": True}
    canvas = {"type": "LoadOnCanvas", "size": tuple(recipe.size)}
    pack: dict[str, Any] = {"type": "PackDetInputs"}
    pack["meta_keys"] = ("img_id", "ori_shape", "img_shape", "scale_factor")
    colours = {"type": "YOLOXHSVRandomAug"}  # writes into the picture: before rows are reversed
    flip = {"type": "mmdet.RandomFlip", "prob": 0.5}
    pipelines = {
        "train": [load, canvas | {"zoom": tuple(recipe.zoom)}, colours, flip, pack],
        "val": [load, canvas, pack],
    }
    loaders = {}
    for split, pipeline in pipelines.items():
        dataset: dict[str, Any] = {"type": "CocoDataset", "ann_file": files[split]}
        dataset["pipeline"] = pipeline
        dataset |= {"data_root": recipe.data, "data_prefix": {"img": ""}}
        dataset |= {"metainfo": {"classes": tuple(recipe.class_names)}, "filter_cfg": None}
        dataset["test_mode"] = split == "val"
        sampler = {"type": "DefaultSampler", "shuffle": split == "train"}
        # in this process, which keeps the pictures in memory
        loaders[split] = {"batch_size": recipe.batch, "num_workers": 0, "sampler": sampler}
        loaders[split] |= {"dataset": dataset, "persistent_workers": False}
    return loaders


def model(recipe: Recipe) -> dict[str, Any]:
    """The detector, as mmdetection configures it."""
    backbone = recipe.backbone
    stages = len(backbone["depths"])
    channels = [backbone["embed_dim"] * 2**stage for stage in range(stages)]
    strides = [backbone["patch_size"] * 2**stage for stage in range(stages)]
    first = 1  # the map of stride 4 is large, and its objects are found on that of stride 8
    strides = strides[first:]
    while len(strides) < 3:
        strides.append(2 * strides[-1])
    preprocessor: dict[str, Any] = {"type": "DetDataPreprocessor", "bgr_to_rgb": True}
    for name, values in (("mean", IMAGENET_DEFAULT_MEAN), ("std", IMAGENET_DEFAULT_STD)):
        preprocessor[name] = [255 * value for value in values]
    neck = {"type": "FPN", "in_channels": channels[first:], "out_channels": _CHANNELS}
    anchors = {"type": "AnchorGenerator", "ratios": [1.0], "octave_base_scale": 8}
    head = {
        "type": "GFLHead",
        "num_classes": len(recipe.class_names),
        "in_channels": _CHANNELS,
        "feat_channels": _CHANNELS,
        "stacked_convs": 2,
        "norm_cfg": {"type": "GN", "num_groups": 16},
        "anchor_generator": anchors | {"scales_per_octave": 1, "strides": strides},
        "loss_cls": {"type": "QualityFocalLoss", "use_sigmoid": True, "beta": 2.0},
        "loss_dfl": {"type": "DistributionFocalLoss", "loss_weight": 0.25},
        "loss_bbox": {"type": "GIoULoss", "loss_weight": 2.0},
        "reg_max": 16,
    }
    assigner = {"type": "ATSSAssigner", "topk": 9}
    nms = {"type": "nms", "iou_threshold": 0.6}
    test = {"nms_pre": 1000, "min_bbox_size": 0, "score_thr": 0.005, "nms": nms}
    return {
        "type": "MoEGFL",
        "data_preprocessor": preprocessor,
        "backbone": {"type": "SwinV2MoE", "out_indices": tuple(range(first, stages)), **backbone},
        "neck": neck | {"add_extra_convs": "on_output", "num_outs": len(strides)},
        "bbox_head": head,
        "train_cfg": {
            "assigner": assigner,
            "allowed_border": -1,
            "pos_weight": -1,
            "debug": False,
        },
        "test_cfg": test | {"max_per_img": 100},
    }
