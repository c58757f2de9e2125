"""A detector that takes seconds, on a few generated images, for the tests of detection."""

import copy
import functools
import itertools
from pathlib import Path

import yapf.yapflib.yapf_api
from mmengine.config import Config

# mmengine formats the configuration again and again, which takes longer than the training here.
yapf.yapflib.yapf_api.FormatCode = lambda text, **_: (text, True)

ROOT = Path(__file__).parents[1]
TINY_BACKBONE = {
    "embed_dim": 8,
    "depths": (1, 1, 2, 1),
    "num_heads": (1, 1, 2, 2),
    "window_size": 4,
    "num_experts": 2,
    "moe_blocks": ((), (), (1,), (0,)),
}
_names = itertools.count()


def make_data(directory: Path, train: int = 8, val: int = 2) -> Path:
    """Images of 64 to 96 pixels with up to two objects each."""
    from shapes_cases import Options, make_shapes

    make_shapes(directory, Options(train, val, min_size=64, max_size=96, max_objects=2))
    return directory


@functools.cache
def _config(detector: str) -> Config:
    return Config.fromfile(ROOT / f"configs/detection/shapes/{detector}.py")


def tiny_config(
    data: Path, work_dir: Path, detector: str = "mask_rcnn", backbone: dict | None = None, **keys
) -> Config:
    """configs/detection/shapes/<detector>.py on `data`, with a tiny backbone; `backbone` and `keys`
    (with __ for dots) over it."""
    config = copy.deepcopy(_config(detector))
    # an epoch is one pass
    config.train_dataloader.dataset = config.train_dataloader.dataset.dataset
    for part, split in (
        ("train_dataloader", "train"),
        ("val_dataloader", "val"),
        ("test_dataloader", "val"),
    ):
        config[part].dataset.data_root = f"{data}/"
        config[part].batch_size = 2
        if part != "train_dataloader":
            evaluator = config[part.replace("dataloader", "evaluator")]
            evaluator.ann_file = f"{data}/annotations/instances_{split}.json"
    config.model.backbone.update(TINY_BACKBONE | (backbone or {}))
    config.model.neck.in_channels = [config.model.backbone.embed_dim * 2**i for i in range(4)]
    config.model.train_cfg.rpn_proposal.update(nms_pre=50, max_per_img=50)
    stages = config.model.train_cfg.rcnn
    for sampled in (
        config.model.train_cfg.rpn,
        *(stages if isinstance(stages, list) else [stages]),
    ):
        sampled.sampler.num = 32
    config.model.test_cfg.rpn.update(nms_pre=50, max_per_img=20)
    config.merge_from_dict(
        {"train_cfg.max_epochs": 1, "train_cfg.val_interval": 1, "randomness.seed": 0}
    )
    config.merge_from_dict({key.replace("__", "."): value for key, value in keys.items()})
    config.work_dir, config.experiment_name = str(work_dir), f"test{next(_names)}"
    config.log_level = "WARNING"
    return config
