"""Compares the forms for GPUs with torch's, once and on demand, for those who have a new card.

    python -m moe_core.ops.verify

Prints a line for each form: right, or what differs. The status is 1 if one is wrong. The kernels
are compiled first, which takes about half a minute once on a machine.

Small cases run through the form and, on the CPU in fp64, through the torch form. They have sizes
that divide no tile, an expert without tokens, dropped tokens, equal logits, K = 1 and K = 2.
Outputs and gradients are compared.
"""

# T tokens, E experts, K top-k, M model dim, H hidden dim

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.ops.backend import KERNEL_ACTIVATIONS, check_kernels
from moe_core.ops.combine.op import combine, dispatch
from moe_core.ops.ffn.inputs import ExpertWeights
from moe_core.ops.ffn.op import moe_ffn
from moe_core.ops.launch import compile_ahead
from moe_core.ops.plan.op import DispatchPlan, make_plan
from moe_core.ops.route.op import LinearLogits, RouteSettings, route
from moe_core.ops.route.reference import RoutingScores
from moe_core.registry import GATED_ACTIVATIONS, LOSSES

# A product that the Triton form leaves to torch, which the user may have told to use TF32.
_BY_TORCH = "the gradient of weight of a linear router"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Named = dict[str, Tensor]


class Checked(NamedTuple):
    """What one check of a Triton form covers."""

    operation: str
    dtype: torch.dtype
    activation: str | None = None

    @property
    def name(self) -> str:
        parts = (self.operation, self.dtype, self.activation)
        return " ".join(str(part).removeprefix("torch.") for part in parts if part is not None)


CHECKS = (
    Checked("route", torch.float32),
    Checked("plan", torch.int64),
    *(Checked("combine", dtype) for dtype in _DTYPES),
    *(Checked("ffn", dtype, name) for dtype in _DTYPES for name in KERNEL_ACTIVATIONS),
)


def check_forms(device: str = "cuda") -> Iterator[tuple[str, str]]:
    """The name of each Triton form and what is wrong with it, "" if nothing is.

    Raises:
        ValueError: Triton cannot run on this device.
        torch.OutOfMemoryError: says nothing about the form.
    """
    check_kernels("triton", device)
    if device == "cuda":
        compile_ahead(lambda: [list(results_of(each, "triton", device)) for each in CHECKS])
    for checked in CHECKS:
        yield checked.name, fault_of(checked, device)


def fault_of(checked: Checked, device: str) -> str:
    """What is wrong with a form on this device; "" if nothing is."""
    try:
        # Freed memory that results may get, so that what a kernel leaves out is NaN.
        del [torch.full((1 << 18,), torch.nan, device=device) for _ in range(4)][:]
        forms = results_of(checked, "triton", device), results_of(checked, "torch", "cpu")
        for (name, value), (_, right) in zip(*forms, strict=True):
            dtype = checked.dtype
            if name == _BY_TORCH:
                dtype = torch.float16
            difference = _difference(value.cpu(), right, dtype)
            if difference:
                return f"{name} {difference}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of the compiler, the launch or the interpreter
        reason = (str(error).strip() or "no message").splitlines()[0]
        return f"{type(error).__name__}: {reason}"
    return ""


def results_of(checked: Checked, kernels: str, device: str) -> Iterator[tuple[str, Tensor]]:
    """Run the cases of a form with `kernels`: "triton" or "torch"."""
    return _CASES[checked.operation](_Form(checked, kernels, device))


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

    def __init__(self, checked: Checked, kernels: str, device: str) -> None:
        self.kernels, self.dtype, self.activation = kernels, checked.dtype, checked.activation
        self.device = device
        self._is_exact = kernels == "torch"
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
    "route": _routing,
    "plan": _plans,
    "combine": _rows,
    "ffn": _networks,
}


def main() -> None:
    wrong = 0
    try:
        for name, fault in check_forms():
            print(f"{name}: {fault or 'right'}", flush=True)
            wrong += bool(fault)
    except ValueError as error:
        sys.exit(str(error))
    if wrong:
        sys.exit(f"{wrong} of {len(CHECKS)} forms are wrong; MoEConfig(kernels='torch') uses none")


if __name__ == "__main__":
    main()
