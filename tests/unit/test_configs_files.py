"""Every file in configs/ is a valid experiment, and the published ones have the published sizes."""

import functools
import math
import re
from pathlib import Path

import pytest
import yaml
from tool_cases import script

from swinv2_moe.config import as_opts, data_config, load_config, model_config
from swinv2_moe.models import measure_model

CONFIGS = Path(__file__).parents[2] / "configs"
PLANS = sorted(CONFIGS.glob("ablations/*.yaml"))  # of examples/sweep.py, not configurations
EXPERIMENTS = sorted(
    file for file in CONFIGS.rglob("*.yaml") if file.name != "recipe.yaml" and file not in PLANS
)

# millions of parameters: arXiv 2206.03382, table 8 (base with 8 and 16 experts is not in it)
PUBLISHED_PARAMETERS = {
    "small_dense": 65.8,
    "small_8expert": 173.3,
    "small_16expert": 296.1,
    "small_32expert": 541.8,
    "small_64expert": 1033.2,
    "base_dense": 109.3,
    "base_32expert": 955.3,
}
PUBLISHED_MACS = {"small": 6.76, "base": 11.78}  # billions, dense


def load(file: Path, *opts: str):
    needs_weights = file.parent.name == "upcycle" or file.stem.startswith("finetune")
    weights = ["MODEL.PRETRAINED", "weights"] if needs_weights else []
    return load_config(file, [*weights, *opts], data="anywhere")


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_every_file_loads_and_says_how_to_run_it(file):
    load(file)
    head = file.read_text().split("\nBASE")[0].split("\nDATA")[0]
    assert f"--cfg {file.relative_to(CONFIGS).with_suffix('')} " in head


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_every_variant_of_a_plan_loads(file, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    stages = yaml.safe_load(file.read_text()).get("stages", {})
    for stage in (None, *stages):
        control, seeds, variants = script("examples/sweep").read_plan(file, stage)
        assert (control in variants, seeds > 0) == (True, True)
        for base, opts in variants.values():
            load_config(base, as_opts(opts), data="anywhere")
    assert f"examples/sweep.py {file.relative_to(CONFIGS.parent)}" in file.read_text()


def test_the_eleven_published_experiments_are_there():
    names = {
        f.stem.removeprefix("swin_moe_").replace("window12_192_", "")
        for f in (CONFIGS / "in22k").glob("swin*")
    }
    kinds = ("dense", "8expert", "16expert", "32expert", "32expert_cosine")
    both = {f"{size}_{kind}" for size in ("small", "base") for kind in kinds}
    assert names == both | {"small_64expert", "small_32expert_fp16"}


@functools.cache
def measure(name: str, *opts: str):
    config = load(CONFIGS / "in22k" / f"swin_moe_{name}.yaml", *opts)
    return measure_model(model_config(config), config.MODEL.NUM_CLASSES)


def check_published_size(size, kind):
    name, dense = f"{size}_window12_192_{kind}", measure(f"{size}_window12_192_dense")
    found = measure(name)
    if f"{size}_{kind}" in PUBLISHED_PARAMETERS:
        assert round(found.parameters / 1e6, 1) == PUBLISHED_PARAMETERS[f"{size}_{kind}"]
    assert round(dense.macs / 1e9, 2) == PUBLISHED_MACS[size]
    # Top-1 experts cost what the dense FFN costs; the router comes on top.
    assert 0 <= found.macs / dense.macs - 1 < (0.05 if "cosine" in kind else 0.01)


@pytest.mark.parametrize("kind", ["small_dense", "small_8expert", "small_32expert_cosine"])
def test_published_sizes(kind):
    check_published_size(*kind.split("_", 1))


def test_published_sizes_of_the_base_model():
    check_published_size("base", "dense")
    check_published_size("base", "32expert")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["16expert", "32expert", "64expert"])
def test_published_sizes_of_more_experts(kind):
    check_published_size("small", kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["8expert", "16expert", "32expert_cosine"])
def test_sizes_of_base_models_that_are_not_published(kind):
    check_published_size("base", kind)


def test_the_fp16_variant_differs_in_its_dtype_alone():
    name = "swin_moe_small_window12_192_32expert"
    configs = [load(CONFIGS / "in22k" / f"{stem}.yaml") for stem in (name, f"{name}_fp16")]
    dtypes = [config.AMP_DTYPE for config in configs]
    assert dtypes == ["bfloat16", "float16"]
    configs[1].defrost()
    configs[1].AMP_DTYPE = "bfloat16"
    assert configs[0].dump() == configs[1].dump()


@pytest.mark.parametrize(
    "file", sorted((CONFIGS / "in22k").glob("swin*.yaml")), ids=lambda file: file.stem
)
def test_published_recipe(file):
    """arXiv 2206.03382, section 5, and its public configurations, whatever the defaults come to
    be."""
    config, stem = load(file), file.stem
    moe, train, aug = config.MODEL.MOE, config.TRAIN, config.AUG
    experts = 0 if "dense" in stem else int(stem.split("expert")[0].split("_")[-1])
    assert data_config(config).shuffle_val == bool(experts)
    drop_path = 0.2 if "small" in stem or "dense" in stem else 0.3
    found = (moe.NUM_EXPERTS, config.MODEL.DROP_PATH_RATE, moe.ROUTER)
    assert found == (experts, drop_path, "cosine" if "cosine" in stem else "linear")
    assert (moe.TOP_K, moe.CAPACITY_FACTOR, moe.GATE_NOISE) == (1, 1.25, 1.0)
    assert (moe.BATCH_PRIORITIZED, moe.NORMALIZE_GATES) == (True, False)
    assert (moe.AUX_LOSS_WEIGHT, moe.HIDDEN_DROPOUT, moe.INIT_STD) == (0.01, 0.1, 0.005)
    assert (train.EPOCHS, train.WARMUP_EPOCHS) == (90, 10)
    assert (train.WEIGHT_DECAY, train.CLIP_GRAD) == (0.1, 3.0)
    assert (train.BASE_LR, train.WARMUP_LR, train.MIN_LR) == (1.25e-4, 1.25e-7, 1.25e-6)
    assert (aug.AUTO_AUGMENT, aug.COLOR_JITTER, aug.REPROB) == ("rand-m9-mstd0.5-inc1", 0.4, 0.25)
    assert (aug.MIXUP, aug.CUTMIX, config.MODEL.LABEL_SMOOTHING) == (0.8, 1.0, 0.1)
    counts = re.findall(r"--(?:nnodes|nproc_per_node) (\d+)", file.read_text())
    gpus = math.prod(map(int, counts))
    assert gpus * config.DATA.BATCH_SIZE * train.ACCUMULATION_STEPS == 4096
