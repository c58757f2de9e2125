"""Checks a form for GPUs on the device where it runs, before its first use there.

Small cases run through the form and, on the CPU in fp64, through the torch form. They have sizes
that divide no tile, an expert without tokens, dropped tokens, equal logits, K = 1 and K = 2.
Outputs and gradients are compared. `backend.select` passes over a form that differs or fails.

`backend.verify_mode` says which checks run.
"""

# T tokens, E experts, K top-k, M model dim, H hidden dim

import functools
import json
import logging
import platform
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from moe_core.context import in_backward, in_transform
from moe_core.files import atomic_write, open_regular, sha256
from moe_core.ops.backend import Checked, is_interpreted, verify_mode
from moe_core.ops.combine.op import combine, dispatch
from moe_core.ops.ffn.inputs import ExpertWeights
from moe_core.ops.ffn.op import moe_ffn
from moe_core.ops.launch import compile_ahead
from moe_core.ops.plan.op import DispatchPlan, make_plan
from moe_core.ops.route.op import LinearLogits, RouteSettings, route
from moe_core.ops.route.reference import RoutingScores
from moe_core.registry import GATED_ACTIVATIONS, LOSSES

_CHECKS = "moe_core_checks.json"  # the file of passed checks
_MAX_BYTES = 1 << 16  # of a file of kept results
_MAX_DEVICES = 32  # of which results are kept
_MAX_NAMES = 128  # of a device
# A product that the Triton form leaves to torch, which the user may have told to use TF32.
_BY_TORCH = "the gradient of weight of a linear router"
_log = logging.getLogger("moe_core")
_check = threading.Lock()  # held during a check

Named = dict[str, Tensor]


def verdict(checked: Checked) -> bool | None:
    """Whether a form is right; None, which is not remembered, where that cannot be found out now.

    A check has a thread of its own. So it has neither autocast nor inference mode, fake tensors,
    hooks of saved tensors or a stream of the caller, and runs while torch.compile traces the
    caller. It cannot run while the caller captures a CUDA graph, in a backward pass, or within
    forward-mode differentiation. Operations that run during a check are not checked.
    """
    mode = verify_mode()
    is_compiled = checked.device == "cuda" and not is_interpreted()
    if mode == "0" or (mode == "1" and not is_compiled):
        return True
    if checked.device == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    # A check in a backward pass would wait for the thread in which that pass runs.
    if in_backward() or not _check.acquire(blocking=False):
        return None
    try:
        device = device_name(checked)
        if mode == "1" and is_kept(_CHECKS, device, checked.name):
            return True
        with ThreadPoolExecutor(1) as thread:
            fault = thread.submit(_fault, checked).result()
        if fault == "" and is_compiled:
            keep(_CHECKS, device, checked.name)
    finally:
        _check.release()
    if fault:
        _log.warning(
            "moe_core kernels: %s is not used: %s (%s). The next form replaces it. Please report"
            " this line; MOE_CORE_VERIFY=0 skips the check",
            checked.description,
            fault,
            device,
        )
    if fault is None:
        return None
    return fault == ""


def _fault(checked: Checked) -> str | None:
    """What is wrong with a form: "" if nothing is, None if a case cannot run now."""
    if in_transform(torch.empty(0)):  # the plain form would run twice
        return None
    on_device: AbstractContextManager = nullcontext()
    if checked.device == "cuda":
        on_device = torch.cuda.device(checked.ordinal)
    try:
        with on_device:
            _, language = checked.form.split(".")
            if checked.device == "cuda":  # before the NaN, which it would overwrite
                compile_ahead(lambda: list(results_of(checked, language)))
            # Freed memory that results may get, so that what a kernel leaves out is NaN.
            del [torch.full((1 << 18,), torch.nan, device=checked.device) for _ in range(4)][:]
            forms = results_of(checked, language), results_of(checked, "torch")
            for (name, value), (_, right) in zip(*forms, strict=True):
                dtype = checked.dtype
                if name == _BY_TORCH:
                    dtype = torch.float16
                difference = _difference(value.cpu(), right, dtype)
                if difference:
                    return f"{name} {difference}"
    except torch.OutOfMemoryError:
        raise  # says nothing about the form
    except Exception as error:  # of the compiler, the launch or the interpreter
        reason = (str(error).strip() or "no message").splitlines()[0]
        return f"{type(error).__name__}: {reason}"
    return ""


def results_of(checked: Checked, kernels: str) -> Iterator[tuple[str, Tensor]]:
    """Run the cases of a form with `kernels`: "triton" or "torch"."""
    return _CASES[checked.form](_Form(checked, kernels))


def _difference(value: Tensor, right: Tensor, dtype: torch.dtype) -> str:
    """How a result differs by more than its rounding explains; "" if it does not.

    Results are rounded to `dtype` a few times. Sums are in fp32, or in fp64 for fp64.
    """
    if value.shape != right.shape:
        return f"has shape {list(value.shape)}, not {list(right.shape)}"
    if not right.is_floating_point():
        wrong = int((value != right).sum())
        if wrong == 0:
            return ""
        return f"differs in {wrong} of {right.numel()} numbers"
    sums = torch.promote_types(dtype, torch.float32)
    allowed = 8 * torch.finfo(dtype).eps + 256 * torch.finfo(sums).eps
    error = float((value.double() - right).abs().max() / right.abs().max())
    if error <= allowed:
        return ""
    return f"is off by {error:.2g} of its largest number, where {allowed:.2g} is allowed"


# The cases. Each yields the results of a form with their names. Both forms get the same numbers.


class _Form:
    """A form, and the numbers that it gets: the torch form in fp64 on the CPU."""

    def __init__(self, checked: Checked, kernels: str) -> None:
        self.kernels, self.dtype, self.activation = kernels, checked.dtype, checked.activation
        self._is_exact = kernels == "torch"
        self.device = "cpu" if self._is_exact else checked.device
        self._random = torch.Generator().manual_seed(0)

    def number(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Multiples of `scale / 8`, of which products and sums are exact, so ties stay ties."""
        values = torch.randint(-8, 9, shape, generator=self._random) * (scale / 8)
        if self._is_exact:
            dtype = torch.float64
        return values.to(self.device, dtype or self.dtype).requires_grad_()

    def experts(self, num_tokens: int, top_k: int) -> Tensor:
        """[T, K] of 4 experts: the second gets no token, the first gets the most."""
        scores = torch.rand(num_tokens, 3, generator=self._random) + torch.tensor([0.5, 0, 0])
        return torch.tensor([0, 2, 3])[scores.topk(top_k).indices]

    def plan(self, num_tokens: int, top_k: int, capacity: int | None) -> DispatchPlan:
        """A plan of `experts` by the torch form."""
        plan = make_plan(self.experts(num_tokens, top_k), 4, capacity, kernels="torch")
        return DispatchPlan._make(None if x is None else x.to(self.device) for x in plan)

    def results(self, outputs: Named, inputs: Named, where: str = "") -> Iterator[tuple]:
        """The outputs, and the gradients of the inputs for random gradients of the outputs."""
        real = [y for y in outputs.values() if y.requires_grad]
        grads = [self.number(*y.shape, dtype=y.dtype).detach() for y in real]
        computed = torch.autograd.grad(real, list(inputs.values()), grads)
        yield from ((f"{name}{where}", y.detach()) for name, y in outputs.items())
        for name, grad in zip(inputs, computed, strict=True):
            yield f"the gradient of {name}{where}", grad


def _routing(form: _Form) -> Iterator[tuple]:
    tokens = form.number(70, 67)
    weight = form.number(6, 67, scale=0.25).detach()
    weight[3] = weight[1]
    weight.requires_grad_()
    cast_to = tokens.dtype if form.kernels == "torch" else torch.bfloat16
    logits = LinearLogits(tokens, weight, cast_to)
    outputs = _routed(logits, None, RouteSettings(2, True, "gshard", 0.0, 0.0, form.kernels))
    outputs.setdefault("cast tokens", tokens)
    yield from form.results(outputs, {"tokens": tokens, "weight": weight}, " of a linear router")
    noisy, noise = form.number(70, 6), form.number(70, 6).detach()
    settings = RouteSettings(1, False, "load_importance", 0.5, 0.5, form.kernels)
    outputs = _routed(noisy, noise, settings)
    yield from form.results(outputs, {"logits": noisy}, " of noisy logits")


def _routed(logits: Tensor | LinearLogits, noise: Tensor | None, settings: RouteSettings) -> Named:
    routed = route(logits, noise, settings)
    if routed.loss_of_sums is not None and routed.sums is not None:
        aux_loss = routed.loss_of_sums(settings.loss, routed.sums, len(routed.ids))
    else:
        assert routed.logits is not None
        assert routed.noisy is not None
        loss, std = LOSSES[settings.loss](), settings.loss_noise_std
        scores = RoutingScores(routed.logits, routed.noisy, routed.probs, routed.ids, std)
        aux_loss = loss.value(loss.sums(scores), len(routed.ids))
    outputs = {"loss": aux_loss, "choice": routed.ids, "gates": routed.gates}
    outputs["probabilities"] = routed.probs
    if routed.inputs is not None:
        outputs["cast tokens"] = routed.inputs
    return outputs


def _plans(form: _Form) -> Iterator[tuple]:
    ids = form.experts(300, 2).to(form.device)
    priority = form.number(300, dtype=torch.float32).detach()
    for kind, capacity in (("plan", 70), ("dropless plan", None)):
        order = None
        if capacity is not None:
            order = priority
        plan = make_plan(ids, 4, capacity, order, form.kernels)
        for name, field in plan._asdict().items():
            if field is not None:
                yield f"{name} of a {kind}", field


def _rows(form: _Form) -> Iterator[tuple]:
    plan = form.plan(90, 2, 40)
    inputs = {"tokens": form.number(90, 519), "rows": form.number(len(plan.choices), 519)}
    inputs["gates"] = form.number(90, 2, dtype=torch.promote_types(form.dtype, torch.float32))
    outputs = {"dispatch": dispatch(inputs["tokens"], plan, form.kernels)[: plan.offsets[-1]]}
    outputs["combine"] = combine(inputs["rows"], inputs["gates"], plan, form.kernels)
    yield from form.results(outputs, inputs)


class _Network(NamedTuple):
    """A case of the experts' networks."""

    num_tokens: int
    top_k: int
    model_dim: int
    hidden_dim: int
    weight_dtype: torch.dtype | None  # None: that of the tokens
    has_gates: bool = True  # and drops tokens


# Large tiles of aligned rows, whose loads are asynchronous; small tiles of rows that are not.
_NETWORKS = (
    _Network(400, 2, 272, 80, torch.float32),
    _Network(150, 1, 67, 35, None),
    _Network(150, 1, 67, 35, None, has_gates=False),
)


def _networks(form: _Form) -> Iterator[tuple]:
    assert form.activation is not None
    kinds = [False, True]
    if form.activation in GATED_ACTIVATIONS:
        kinds = [True]
    for is_gated in kinds:
        for case in _NETWORKS:
            if case.has_gates or is_gated == kinds[0]:
                yield from _network(form, form.activation, case, is_gated)


def _network(form: _Form, activation: str, case: _Network, is_gated: bool) -> Iterator[tuple]:
    num_tokens, top_k, model_dim, hidden_dim, weight_dtype, has_gates = case
    capacity, where = None, f" with K = {top_k}"
    if has_gates:
        capacity = num_tokens * top_k // 3
    plan = form.plan(num_tokens, top_k, capacity)
    shapes = {"w1": (hidden_dim, model_dim), "b1": (hidden_dim,), "w2": (hidden_dim, model_dim)}
    shapes["b2"] = (model_dim,)
    if is_gated:
        shapes |= {"w3": shapes["w1"], "b3": shapes["b1"]}
        where += ", w3"
    weights = {}
    for name, shape in shapes.items():
        scale = 1.0
        if name.startswith("w"):
            scale = 0.125
        weights[name] = form.number(4, *shape, dtype=weight_dtype, scale=scale)
    inputs = {"tokens": form.number(num_tokens, model_dim)}
    if has_gates:
        inputs["gates"] = form.number(num_tokens, top_k, dtype=torch.float32)
    else:
        where += ", no gates"
    y = moe_ffn(
        inputs["tokens"], inputs.get("gates"), ExpertWeights(**weights), plan, activation,
        kernels=form.kernels,
    )  # fmt: skip
    yield from form.results({"y": y}, inputs | weights, where)


_CASES: dict[str, Callable[[_Form], Iterator[tuple]]] = {
    "route.triton": _routing,
    "plan.triton": _plans,
    "combine.triton": _rows,
    "ffn.triton": _networks,
}


# Names of passed checks by device with its versions, in a JSON file beside Triton's compiled
# kernels. A failed check is not kept: the next process tries again.


def is_kept(file: str, device: str, name: str) -> bool:
    """Whether `keep` was called with these arguments, in this process or an earlier one."""
    return name in _kept(file).get(device, [])


def _kept(name: str) -> dict[str, list[str]]:
    """What a file holds; nothing if it is missing, damaged or not of this format."""
    try:
        with open_regular(_folder() / name) as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            return {}
        kept = json.loads(content)
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(kept, dict) or not all(isinstance(names, list) for names in kept.values()):
        return {}
    return kept


def keep(file: str, device: str, name: str) -> None:
    """Keep a name of a device, whose driver must be known, and forget the oldest ones."""
    if not _driver():
        return
    kept = _kept(file)
    names = [other for other in kept.pop(device, []) if other != name] + [name]
    kept = dict(list(kept.items())[1 - _MAX_DEVICES :]) | {device: names[-_MAX_NAMES:]}
    content = json.dumps(kept, indent=1).encode()
    while len(content) > _MAX_BYTES and len(kept) > 1:
        del kept[next(iter(kept))]
        content = json.dumps(kept, indent=1).encode()
    with suppress(OSError):  # the next process checks again
        _folder().mkdir(parents=True, exist_ok=True)
        with atomic_write(_folder() / file) as written:
            written.write(content)


def _folder() -> Path:
    return Path(triton.knobs.cache.dir)


def device_name(checked: Checked) -> str:
    """The device, and all versions on which its results depend."""
    device = f"{checked.device} {platform.machine()}"
    if checked.device == "cuda":
        major, minor = torch.cuda.get_device_capability(checked.ordinal)
        device = f"{torch.cuda.get_device_name(checked.ordinal)}, capability {major}.{minor}"
    versions = f"torch {torch.__version__}, triton {triton.__version__}, sources {_sources()}"
    return f"{device}, driver {_driver()}, {versions}"


def _driver() -> str | None:
    """NVIDIA's driver; None if it is not known."""
    with suppress(OSError, IndexError):
        lines = Path("/proc/driver/nvidia/version").read_text(errors="replace").splitlines()
        return lines[0].removeprefix("NVRM version: ")[:100]
    return None


@functools.cache
def _sources() -> str:
    """A checksum of the source files of all operations."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return sha256(file.read_bytes() for file in files)[:16]
