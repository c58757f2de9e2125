"""A model as a file that runs without this project: a torch.export program or an ONNX model.

| format | float32 | bfloat16 | int8 |
| --- | --- | --- | --- |
| torch | yes | weights and computation | no |
| onnx | yes | weights of matrix products | weights of matrix products |

ONNX with bfloat16 weights computes in float32; with int8 weights, activations are quantised as they
come. Routers stay in float32. B images, C channels, S their side
"""

import io
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from swinv2_moe.errors import UserError
from swinv2_moe.export.forms import StandardForm
from swinv2_moe.models import MoEModel

DTYPES = {"onnx": ("float32", "bfloat16", "int8"), "torch": ("float32", "bfloat16")}
FILES = {"onnx": "model.onnx", "torch": "model.pt2"}
INPUT, OUTPUT = "images", "logits"

# the modules that an ONNX node is from
_SCOPES, _ROUTER = "pkg.torch.onnx.name_scopes", re.compile(r"\brouter\b")

Program = Callable[[Tensor], Tensor]  # float32 images [B, C, S, S] -> float32 logits [B, classes]


def check_packages(kind: str) -> None:
    """Whether what writes and runs the format is there.

    Raises:
        UserError: one of the optional packages is missing.
    """
    if kind != "onnx":
        return
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            "--format onnx needs the export extra, the packages onnx, onnxscript and onnxruntime:"
            f" pip install -e '.[export]' ({error})"
        ) from error


def write_program(
    kind: str,
    model: MoEModel,
    images: Tensor,
    dtype: str,
    any_batch: bool,
    directory: Path,
) -> None:
    """The file FILES[kind] in `directory`, for batches of the shape of `images`, or of any number
    of such images.

    Args:
        images: [B, C, S, S] on the model's device.
        any_batch: needs two images or more, and a model without a capacity.

    Raises:
        OSError: the file cannot be written.
    """
    is_torch = kind == "torch"
    computes_in = torch.bfloat16 if is_torch and dtype == "bfloat16" else torch.float32
    form = StandardForm(model, computes_in, batched_experts=is_torch)
    shapes = None
    if any_batch:
        shapes = ({0: torch.export.Dim("batch", min=1)},)
    with _quiet(), torch.no_grad():
        exported = torch.export.export(form, (images,), dynamic_shapes=shapes)
        for node in exported.graph.nodes:
            node.meta.pop("stack_trace", None)  # where on this machine its line of code is
        if is_torch:
            _write_torch(exported, directory / FILES[kind])
        else:
            _write_onnx(exported, dtype, directory / FILES[kind])


def load_program(kind: str, directory: Path) -> Program:
    """The program in a directory, on as many threads as torch has here; onnxruntime's on the
    CPU."""
    with _quiet():
        return (_load_onnx if kind == "onnx" else _load_torch)(directory / FILES[kind])


def parts_of(file: Path) -> list[Path]:
    """A program's files: ONNX keeps the weights of a large one in a second file, beside it."""
    return sorted(file.parent.glob(f"{file.name}*"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters and quantisers warn of what is checked here afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


# torch.export


def _write_torch(exported: torch.export.ExportedProgram, file: Path) -> None:
    archive = io.BytesIO()  # on a full disk torch's own writer would abort the process
    torch.export.save(exported, archive)
    file.write_bytes(archive.getbuffer())


def _load_torch(file: Path) -> Program:
    return torch.export.load(file).module()


# ONNX


def _write_onnx(exported: torch.export.ExportedProgram, dtype: str, file: Path) -> None:
    program = torch.onnx.export(
        exported,
        dynamo=True,
        verbose=False,
        input_names=[INPUT],
        output_names=[OUTPUT],
        custom_translation_table={torch.ops.aten.sort.stable: _stable_sort},
    )
    products = [node for node in program.model.graph if node.op_type in ("MatMul", "Gemm")]
    routers = [
        node.name for node in products if _ROUTER.search(node.metadata_props.get(_SCOPES, ""))
    ]
    if dtype == "bfloat16":
        _store_as_bfloat16(
            program.model.graph, [node for node in products if node.name not in routers]
        )
    whole = file.with_name("float32.onnx") if dtype == "int8" else file
    program.save(whole)
    if dtype == "int8":
        del program, products  # the weights are read anew
        _quantize(whole, file, routers)


def _stable_sort(values, stable: bool = True, dim: int = -1, descending: bool = False):
    """aten::sort.stable, for which torch 2.11 has no translation. Of equals ONNX's TopK takes the
    lower index first."""
    from onnxscript import opset18 as op

    size = op.Gather(op.Shape(values), op.Constant(value_ints=[dim]))
    return op.TopK(values, size, axis=dim, largest=int(descending), sorted=1)


def _store_as_bfloat16(graph, products: list) -> None:
    """The weights of matrix products behind a Cast to float32, which onnxruntime does once, on
    loading."""
    import onnx_ir as ir

    for node in products:
        weight = node.inputs[1]
        if weight.const_value is None:  # a product of two activations
            continue
        name = f"{weight.name}.bfloat16"
        rounded = torch.from_numpy(weight.const_value.numpy()).bfloat16()
        stored = ir.val(name, const_value=ir.tensor(rounded, name=name))
        cast = ir.node("Cast", [stored], {"to": ir.DataType.FLOAT}, name=f"{node.name}.cast")
        graph.register_initializer(stored)
        graph.insert_before(node, cast)
        node.replace_input_with(1, cast.outputs[0])
        del graph.initializers[weight.name]


def _quantize(whole: Path, file: Path, kept: list[str]) -> None:
    """Dynamic quantisation of all products but `kept`: int8 weights, and uint8 activations whose
    range is found as they come. The file `whole` is removed."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    size = sum(part.stat().st_size for part in parts_of(whole))
    model = onnx.load(whole, load_external_data=False)
    # the quantiser transposes weights, whose shapes these would contradict
    del model.graph.value_info[:]
    onnx.save(model, whole)
    quantize_dynamic(
        whole,
        file,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        # what becomes of a Gemm before that
        nodes_to_exclude=kept + [f"{name}_MatMul" for name in kept],
        # a quarter of it is left, and one protobuf message takes 2 GiB
        use_external_data_format=size >= 2**32,
    )
    for part in parts_of(file):
        shutil.copymode(whole, part)  # the second one would be for this user alone
    for part in parts_of(whole):
        part.unlink()


def _load_onnx(file: Path) -> Program:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])
