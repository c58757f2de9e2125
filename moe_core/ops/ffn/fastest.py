"""Measures the forms of the experts' networks on a GPU and keeps the faster one.

Two forms compute experts in bf16 on a GPU for which `F.grouped_mm` has kernels: Triton
(`ffn.triton`), and `F.grouped_mm` between a dispatch and a combine (`ffn.grouped`). The first call
of each `ShapeClass` runs both on copies of its own inputs, in turn, with the backward pass if it
needs gradients. Later calls of the class, in this process and in later ones on the same device and
versions, use the form that was faster.

Ranks choose on their own. Both forms compute with weights in the same dtype and have no collectives
and no random numbers, and their results differ by rounding alone, so that ranks may use different
ones. An agreement would need a collective at the first call of each class, which ranks with other
numbers of rows do not make at the same time.
"""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import logging
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_core.context import in_backward, in_transform
from moe_core.ops.backend import Checked, Request, is_interpreted, load, select, verify_mode
from moe_core.ops.blocks import next_power_of_2
from moe_core.ops.ffn.grouped import CAPABILITIES
from moe_core.ops.ffn.inputs import ExpertWeights

_FILE = "moe_core_forms.json"  # beside that of moe_core.ops.verify
_FORMS = ("triton", "grouped")  # values of `kernels`
_WARM_UPS, _REPETITIONS = 2, 5  # calls of each form; the first one may compile kernels
# Triton keeps fewer rows for the backward pass and rounds the gradients of weights once, so a
# difference that may be noise does not replace it.
_LEAST_GAIN = 0.03
_log = logging.getLogger("moe_core")
_lock = threading.Lock()  # held during a measurement
_thread = threading.local()

# (tokens or rows, gates, *ExpertWeights), `kernels` -> output
Run = Callable[[Sequence[Tensor | None], str], Tensor]


class ShapeClass(NamedTuple):
    """The calls that use the same form."""

    operation: str  # moe_ffn or expert_ffn
    num_rows: int  # N, rounded up to a power of two
    num_experts: int
    model_dim: int
    hidden_dim: int
    top_k: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    activation: str
    gated: bool
    has_casts: bool  # weights that the caller has cast before
    training: bool  # with the backward pass
    ordinal: int  # of the device

    @property
    def name(self) -> str:
        """The class in words, without the device."""
        dtypes = f"{self.dtype}, weights {self.weight_dtype}".replace("torch.", "")
        words = f"{self.operation} of {self.num_rows} rows, {dtypes}, {self.activation}"
        if self.gated:
            words += ", gated"
        if self.has_casts:
            words += ", cast before"
        if self.training:
            words += ", training"
        sizes = f"E={self.num_experts} M={self.model_dim} H={self.hidden_dim} K={self.top_k}"
        return f"{words}, {sizes}"


_chosen: dict[ShapeClass, str] = {}  # a value of _FORMS
_measured: dict[ShapeClass, str] = {}  # as `measured_forms`


def measured_forms() -> dict[str, str]:
    """The forms of the experts' networks on GPUs that were measured, here or in earlier processes.

    Returns:
        For each class of shapes, in words, the form "triton" or "grouped" (`F.grouped_mm`), a comma
        and both times in milliseconds or "measured before". Only classes of this process; empty on
        a CPU.
    """
    return {shapes.name: text for shapes, text in _measured.items()}


@contextmanager
def without_measuring() -> Iterator[None]:
    """Context in which this thread measures no forms and uses none that were measured.

    A pass that is recomputed in its backward pass must be in the context again: both then use the
    same form.
    """
    before = getattr(_thread, "is_paused", False)
    _thread.is_paused = True
    try:
        yield
    finally:
        _thread.is_paused = before


def faster(
    kernels: str,
    operation: str,
    inputs: tuple[Tensor, Tensor | None, ExpertWeights],
    sizes: tuple[int, int],
    activation: str,
    dropout: float,
    has_casts: bool,
    run: Run,
) -> str:
    """The value of `kernels` for this call: "grouped" where that is faster, otherwise `kernels`.

    Args:
        kernels: another value than "auto" stays.
        operation: the name of the calling function.
        inputs: tokens [T, M] or rows [N, M], gates [T, K] or None, and the weights.
        sizes: N and K.
        dropout: with dropout nothing is measured, since the forms have different random numbers.
        has_casts: whether the caller has cast the weights before.
        run: the calling function; not called with "auto".
    """
    x, gates, weights = inputs
    if kernels != "auto" or dropout > 0 or torch.compiler.is_compiling() or not _is_on_gpu(x):
        return kernels
    if sizes[0] == 0 or getattr(_thread, "is_paused", False) or verify_mode() == "0":
        return kernels
    if torch.are_deterministic_algorithms_enabled():  # another run may choose another form
        return kernels
    tensors = (x, gates, *weights)
    needed = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    num_experts, hidden_dim, model_dim = weights.w1.shape
    shapes = ShapeClass(
        operation, next_power_of_2(sizes[0]), num_experts, model_dim, hidden_dim, sizes[1],
        x.dtype, weights.w1.dtype, activation, weights.w3 is not None, has_casts,
        needed and torch.is_grad_enabled(), x.get_device(),
    )  # fmt: skip
    form = _chosen.get(shapes)
    if form is None and _can_measure(tensors):
        with _lock:
            form = _chosen.get(shapes)
            if form is None:
                form = _chosen[shapes] = _choose(shapes, tensors, run)
    if form == "grouped":
        return form
    return kernels


def _is_on_gpu(x: Tensor) -> bool:
    # A subclass may have no data or no sizes, for example of fake tensors.
    is_plain = type(x) is Tensor and x.is_cuda
    return is_plain and x.dtype == torch.bfloat16 and not is_interpreted()


def _can_measure(tensors: Sequence[Tensor | None]) -> bool:
    """Whether work of another thread on these tensors can be timed now."""
    if not {Tensor, nn.Parameter, type(None)}.issuperset(map(type, tensors)):
        return False
    assert tensors[0] is not None
    if torch.jit.is_tracing() or in_backward() or in_transform(tensors[0]):
        return False
    return not torch.cuda.is_current_stream_capturing()


# As `backend.select`: beyond its limit of recompilations torch.compile would compile it alone.
@torch.compiler.disable
def _choose(shapes: ShapeClass, tensors: Sequence[Tensor | None], run: Run) -> str:
    """The faster form of a class, by the file or by measuring it. Writes both."""
    if not _both_run(shapes):
        return "triton"
    verify = load("verify")
    device = verify.device_name(
        Checked("ffn.grouped", shapes.dtype, shapes.activation, "cuda", shapes.ordinal)
    )
    uses_file = verify_mode() == "1"  # "always" measures in each process
    for form in _FORMS:
        if uses_file and verify.is_kept(_FILE, device, f"{shapes.name}: {form}"):
            _note(shapes, f"{form}, measured before")
            return form
    try:
        with ThreadPoolExecutor(1) as thread:
            stream = _stream_of(tensors)
            times = thread.submit(_times, tensors, shapes.training, run, stream).result()
    except Exception as error:  # the call itself does not need the measurement
        reason = (str(error).strip() or "no message").splitlines()[0]
        _log.warning(
            "moe_core kernels: %s: triton, since measuring failed: %s: %s",
            shapes.name,
            type(error).__name__,
            reason,
        )
        return "triton"
    form = "triton"
    if times["grouped"] < (1 - _LEAST_GAIN) * times["triton"]:
        form = "grouped"
    both = ", ".join(f"{name} {times[name]:.3f} ms" for name in _FORMS)
    _note(shapes, f"{form}, measured: {both}")
    if uses_file:
        verify.keep(_FILE, device, f"{shapes.name}: {form}")
    return form


def _note(shapes: ShapeClass, text: str) -> None:
    _measured[shapes] = text
    _log.info("moe_core kernels: %s: %s", shapes.name, text)


def _both_run(shapes: ShapeClass) -> bool:
    """Whether both forms run on the device, and are right there."""
    if torch.cuda.get_device_capability(shapes.ordinal) not in CAPABILITIES:
        return False
    properties = (shapes.dtype, shapes.weight_dtype, None, shapes.activation)
    if select("ffn", Request("auto", "cuda", *properties)) != "ffn.triton":
        return False
    return select("ffn", Request("grouped", "cuda", *properties)) == "ffn.grouped"


def _stream_of(tensors: Sequence[Tensor | None]) -> AbstractContextManager:
    """A context for another thread, with the device of the tensors and the stream of this one."""
    assert tensors[0] is not None
    return torch.cuda.stream(torch.cuda.current_stream(tensors[0].device))


def _times(
    tensors: Sequence[Tensor | None], training: bool, run: Run, stream: AbstractContextManager
) -> dict[str, float]:
    """Milliseconds of a call in each form: the median of `_REPETITIONS`, in turn.

    This has a thread of its own. So it has neither autocast nor inference mode, hooks of saved
    tensors, such as those of activation checkpointing, or dispatch modes of the caller.
    """
    times: dict[str, list[float]] = {form: [] for form in _FORMS}
    with stream, torch.set_grad_enabled(training):
        copies: list[Tensor | None] = []
        for tensor in tensors:
            # Gradients end here: they reach neither the caller's graph nor hooks of parameters.
            copy = None if tensor is None else tensor.detach()
            if copy is not None and training and tensor is not None and tensor.requires_grad:
                copy.requires_grad_()
            copies.append(copy)
        grad = None
        if training:
            grad = _random_like(run(copies, "triton"))
        for i in range(_WARM_UPS + _REPETITIONS):
            for form in _FORMS:
                milliseconds = _milliseconds(partial(_step, run, copies, form, grad))
                if i >= _WARM_UPS:
                    times[form].append(milliseconds)
    return {form: statistics.median(values) for form, values in times.items()}


def _step(run: Run, tensors: Sequence[Tensor | None], form: str, grad: Tensor | None) -> None:
    """A forward pass and, with a gradient of its output, the backward pass."""
    y = run(tensors, form)
    if grad is not None:
        wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
        torch.autograd.grad(y, wanted, grad)


def _random_like(y: Tensor) -> Tensor:
    """Random numbers that are not of the caller's generator."""
    generator = torch.Generator(y.device).manual_seed(0)
    return torch.randn(y.shape, generator=generator, dtype=y.dtype, device=y.device)


def _milliseconds(work: Callable[[], None]) -> float:
    """The time of `work` on the current stream, from its first launch on the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.current_stream().synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
