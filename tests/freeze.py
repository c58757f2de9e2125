"""Compare what this tree computes, says and reads with what an earlier commit does.

    python tests/freeze.py --against COMMIT [--only PROBE]

The guard of a change that must not be noticed. Each probe runs in a tree of the commit and in
this one, and differences are printed:

- losses: every step of short seeded runs (SwinV2 on 1 and 2 processes, ViT, balance by bias).
- sizes: names, shapes and number of parameters of every model that timm knows.
- configurations: every key of every YAML file.
- mistakes: the status and the last line of commands with a mistake in them.
- weights: predictions of a run that the earlier commit has trained, read by both.
- hub: outputs of a hub export of that run, made by the earlier commit and loaded by both.
- layer: outputs, losses and gradients of the layer, for each kind of routing and of experts, by
  the fastest kernels and, to four digits, by plain torch alone.

The status is 1 if something differs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = {
    "swinv2": (1, "quickstart_digits", ["TRAIN.EPOCHS", "2"]),
    "swinv2, 2 processes": (2, "quickstart_digits", ["TRAIN.EPOCHS", "2"]),
    "vit": (1, "vit_moe_digits", ["TRAIN.EPOCHS", "2"]),
    "bias, top 2, average": (
        1,
        "quickstart_digits",
        ["TRAIN.EPOCHS", "2", "MODEL.MOE.BALANCE", "bias", "MODEL.MOE.TOP_K", "2"]
        + ["TRAIN.EMA_DECAY", "0.9"],
    ),
}
LAYERS: dict[str, dict] = {
    "top 1": {},
    "top 2, capacity": {"top_k": 2, "capacity_factor": 0.75},
    "top 2, gates as they are": {"top_k": 2, "normalize_gates": False},
    "sigmoid, prioritized": {
        "top_k": 3,
        "gate_activation": "sigmoid",
        "batch_prioritized": True,
        "capacity_factor": 1.0,
    },
    "noise, bias, z-loss": {"gate_noise": 1.0, "balance": "bias", "z_loss_weight": 0.01},
    "cosine, Tutel's loss": {
        "router": "cosine",
        "gate_noise": 1.0,
        "aux_loss": "load_importance_tutel",
    },
    "gated, shared": {"gated": True, "activation": "silu", "num_shared_experts": 1, "bias": False},
    "expert choice": {"router": "expert_choice", "capacity_factor": 1.0},
    "soft": {"router": "soft", "slots_per_expert": 3},
}
STEP_VALUES = ("step", "loss", "aux_loss", "grad_norm", "lr")
MISTAKES = [
    ["train", "--cfg", "gone"],
    ["train", "--cfg", "quickstart_digits", "--opts", "MODEL.MOE.TOPK", "2"],
    ["train", "--cfg", "quickstart_digits", "--opts", "MODEL.MOE.TOP_K", "9"],
    ["train", "--cfg", "quickstart_digits", "--opts", "MODEL.MOE.ROUTER", "cosin"],
    ["train", "--cfg", "quickstart_digits", "--opts", "TRAIN.EPOCHS", "abc"],
    ["train", "--cfg", "quickstart_digits", "--opts", "DATA.IMG_SIZE", "15"],
    ["train", "--cfg", "quickstart_digits", "--opts", "MODEL.MOE.BLOCKS", "[[9]]"],
    ["train", "--cfg", "quickstart_digits", "--opts", "MODEL.MOE.NUM_EXPERTS", "-1"],
    ["train", "--cfg", "quickstart_digits", "--opts", "TRAIN.EPOCHS"],
    ["train", "--cfg", "tiny_imagenet/dense", "--data", "gone"],
    ["train", "--cfg", "tiny_imagenet/dense"],
    ["train", "--confg", "quickstart_digits"],
    ["evaluate", "gone"],
    ["evaluate"],
    ["predict", "gone", "a.jpg"],
    ["predict", "configs", "a.jpg"],
    ["export", "gone", "--output", "none"],
    ["few-shot", "gone"],
    ["show-routing", "gone"],
    ["throughput", "--cfg", "gone"],
    ["report", "gone"],
    ["convert-checkpoint", "inspect", "gone"],
    ["trian"],
]


def losses(output: Path) -> dict:
    values = {}
    for name, (processes, config, opts) in RUNS.items():
        words = ["--cfg", config, "--output", str(output / name), "--opts", *opts]
        words += ["TRAIN.WARMUP_EPOCHS", "1", "PRINT_FREQ", "1"]
        start = [sys.executable, "-m"]
        if processes > 1:
            start += ["torch.distributed.run", "--standalone"]
            start += ["--nproc-per-node", str(processes), "-m"]
        command = [*start, "swinv2_moe", "train", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (output / name / "metrics.jsonl").read_text().splitlines()
        for row in map(json.loads, lines):
            if "grad_norm" in row:
                values[f"{name}, step {row['step']}"] = [row[key] for key in STEP_VALUES]
            elif "val_loss" in row:
                values[f"{name}, epoch {row['epoch']}"] = row["val_loss"]
    return values


def sizes(output: Path) -> dict:
    import timm
    import torch

    import swinv2_moe.models  # noqa: F401 - timm knows the names once it is imported

    values = {}
    for name in timm.list_models("*swin*moe*"):
        with torch.device("meta"):
            state = timm.create_model(name).state_dict()
        shapes = repr([(key, tuple(value.shape), str(value.dtype)) for key, value in state.items()])
        count = sum(value.numel() for value in state.values())
        values[name] = [count, hashlib.sha256(shapes.encode()).hexdigest()]
    return values


def configurations(output: Path) -> dict:
    """What differs from the earlier commit's configurations."""
    from swinv2_moe.config import config_from_text, flatten, load_config
    from swinv2_moe.errors import UserError

    try:
        from swinv2_moe.config.load import config_names
    except ImportError:  # the earlier commit's
        from swinv2_moe.config_files import config_names

    file = output.parent / "earlier" / "configurations.json"
    earlier = json.loads(file.read_text()) if file.exists() else None
    values, texts = {}, {}
    for name, path in config_names().items():
        if path.suffix != ".yaml" or "ablations/" in name:  # of detectors; plans of several runs
            continue
        try:
            config = load_config(name, data="images")
        except UserError as error:  # of a key that the file leaves to the command line
            values[name] = str(error)
            continue
        texts[name], values[name] = config.dump(), ""
        if earlier and name in earlier:
            try:
                was = flatten(config_from_text(earlier[name], name))
            except UserError as error:  # of a key or a value that has left
                values[name] = str(error)
                continue
            changed = [
                f"{key} {was[key]} -> {v}" for key, v in flatten(config).items() if was[key] != v
            ]
            values[name] = "; ".join(changed)
    if earlier is None:
        file.write_text(json.dumps(texts))
    return values


def mistakes(output: Path) -> dict:
    values = {}
    for words in MISTAKES:
        command = [sys.executable, "-m", "swinv2_moe", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=os.environ["TREE"])
        values[" ".join(words)] = [done.returncode, done.stderr.strip().splitlines()[-1:]]
    return values


def weights(output: Path) -> dict:
    """Of the run "swinv2" of `losses`, which is the earlier commit's in both trees."""
    import numpy as np
    from PIL import Image

    import swinv2_moe

    pixels = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)
    predictor = swinv2_moe.load(str(output.parent / "earlier" / "swinv2"))
    values = {}
    for number, image in enumerate(pixels):
        found = predictor.predict(Image.fromarray(image))
        values[f"image {number}"] = [[one.class_name, one.probability] for one in found]
    return values


def hub(output: Path) -> dict:
    """Of the run "swinv2" of `losses`, in the earlier commit's export."""
    import timm
    import torch

    import swinv2_moe.models  # noqa: F401 - timm knows the names once it is imported
    from swinv2_moe.convert.hub import export_hub

    exported = output.parent / "earlier" / "hub"
    if not exported.exists():
        export_hub(output / "swinv2", exported)
    model = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()
    images = torch.randn(2, *model.pretrained_cfg["input_size"], generator=_generator())
    with torch.inference_mode():
        logits = model(images)
    return {f"image {number}": row.tolist() for number, row in enumerate(logits)}


def layer(output: Path) -> dict:
    values = {}
    for name, options in LAYERS.items():
        for kernels in ("auto", "torch"):
            values[f"{name}, {kernels}"] = _layer_values(options | {"kernels": kernels})
    return values


def _layer_values(options: dict) -> list[str]:
    import torch

    from moe_core import MoEConfig, MoELayer

    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(model_dim=16, hidden_dim=24, num_experts=8, **options))
    x = torch.randn(2, 37, 16, generator=_generator(), requires_grad=True)
    y, aux_loss = layer(x)
    ((y * torch.randn(y.shape)).sum() + aux_loss).backward()
    gradients = [x.grad] + [p.grad for _, p in sorted(layer.named_parameters())]
    with torch.no_grad():
        evaluated = layer.eval()(x)[0]
    digits = 9 if options["kernels"] == "auto" else 4
    shown = [aux_loss]
    for tensor in (y, evaluated, *gradients):
        shown += [tensor.abs().sum(), tensor.std()]
    return [f"{value.item():.{digits}g}" for value in shown]


def _generator():
    import torch

    return torch.Generator().manual_seed(0)


PROBES: dict[str, Callable[[Path], dict]] = {
    function.__name__: function
    for function in (losses, sizes, configurations, mistakes, weights, hub, layer)
}


def run_probe(name: str, tree: Path, output: Path) -> dict:
    variables = {"PYTHONPATH": str(tree), "TREE": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--probe", name, "--output", str(output)]
    done = subprocess.run(
        command, cwd=output, env=os.environ | variables, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{name} failed in {tree}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(commit: str, names: list[str]) -> int:
    """Print what differs; the number of differences."""
    different = 0
    with tempfile.TemporaryDirectory(prefix="freeze-") as place:
        git = ["git", "-C", str(ROOT), "worktree"]
        tree = Path(place) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        outputs = [Path(place) / side for side in ("earlier", "now")]
        for output in outputs:
            output.mkdir()
        try:
            for name in names:
                before, after = (
                    run_probe(name, *pair) for pair in zip((tree, ROOT), outputs, strict=True)
                )
                keys = list(before | after)
                changed = [key for key in keys if before.get(key) != after.get(key)]
                different += len(changed)
                print(f"{name}: {len(keys) - len(changed)} of {len(keys)} equal", flush=True)
                for key in changed:
                    print(f"    {key}\n      - {before.get(key)}\n      + {after.get(key)}")
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    return different


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--only", metavar="PROBE", choices=PROBES)
    parser.add_argument("--probe", choices=PROBES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        print(json.dumps(PROBES[args.probe](args.output)))
        return
    if not args.against:
        parser.error("--against COMMIT is missing")
    names = list(PROBES)
    if args.only in ("weights", "hub"):
        names = ["losses", args.only]
    elif args.only:
        names = [args.only]
    sys.exit(compare(args.against, names) > 0)


if __name__ == "__main__":
    main()
