"""Write a model to a file that runs without this project: torch.export or ONNX.

| format | float32 | bfloat16 | int8 |
| --- | --- | --- | --- |
| torch | yes | weights and computation | no |
| onnx | yes | weights of matrix products | weights of matrix products |

ONNX with bfloat16 weights computes in float32; with int8 weights, activations are quantised
dynamically. Routers stay in float32. B images, C channels, S their side
"""

import io
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swinv2_moe.errors import UserError
from swinv2_moe.export.forms import StandardForm
from swinv2_moe.models import MoEModel
from swinv2_moe.train.graph import PassGraph

DTYPES = {"onnx": ("float32", "bfloat16", "int8"), "torch": ("float32", "bfloat16")}
FILES = {"onnx": "model.onnx", "torch": "model.pt2"}
INPUT, OUTPUT = "images", "logits"

_SCOPES = "pkg.torch.onnx.name_scopes"  # metadata key: the modules that an ONNX node is from
_ROUTER = re.compile(r"\brouter\b")

Program = Callable[[Tensor], Tensor]  # float32 images [B, C, S, S] -> float32 logits [B, classes]


def check_packages(kind: str) -> None:
    """Check that the packages that write and run the format are installed.

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


def default_format(dtype: str) -> str:
    """onnx; torch if the packages of ONNX are missing and torch.export has the dtype."""
    try:
        check_packages("onnx")
    except UserError:
        if dtype in DTYPES["torch"]:
            return "torch"
    return "onnx"


def write_program(
    kind: str,
    model: MoEModel,
    images: Tensor,
    dtype: str,
    any_batch: bool,
    directory: Path,
    output: str = OUTPUT,
) -> None:
    """Write the file FILES[kind] in `directory`.

    Args:
        images: an example batch [B, C, S, S] on the model's device.
        any_batch: the program accepts any batch size, in place of B. Needs B >= 2 and a model
            without capacity.

        output: name of the output of an ONNX program.

    Raises:
        OSError: the file cannot be written.
    """
    is_torch = kind == "torch"
    compute_dtype = torch.float32
    if is_torch and dtype == "bfloat16":
        compute_dtype = torch.bfloat16
    form = StandardForm(model, compute_dtype, batched_experts=is_torch)
    shapes = None
    if any_batch:
        shapes = ({0: torch.export.Dim("batch", min=1)},)
    with _quiet(), torch.no_grad():
        exported = torch.export.export(form, (images,), dynamic_shapes=shapes)
        for node in exported.graph.nodes:
            node.meta.pop("stack_trace", None)  # contains paths of this machine
        if is_torch:
            _write_torch(exported, directory / FILES[kind])
        else:
            _write_onnx(exported, dtype, directory / FILES[kind], output)


def load_program(kind: str, directory: Path, fixed_on: torch.device | None = None) -> Program:
    """The program in a directory, with torch's number of threads; ONNX runs on the CPU.

    Args:
        fixed_on: the device of a program of torch.export whose shapes are fixed. On a GPU it is
            replayed as a CUDA graph, and the next call may overwrite a result.
    """
    with _quiet():
        if kind == "onnx":
            return _load_onnx(directory / FILES[kind])
        program = _load_torch(directory / FILES[kind])
        return program if fixed_on is None else PassGraph(None, program, fixed_on)


def parts_of(file: Path) -> list[Path]:
    """A program's files: ONNX stores the weights of a large model in a second file next to it."""
    return sorted(file.parent.glob(f"{file.name}*"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of exporters and quantisers; the program is compared afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


# torch.export


def _write_torch(exported: torch.export.ExportedProgram, file: Path) -> None:
    archive = io.BytesIO()  # on a full disk, torch's file writer aborts the process
    torch.export.save(exported, archive)
    file.write_bytes(archive.getbuffer())


def _load_torch(file: Path) -> Program:
    return torch.export.load(file).module()


# ONNX


def _write_onnx(
    exported: torch.export.ExportedProgram, dtype: str, file: Path, output: str
) -> None:
    program = torch.onnx.export(
        exported,
        dynamo=True,
        verbose=False,
        input_names=[INPUT],
        output_names=[output],
        custom_translation_table={torch.ops.aten.sort.stable: _stable_sort},
    )
    assert program is not None
    products = [node for node in program.model.graph if node.op_type in ("MatMul", "Gemm")]
    routers = [
        str(node.name) for node in products if _ROUTER.search(node.metadata_props.get(_SCOPES, ""))
    ]
    if dtype == "bfloat16":
        not_routers = [node for node in products if node.name not in routers]
        _store_as_bfloat16(program.model.graph, not_routers)
    if dtype != "int8":
        program.save(file)
        return
    unquantized = file.with_name("float32.onnx")
    program.save(unquantized)
    del program, products  # free memory: the quantiser reads the weights again
    _quantize(unquantized, file, routers)


def _stable_sort(values, stable: bool = True, dim: int = -1, descending: bool = False):
    """aten::sort.stable, for which torch 2.11 has no translation.

    Of equal values, ONNX's TopK returns the lower index first.
    """
    from onnxscript import opset18 as op

    index: Any = op.Constant(value_ints=[dim])
    size = op.Gather(op.Shape(values), index)
    return op.TopK(values, size, axis=dim, largest=int(descending), sorted=1)


def _store_as_bfloat16(graph, products: list) -> None:
    """Store the weights of matrix products in bfloat16, followed by a Cast to float32.

    onnxruntime does the cast once, on loading.
    """
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


def _quantize(source: Path, file: Path, excluded: list[str]) -> None:
    """Quantise the model in `source` dynamically and remove that file.

    Weights of matrix products become int8. Activations become uint8, with a range that is computed
    at run time. Products in `excluded` stay as they are.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    size = sum(part.stat().st_size for part in parts_of(source))
    model = onnx.load(source, load_external_data=False)
    # The quantiser transposes weights; the recorded shapes would be wrong.
    del model.graph.value_info[:]
    onnx.save(model, source)
    quantize_dynamic(
        source,
        file,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        # the quantiser first turns a Gemm into NAME_MatMul
        nodes_to_exclude=excluded + [f"{name}_MatMul" for name in excluded],
        # a quarter of the size is left, and a protobuf message is limited to 2 GiB
        use_external_data_format=size >= 2**32,
    )
    for part in parts_of(file):
        shutil.copymode(source, part)  # the external data file is otherwise private
    for part in parts_of(source):
        part.unlink()


def _load_onnx(file: Path) -> Program:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        outputs = session.run(None, {INPUT: images.numpy()})
        return torch.from_numpy(outputs[0])

    return run
