"""Convert files of weights to checkpoints of this project and back.

Everything is checked before a file is written.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath

import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from moe_core import moe_layers
from swinv2_moe.checkpoints.checkpoint import (
    SINGLE_FORMAT,
    check_network,
    count_classes,
    open_file,
    open_newest,
    read_weights_of,
    trained_windows,
    write_weights,
)
from swinv2_moe.config import (
    as_opts,
    config_from_text,
    data_config,
    flatten,
    merge_opts,
    model_config,
)
from swinv2_moe.convert import layouts
from swinv2_moe.convert.files import (
    check_new,
    compact,
    find_sources,
    rank_file,
    read_states,
    write_files,
)
from swinv2_moe.convert.hub import export_hub, timm_preprocessing
from swinv2_moe.convert.vmoe import from_vmoe, vmoe_config
from swinv2_moe.convert.vmoe_files import read_vmoe
from swinv2_moe.data.classes import imagenet_names
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel, build_model, load_dense, model_arguments
from swinv2_moe.models.build import classifier_weight
from swinv2_moe.models.positions import check_windows
from swinv2_moe.models.section import ModelConfig, trunk_group
from swinv2_moe.models.weight_files import as_int8, read_weights
from swinv2_moe.models.weights import check_finite, compare
from swinv2_moe.start import initial

# Keys whose values may be paths of the machine of the training.
_PATH_KEYS = (
    "OUTPUT",
    "DATA.PATH",
    "DATA.TRAIN_LIST",
    "DATA.VAL_LIST",
    "MODEL.PRETRAINED",
    "MODEL.CLASS_MAP",
    "TRAIN.DISTILL.TEACHER",
    "TRAIN.DISTILL.CACHE",
)
_HUBS = ("timm:", "hf-hub:", "bundled:")


def _last_part(key: str, value: str) -> str:
    """The last part of the path in a key of _PATH_KEYS. Names of models stay as they are; of
    `timm:NAME@FILE` NAME stays."""
    if key in ("MODEL.PRETRAINED", "TRAIN.DISTILL.TEACHER") and value.startswith(_HUBS):
        name, at, file = value.partition("@")
        if value.startswith("timm:"):
            file = PurePath(file).name
        return f"{name}{at}{file}"
    return PurePath(value).name


def _as_bfloat16(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


# How a single file stores weights. All are read as float32.
DTYPES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "float32": dict,
    "bfloat16": _as_bfloat16,
    "int8": as_int8,
}


def import_weights(
    kind: str,
    source: Path,
    output: Path,
    config: CfgNode | None = None,
    class_names: list[str] | None = None,
    opts: Sequence[str] = (),
) -> list[str]:
    """Write the checkpoint directory `output` from a file of weights, or from files of ranks.

    Args:
        kind: one of IMPORTS.
        source: for swin-moe and tutel, see `find_sources`; for vmoe, see `read_vmoe`.
        config: configuration of the model; None: the configuration in the single file, or that of
            the tensors of vmoe.
        class_names: names in the order of the classifier's outputs; None: the names in the file, if
            any.
        opts: for vmoe, KEY VALUE pairs of the configuration.

    Returns:
        messages about what the dense weights were trained with (`take_over`).

    Raises:
        UserError: input that cannot be used or does not fit the model; nothing is written.
    """
    check_new(output)
    step = 0
    notes: list[str] = []
    if kind == "single":
        single = open_file(source)
        step, class_names = single.meta["step"], class_names or single.meta["class_names"]
        config = config or config_from_text(single.meta["config"], str(source))
        section = model_config(config)
        check_network(single, section, num_classes=0)
        tensors = read_weights(source)
        model = _meta_model(section, _num_classes(tensors, section, class_names, source))
        check_windows(model, trained_windows(single), str(source))
    elif kind == "vmoe":
        found = read_vmoe(source)
        config = vmoe_config(found, source, opts)
        section, tensors = model_config(config), from_vmoe(found, source)
        num_classes = _num_classes(tensors, section, class_names, source)
        class_names = class_names or imagenet_names(num_classes)
        model = _meta_model(section, num_classes)
    elif config is None:
        raise UserError(f"import {kind}: needs --cfg")
    elif kind == "dense":
        stages = len(trunk_group(config).get("DEPTHS", [0]) or [])
        trained = initial.settings_of_weights(str(source), stages)
        config, notes = initial.take_over(config, trained, str(source))
        section = model_config(config)
        class_names = class_names or initial.class_names_of(source)
        num_classes = _num_classes(read_weights(source), section, class_names, source)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.SEED)  # for the routers' initial values
            model = build_model(section, num_classes)
        load_dense(model, source, upcycle=True)
        tensors = model.state_dict()
    else:
        section = model_config(config)
        layouts.check_layout(kind, section)
        sources = find_sources(source)
        states = layouts.with_project_names(kind, read_states(sources))
        num_classes = _num_classes(states[0], section, class_names, sources.path)
        model = _meta_model(section, num_classes)
        tensors = layouts.joined(states, model, sources)
    tensors = _fitting(tensors, model, source)
    write_weights(output, model, tensors, config.dump(), class_names or [], step)
    return notes


def export_weights(
    kind: str,
    checkpoint: Path,
    output: Path,
    ranks: int | None = None,
    legacy: bool = True,
    dtype: str = "float32",
) -> list[Path]:
    """Write the weights of a checkpoint or run to files of another program.

    Averaged weights are used if there are any.

    Args:
        kind: one of EXPORTS.
        output: the file; for hub the directory; for several ranks see `rank_file`, and X.master for
            swin-moe.
        ranks: number of ranks; None: one file with the whole model (for swin-moe X.global).
        legacy: for swin-moe: Tutel's layout in the released files, not that of newer Tutel.
        dtype: for single: one of DTYPES, in which weights are stored.

    Returns:
        the written files; for hub the directory.

    Raises:
        UserError: no complete checkpoint, a wrong number of ranks, a file that exists; nothing is
            written.
    """
    if kind == "hub":
        if ranks is not None:
            raise UserError(f"--ranks {ranks}: a directory for the hub holds the whole model")
        export_hub(checkpoint, output)
        return [output]
    source = open_newest(checkpoint)
    config = config_from_text(source.meta["config"], f"checkpoint {source.directory}")
    section = model_config(config)
    num_classes = count_classes(source, section)
    check_network(source, section, num_classes)
    model = _meta_model(section, num_classes)
    if kind == "single":
        if ranks is not None or output.suffix != ".safetensors":
            raise UserError(
                f"--output {output}: a single file is one .safetensors file, without --ranks"
            )
        check_new(output)
        metadata = {
            "format": SINGLE_FORMAT,
            "step": str(source.meta["step"]),
            "config": _without_paths(config).dump(),
            "class_names": json.dumps(source.meta["class_names"]),
            "windows": json.dumps(trained_windows(source)),
            "model_args": json.dumps(model_arguments(section, num_classes)),
            "data_config": json.dumps(timm_preprocessing(data_config(config))),
        }
        write_files([(output, DTYPES[dtype](read_weights_of(source, model)))], metadata)
        return [output]
    layouts.check_layout(kind, section)
    files, master = _targets(kind, output, ranks)
    for file in files:
        check_new(file)
    if master is not None:
        check_new(master)
    weights, legacy = read_weights_of(source, model), legacy and kind == "swin-moe"
    states = layouts.split(kind, weights, len(files), legacy)
    has_output_bias = any(layer.config.output_bias for layer in moe_layers(model).values())
    write_files(_contents(kind, states, files, master, has_output_bias))
    if master is not None:
        files = files + [master]
    return files


def _without_paths(config: CfgNode) -> CfgNode:
    """The configuration with the last part of each path of this machine."""
    values = flatten(config)
    config = config.clone()
    merge_opts(config, as_opts({key: _last_part(key, values[key]) for key in _PATH_KEYS}))
    return config


def _targets(kind: str, output: Path, ranks: int | None) -> tuple[list[Path], Path | None]:
    """The files that an export writes: one for each rank, and perhaps the master file."""
    if kind == "swin-moe":
        stem = output.with_name(output.name.removesuffix(".global"))
        if ranks is None:
            return [stem.with_name(f"{stem.name}.global")], None
        return _rank_files(stem, ranks), stem.with_name(f"{stem.name}.master")
    if ranks is None:
        return [output], None
    if output.suffix == ".safetensors" and "{rank}" not in output.name:
        raise UserError(
            f"--output {output}: with --ranks the name of .safetensors files needs {{rank}} in it"
        )
    return _rank_files(output, ranks), None


def _rank_files(path: Path, ranks: int) -> list[Path]:
    if ranks < 1:
        raise UserError(f"--ranks is {ranks}, it must be at least 1")
    return [rank_file(path, rank) for rank in range(ranks)]


def _contents(
    kind: str,
    states: list[dict[str, Tensor]],
    files: list[Path],
    master: Path | None,
    has_output_bias: bool,
) -> Iterator[tuple[Path, dict]]:
    """The content of each file. Only one rank's experts are copied at a time."""

    def content(state: dict[str, Tensor], of_ranks: bool) -> dict:
        if master:
            names = [n for n in state if layouts.is_rank_specific(n, has_output_bias) == of_ranks]
            state = {name: state[name] for name in names}
        return {"model": compact(state)} if kind == "swin-moe" else compact(state)

    for file, state in zip(files, states, strict=True):
        yield file, content(state, of_ranks=True)
    if master:
        yield master, content(states[0], of_ranks=False)


def _meta_model(config: ModelConfig, num_classes: int) -> MoEModel:
    with torch.device("meta"):
        return build_model(config, num_classes)


def _num_classes(
    state: dict[str, Tensor], config: ModelConfig, class_names: list[str] | None, source: Path
) -> int:
    """The number of classes of the classifier in `state`, under timm's or Microsoft's name."""
    name = classifier_weight(config)
    head = state.get(name, state.get("head.weight"))
    num_classes = config.num_classes
    if head is not None and head.ndim:
        num_classes = len(head)
    if not num_classes:
        raise UserError(f"{source}: has no classifier ({name}), and MODEL.NUM_CLASSES is 0")
    if config.num_classes not in (0, num_classes):
        raise UserError(
            f"{source}: has {num_classes} classes, MODEL.NUM_CLASSES is {config.num_classes}"
        )
    if class_names and len(class_names) != num_classes:
        raise UserError(
            f"{source}: has {num_classes} classes, there are {len(class_names)} class names"
        )
    return num_classes


def _fitting(tensors: dict[str, Tensor], model: nn.Module, source: Path) -> dict[str, Tensor]:
    """The tensors in the model's dtypes, after checking that they are exactly the model's.

    Raises:
        UserError: names or shapes differ, or values are not finite.
    """
    expected = model.state_dict()
    problems = compare(expected, tensors)
    if problems:
        raise UserError(f"{source} does not fit the model: {problems}; nothing was written")
    check_finite(tensors, str(source))
    return {name: tensors[name].to(expected[name].dtype) for name in expected}
