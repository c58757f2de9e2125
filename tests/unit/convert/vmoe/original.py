"""The original program of V-MoE in JAX: writes a small checkpoint, its logits, and the shapes of
the parameters of the published configurations. The other files of this folder are its output.

    PYTHONPATH=JAX:VMOE:VISION_TRANSFORMER python tests/unit/convert/vmoe/original.py OUTPUT

The paths are a folder with jax, flax, einops and ml_collections, and checkouts of
google-research/vmoe and google-research/vision_transformer. TensorFlow is not needed: the program
uses of it only functions on files.
"""

import json
import os
import shutil
import sys
import types
from pathlib import Path

import jax
import jax._src.core
import numpy as np


def stand_ins() -> None:
    """Modules that the program imports, with the functions on files that it calls."""
    files = types.SimpleNamespace(
        GFile=open, exists=os.path.exists, makedirs=lambda path: os.makedirs(path, exist_ok=True)
    )
    files.rename = lambda old, new, overwrite: shutil.move(old, new)
    files.stat = lambda path: types.SimpleNamespace(length=os.stat(path).st_size)
    tensorflow = types.ModuleType("tensorflow")
    tensorflow.io = types.ModuleType("tensorflow.io")
    tensorflow.io.gfile = files
    sys.modules |= {"tensorflow": tensorflow, "tensorflow.io": tensorflow.io}
    jax.core.ShapedArray = jax._src.core.ShapedArray  # newer versions of jax have moved it


def model_of(config: dict):
    from vmoe.nn.vit_moe import VisionTransformerMoe

    config = {key: value for key, value in config.items() if key != "name"}
    return VisionTransformerMoe(deterministic=True, **config)


def small_config(capacity_factor: float) -> dict:
    dispatcher = {"name": "einsum", "bfloat16": False, "capacity_factor": capacity_factor}
    router = {"num_selected_experts": 2, "dispatcher": dispatcher | {"batch_priority": False}}
    moe = {"num_experts": 4, "layers": (1, 3), "group_size": 20, "router": router}
    encoder = {"num_layers": 4, "mlp_dim": 24, "num_heads": 2, "moe": moe}
    widths = {"hidden_size": 16, "representation_size": 16}
    return {"num_classes": 5, "patch_size": (4, 4), "encoder": encoder, **widths}


def published() -> dict[str, dict[str, list[int]]]:
    """The shape of each parameter, by configuration and name."""
    from vmoe.configs.vmoe_paper import (
        pretrain_imagenet21k as b16,
    )
    from vmoe.configs.vmoe_paper import (
        vmoe_b16_imagenet21k_randaug_strong_ft_ilsvrc2012 as b16_384,
    )
    from vmoe.configs.vmoe_paper import (
        vmoe_s32_last2_ilsvrc2012_randaug_light1 as s32,
    )
    from vmoe.configs.vmoe_paper import (
        vmoe_s32_last2_ilsvrc2012_randaug_light1_ft_ilsvrc2012 as s32_384,
    )

    found = {}
    for name, module, size in (
        ("S/32 224", s32, 224),
        ("S/32 384", s32_384, 384),
        ("B/16 224", b16, 224),
        ("B/16 384", b16_384, 384),
    ):
        model = model_of(module.get_config().model.to_dict())
        images = jax.ShapeDtypeStruct((8, size, size, 3), np.float32)
        shapes = jax.eval_shape(model.init, jax.random.PRNGKey(0), images)["params"]
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        found[name] = {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}
    return found


def main(output: Path) -> None:
    from vmoe.checkpoints import partitioned

    model = model_of(small_config(2.0))  # room for every token
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (4, 8, 8, 3)).astype(np.float32)
    shapes = jax.eval_shape(model.init, jax.random.PRNGKey(0), images)["params"]
    # Every value is drawn, also of biases and of the classifier, which begin as zeros.
    params = jax.tree.map(
        lambda leaf: jax.numpy.asarray(rng.normal(0, 0.3, leaf.shape).astype(np.float32)), shapes
    )
    logits, _ = model.apply({"params": params}, images)
    limited, _ = model_of(small_config(1.2)).apply({"params": params}, images)
    output.mkdir(parents=True, exist_ok=True)
    partitioned.save_checkpoint(
        str(output / "small"), {"params": params}, num_shards=3, max_chunk_bytes=2048
    ).get()
    np.savez(output / "small.npz", images=images, logits=logits, limited=limited)
    (output / "published.json").write_text(json.dumps(published(), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    stand_ins()
    main(Path(sys.argv[1]))
