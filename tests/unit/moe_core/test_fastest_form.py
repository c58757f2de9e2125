"""Which form of the experts' networks a GPU uses: measured for each class of shapes, kept on disk,
forced by `kernels`; nothing is measured on a CPU.

There is no GPU: the device and the clock are fakes, and plain torch computes the form "ffn.triton".
`F.grouped_mm` is a loop, which also computes in fp64.
"""

# T tokens, E experts, K top-k

import json
import logging
import os
import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from moe_cases import assert_equal_to_plain, make_layer
from torch.utils.checkpoint import checkpoint

from moe_core import measured_forms
from moe_core.ops import agree_on_kernels, backend, expert_ffn, without_measuring
from moe_core.ops.backend import Checked, Request, select
from moe_core.ops.ffn import fastest, grouped, linear, op

triton = pytest.importorskip("triton")
verify = backend.load("verify")

BF16 = torch.bfloat16
ANY_FLOAT = (BF16, torch.float32, torch.float64)
LANGUAGES = {
    "auto": ("triton", "torch"),
    "triton": ("triton", "torch"),
    "torch": ("torch",),
    "grouped": ("grouped", "triton", "torch"),
}


def grouped_mm_by_loop(a, b, offs):
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    if b.dim() == 3:  # rows of each expert
        out = a.new_zeros(a.shape[0], b.shape[2])
        for e, (start, end) in enumerate(zip(starts, ends, strict=True)):
            out[start:end] = a[start:end] @ b[e]
        return out
    return torch.stack([a[:, s:e] @ b[s:e] for s, e in zip(starts, ends, strict=True)])


def by_plain_torch(*fields):
    inputs = op.MoEFFNInputs._make(fields)._replace(dropout=0.0)
    return op._plain_moe_ffn(*inputs), None


class Gpu:
    """Stands for a GPU on which a pass takes `times`, by form; counts the passes that it timed."""

    def __init__(self, monkeypatch) -> None:
        self.times = {"triton": 2.0, "grouped": 1.0}  # milliseconds
        self.timed, self.forms = [], []
        self.name, self.driver, self.is_capturing = "GPU", "580.1", False
        monkeypatch.setattr(fastest, "_is_on_gpu", lambda x: type(x) is torch.Tensor)
        monkeypatch.setattr(fastest, "_both_run", lambda shapes: True)
        monkeypatch.setattr(fastest, "_stream_of", lambda tensors: nullcontext())
        monkeypatch.setattr(fastest, "_milliseconds", self.milliseconds)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(backend, "_languages", lambda kernels, device: LANGUAGES[kernels])
        monkeypatch.setattr(backend, "_GROUPED_DTYPES", ANY_FLOAT)
        monkeypatch.setattr(backend, "_HALVES_AND_FP32", ANY_FLOAT)
        for operation in ("route", "plan", "combine"):
            torch_form = backend.FORMS[operation][-1:]
            monkeypatch.setitem(backend.FORMS, operation, torch_form)
        monkeypatch.setattr(op, "_moe_ffn", by_plain_torch)
        monkeypatch.setattr(backend, "_is_right", lambda form, request: True)
        monkeypatch.setattr(verify, "device_name", lambda checked: self.name)
        monkeypatch.setattr(verify, "_driver", lambda: self.driver)
        monkeypatch.setattr(op, "select", self.select)

    def select(self, operation: str, request: Request) -> str:
        form = select(operation, request)
        self.forms.append(form)
        return form

    def milliseconds(self, work) -> float:
        self.forms.clear()
        work()
        form = "grouped" if "ffn.grouped" in self.forms else "triton"
        self.timed.append(form)
        return self.times[form]

    def used(self, layer, *arguments, **options) -> str:
        """The form that computes a call."""
        layer(*arguments, **options)
        return self.forms[-1]


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_CORE_VERIFY", "1")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(linear, "_form", lambda rows: grouped)
    monkeypatch.setattr(F, "grouped_mm", grouped_mm_by_loop)
    monkeypatch.setattr(fastest, "_chosen", {})
    monkeypatch.setattr(fastest, "_measured", {})
    return Gpu(monkeypatch)


@pytest.fixture
def nothing_is_measured(gpu, monkeypatch):
    def choose(*arguments):
        raise AssertionError("measured")

    monkeypatch.setattr(fastest, "_choose", choose)


def fp32_layer(**config):
    return make_layer(dtype=torch.float32, **config)


# The choice


def test_both_forms_run_in_turn_and_the_faster_one_is_used(gpu, caplog):
    caplog.set_level(logging.INFO, "moe_core")
    layer, x = fp32_layer(top_k=2, capacity_factor=0.0), torch.randn(40, 6)
    assert gpu.used(layer, x) == "ffn.grouped"
    calls = fastest._WARM_UPS + fastest._REPETITIONS
    assert gpu.timed == ["triton", "grouped"] * calls
    assert gpu.used(layer, x) == "ffn.grouped"
    assert len(gpu.timed) == 2 * calls
    shapes = "moe_ffn of 128 rows, float32, weights float32, gelu, training, E=4 M=6 H=10 K=2"
    times = "grouped, measured: triton 2.000 ms, grouped 1.000 ms"
    assert caplog.messages == [f"moe_core kernels: {shapes}: {times}"]
    assert measured_forms() == {shapes: times}


@pytest.mark.parametrize(
    ("milliseconds", "form"), [(1.96, "triton"), (3.0, "triton"), (1.9, "grouped")]
)
def test_a_difference_that_may_be_noise_does_not_count(milliseconds, form, gpu):
    gpu.times["grouped"] = milliseconds
    assert gpu.used(fp32_layer(), torch.randn(40, 6)) == f"ffn.{form}"


def test_the_median_of_calls_after_the_first_ones_counts(gpu, monkeypatch):
    """The first calls compile kernels, and a slow call, as by another program, does not decide."""

    def milliseconds(work):
        number = gpu.timed.count("grouped")
        taken = gpu.milliseconds(work)
        if gpu.timed[-1] == "grouped" and number < fastest._WARM_UPS + 2:
            return 100.0
        return taken

    monkeypatch.setattr(fastest, "_milliseconds", milliseconds)
    assert gpu.used(fp32_layer(), torch.randn(40, 6)) == "ffn.grouped"


OTHER_CLASSES = {
    "rows": ({}, {"num_tokens": 65}),
    "hidden dim": ({"hidden_dim": 12}, {}),
    "K": ({"top_k": 2, "capacity_factor": 0.0}, {"num_tokens": 20}),
    "activation": ({"activation": "silu"}, {}),
    "gated": ({"gated": True}, {}),
    "inference": ({}, {"grad": False}),
}


@pytest.mark.parametrize(("config", "call"), OTHER_CLASSES.values(), ids=OTHER_CLASSES)
def test_each_class_of_shapes_has_its_own_choice(config, call, gpu):
    first, other = fp32_layer(capacity_factor=0.0), fp32_layer(**{"capacity_factor": 0.0} | config)
    assert gpu.used(first, torch.randn(40, 6)) == "ffn.grouped"
    gpu.times = {"triton": 1.0, "grouped": 2.0}
    with torch.set_grad_enabled(call.get("grad", True)):
        assert gpu.used(other, torch.randn(call.get("num_tokens", 40), 6)) == "ffn.triton"
    count = len(gpu.timed)
    for num_tokens in (33, 64):  # rounded up to the same power of two
        assert gpu.used(first, torch.randn(num_tokens, 6)) == "ffn.grouped"
    assert len(gpu.timed) == count


def test_experts_of_rows_have_their_own_choice(gpu):
    """As over several ranks, where rows are exchanged before."""
    layer = fp32_layer()
    weights, ends = layer.experts.parameters_by_field, torch.tensor([10, 10, 30, 40]).int()
    layer(torch.randn(40, 6))
    gpu.times["grouped"] = 5.0
    assert gpu.used(expert_ffn, torch.randn(40, 6), weights, ends) == "ffn.triton"
    assert gpu.used(layer, torch.randn(40, 6)) == "ffn.grouped"


def test_inference_is_timed_without_a_backward_pass(gpu, monkeypatch):
    graded = []
    step = fastest._step

    def record(run, tensors, form, grad):
        graded.append((grad is not None, torch.is_grad_enabled()))
        step(run, tensors, form, grad)

    monkeypatch.setattr(fastest, "_step", record)
    layer, x = fp32_layer(), torch.randn(40, 6)
    with torch.inference_mode():
        layer(x)
    assert set(graded) == {(False, False)}
    graded.clear()
    layer(x)
    assert set(graded) == {(True, True)}


def test_the_caller_is_left_as_it_was(gpu):
    """Random numbers, gradients, hooks of parameters, saved tensors and autocast."""
    layer, x = fp32_layer(), torch.randn(40, 6).requires_grad_()
    seen = []
    layer.experts.w1.register_hook(lambda grad: seen.append("hook"))
    state = torch.get_rng_state()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
        first = len(saved)
        layer(x)
    assert len(gpu.timed) > 0
    assert len(saved) == 2 * first
    assert torch.equal(torch.get_rng_state(), state)
    assert seen == []
    assert x.grad is None
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activations_that_are_recomputed(use_reentrant, gpu):
    """The recomputed pass measures nothing, and uses the form of the first one."""
    layer, x = make_layer(), torch.randn(40, 6, dtype=torch.float64).requires_grad_()
    for _ in range(2):
        y, loss = checkpoint(layer, x, use_reentrant=use_reentrant)
        count = len(gpu.timed)
        (y.sum() + loss).backward()
        assert len(gpu.timed) == count > 0
    y, loss = make_layer(kernels="torch")(x)
    (expected,) = torch.autograd.grad(y.sum() + loss, x)
    torch.testing.assert_close(x.grad, 2 * expected)


# What is not measured


@pytest.mark.usefixtures("nothing_is_measured")
class TestNothingIsMeasured:
    def check(self, gpu, layer=None, x=None) -> None:
        if x is None:
            x = torch.randn(40, 6)
        assert gpu.used(layer or fp32_layer(), x) == "ffn.triton"

    def test_on_a_cpu(self, gpu, monkeypatch):
        monkeypatch.undo()
        monkeypatch.setenv("MOE_CORE_VERIFY", "1")
        monkeypatch.setattr(fastest, "_choose", lambda *arguments: 1 / 0)
        layer, x = fp32_layer(), torch.randn(40, 6)
        layer(x)
        with torch.autocast("cpu", BF16):
            layer(x)
        assert fastest._chosen == {}

    def test_while_a_graph_is_captured(self, gpu):
        gpu.is_capturing = True
        self.check(gpu)

    def test_where_the_environment_forbids_it(self, gpu, monkeypatch):
        monkeypatch.setenv("MOE_CORE_VERIFY", "0")
        self.check(gpu)

    def test_with_dropout(self, gpu):
        self.check(gpu, fp32_layer(hidden_dropout=0.5))

    def test_without_rows(self, gpu):
        self.check(gpu, x=torch.empty(0, 6))

    def test_if_results_have_to_be_the_same(self, gpu):
        torch.use_deterministic_algorithms(True)
        try:
            self.check(gpu)
        finally:
            torch.use_deterministic_algorithms(False)

    def test_where_another_time_is_measured(self, gpu):
        with without_measuring():
            self.check(gpu)

    def test_in_a_compiled_layer(self, gpu):
        torch.compiler.reset()  # after a compiled jvp in this process it would skip the layer
        layer, x = fp32_layer(), torch.randn(40, 6)
        y, _ = torch.compile(layer, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(y, fp32_layer(kernels="torch")(x)[0])

    def test_in_a_transform(self, gpu):
        layer = fp32_layer()
        torch.func.jvp(lambda x: layer(x)[0], (torch.randn(40, 6),), (torch.randn(40, 6),))

    def test_in_a_backward_pass(self, gpu):
        layer, x = fp32_layer(), torch.randn(40, 6)
        y = x.clone().requires_grad_()
        y.register_hook(lambda grad: self.check(gpu, layer, x))
        y.sum().backward()
        assert gpu.forms

    @pytest.mark.parametrize("kernels", ["triton", "grouped", "torch"])
    def test_of_a_forced_form(self, kernels, gpu):
        form = "reference" if kernels == "torch" else kernels
        assert gpu.used(fp32_layer(kernels=kernels), torch.randn(40, 6)) == f"ffn.{form}"


def test_a_device_with_one_form_is_not_measured(gpu, monkeypatch):
    monkeypatch.setattr(fastest, "_both_run", lambda shapes: False)
    assert gpu.used(fp32_layer(), torch.randn(40, 6)) == "ffn.triton"
    assert gpu.timed == []
    assert measured_forms() == {}


@pytest.mark.parametrize("known", [True, False])
def test_a_captured_pass_uses_a_known_form(known, gpu):
    layer, x = fp32_layer(), torch.randn(40, 6)
    if known:
        layer(x)
    gpu.is_capturing = True
    assert gpu.used(layer, x) == ("ffn.grouped" if known else "ffn.triton")


def test_a_known_form_is_not_used_where_another_time_is_measured(gpu):
    """Otherwise a layer of the same class that is measured before this one's backward pass would
    change the form of its recomputed pass."""
    layer, x = fp32_layer(), torch.randn(40, 6)
    layer(x)
    with without_measuring():
        assert gpu.used(layer, x) == "ffn.triton"
    assert gpu.used(layer, x) == "ffn.grouped"


@pytest.mark.parametrize(("purpose", "measures"), [("timed", False), ("watched", True)])
def test_timed_trials_of_strategies_do_not_measure_forms(purpose, measures, gpu, monkeypatch):
    class Trial:
        def begin(self, tokens):
            return tokens

        def end(self, y):
            return y

    layer = fp32_layer()
    exchange, trial = layer._exchange_of(layer.strategy), Trial()
    trial.purpose = purpose
    monkeypatch.setattr(type(layer), "_exchange_of", lambda *arguments: None)
    monkeypatch.setattr(type(layer), "_choose", lambda *arguments: (exchange, trial))
    layer(torch.randn(40, 6))
    assert bool(gpu.timed) == measures


def test_a_measurement_that_fails_costs_one_line(gpu, monkeypatch, caplog, tmp_path):
    def milliseconds(work):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(fastest, "_milliseconds", milliseconds)
    layer, x = fp32_layer(), torch.randn(40, 6)
    for _ in range(2):
        assert gpu.used(layer, x) == "ffn.triton"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().endswith(
        ": triton, since measuring failed: OutOfMemoryError: CUDA out of memory. Tried to allocate"
    )
    assert list(tmp_path.iterdir()) == []


# The file


def new_process() -> None:
    fastest._chosen.clear()


def test_a_choice_is_kept_for_the_same_device_and_versions(gpu, caplog):
    caplog.set_level(logging.INFO, "moe_core")
    layer, x = fp32_layer(), torch.randn(40, 6)
    layer(x)
    count = len(gpu.timed)
    new_process()
    gpu.times["grouped"] = 5.0
    assert gpu.used(layer, x) == "ffn.grouped"
    assert len(gpu.timed) == count
    assert caplog.messages[-1].endswith(": grouped, measured before")
    assert list(measured_forms().values()) == ["grouped, measured before"]
    new_process()
    gpu.name = "GPU with another driver"
    assert gpu.used(layer, x) == "ffn.triton"
    assert len(gpu.timed) == 2 * count
    new_process()
    gpu.name = "GPU"
    assert gpu.used(layer, x) == "ffn.grouped"
    assert len(gpu.timed) == 2 * count


def test_always_measures_in_each_process(gpu, monkeypatch):
    layer, x = fp32_layer(), torch.randn(40, 6)
    layer(x)
    monkeypatch.setenv("MOE_CORE_VERIFY", "always")
    gpu.times["grouped"] = 5.0
    new_process()
    assert gpu.used(layer, x) == "ffn.triton"
    monkeypatch.setenv("MOE_CORE_VERIFY", "1")
    new_process()
    assert gpu.used(layer, x) == "ffn.grouped"


def test_triton_is_kept_too(gpu):
    layer, x = fp32_layer(), torch.randn(40, 6)
    gpu.times["grouped"] = 5.0
    layer(x)
    new_process()
    gpu.times["grouped"] = 1.0
    assert gpu.used(layer, x) == "ffn.triton"


NAME = "moe_ffn of 64 rows, float32, weights float32, gelu, training, E=4 M=6 H=10 K=1"
CONTENTS = {
    "empty": b"",
    "cut": f'{{"GPU": ["{NAME}: gro'.encode(),
    "not UTF-8": b"\xff\xfe\x00",
    "a list": f'["{NAME}: triton"]'.encode(),
    "no lists": f'{{"GPU": "{NAME}: triton"}}'.encode(),
    "other values": f'{{"GPU": [["{NAME}: triton"], null, {{"{NAME}": "triton"}}]}}'.encode(),
    "an unknown form": f'{{"GPU": ["{NAME}: os.system", "{NAME}"]}}'.encode(),
    "deep": b"[" * 60_000,
    "large": f'{{"GPU": ["{NAME}: triton"]'.encode() + b" " * 70_000 + b"}",
    "of another device": f'{{"GPU 2": ["{NAME}: triton"]}}'.encode(),
}


def test_the_file_of_these_tests_is_believed(gpu, tmp_path):
    (tmp_path / fastest._FILE).write_text(f'{{"GPU": ["{NAME}: triton"]}}')
    assert gpu.used(fp32_layer(), torch.randn(40, 6)) == "ffn.triton"
    assert gpu.timed == []


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_damaged_or_foreign_file_is_not_believed_and_is_replaced(content, gpu, tmp_path):
    file = tmp_path / fastest._FILE
    file.write_bytes(content)
    assert gpu.used(fp32_layer(), torch.randn(40, 6)) == "ffn.grouped"
    assert gpu.timed
    assert f"{NAME}: grouped" in json.loads(file.read_text())["GPU"]
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_read_or_written_costs_a_measurement(gpu, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / fastest._FILE)  # reading one would wait for ever
    assert gpu.used(fp32_layer(), torch.randn(40, 6)) == "ffn.grouped"
    monkeypatch.setattr(triton.knobs.cache, "dir", "/proc/nowhere")
    new_process()
    assert gpu.used(fp32_layer(), torch.randn(40, 6)) == "ffn.grouped"


def test_the_file_stays_small(gpu, tmp_path):
    for number in range(300):
        verify.keep(fastest._FILE, f"GPU {number // 150}", f"{number} {'x' * 400}")
    file = tmp_path / fastest._FILE
    assert file.stat().st_size <= verify._MAX_BYTES
    (names,) = json.loads(file.read_text()).values()
    assert [int(name.split()[0]) for name in names] == list(range(172, 300))


# The grouped form


@pytest.mark.parametrize("options", [{"capacity_factor": 0.6}, {"capacity_factor": 0.0}], ids=str)
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_the_grouped_form_equals_plain_torch(gated, top_k, options, gpu):
    """Output and every gradient in fp64, with dropped tokens and with an expert without any."""
    if gated:
        options = options | {"activation": "silu"}
    layer = make_layer(gated=gated, top_k=top_k, kernels="grouped", **options)
    with torch.no_grad():
        layer.router.weight[2] = -layer.router.weight.sum(0)
    assert_equal_to_plain(layer, torch.randn(11, 6, dtype=torch.float64))
    assert "ffn.grouped" in gpu.forms


def test_measured_layers_give_the_same_result(gpu):
    layer, plain = make_layer(top_k=2), make_layer(top_k=2, kernels="torch")
    x = torch.randn(30, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], plain(x)[0])
    assert gpu.timed
    assert_equal_to_plain(layer, x)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("fault", "named"), [(False, "^$"), (True, "of b1 .* is off by")])
def test_the_grouped_form_is_checked_before_its_first_use(fault, named, monkeypatch):
    if fault:
        bias_grad = grouped.bias_grad

        def wrong(grad, offsets):
            return bias_grad(grad, offsets) * (1.2 if grad.dtype == BF16 else 1.0)

        monkeypatch.setattr(grouped, "bias_grad", wrong)
    found = verify._fault(Checked("ffn.grouped", BF16, "gelu", "cpu", 0))
    assert re.search(named, found)


# Forced, and where it does not run


@pytest.fixture
def cuda(monkeypatch):
    """A device type on which Triton runs, of compute capability 9.0."""
    monkeypatch.setattr(backend, "_triton_obstacle", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backend, "_verdicts", {})
    backend._languages.cache_clear()
    yield
    backend._languages.cache_clear()


def on_cuda(kernels: str, dtype=BF16, operation="ffn", activation="gelu") -> str:
    return select(operation, Request(kernels, "cuda", dtype, dtype, activation=activation))


@pytest.mark.usefixtures("cuda")
def test_grouped_forces_the_experts_products_alone():
    assert on_cuda("grouped") == "ffn.grouped"
    assert on_cuda("grouped", torch.float32) == "ffn.triton"
    assert on_cuda("grouped", activation="mine") == "ffn.reference"
    for operation in ("route", "plan", "combine"):
        assert on_cuda("grouped", operation=operation) == f"{operation}.triton"
    assert on_cuda("auto") == "ffn.triton"
    assert on_cuda("triton") == "ffn.triton"


@pytest.mark.usefixtures("cuda")
def test_a_wrong_grouped_form_is_replaced(monkeypatch):
    monkeypatch.setattr(verify, "verdict", lambda checked: checked.form != "ffn.grouped")
    assert on_cuda("grouped") == "ffn.triton"
    shapes = fastest.ShapeClass("moe_ffn", 8, 2, 4, 4, 1, BF16, BF16, "gelu", False, False, True, 0)
    assert not fastest._both_run(shapes)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("capability", "runs"), [((9, 0), True), ((8, 0), False)])
def test_both_forms_run_on_some_devices(capability, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    shapes = fastest.ShapeClass("moe_ffn", 8, 2, 4, 4, 1, BF16, BF16, "gelu", False, False, True, 0)
    assert fastest._both_run(shapes) == runs


@pytest.mark.usefixtures("cuda")
def test_ranks_agree_on_a_forced_form(caplog):
    """It fails on another rank, which uses Triton instead."""
    requests = {
        operation: Request("grouped", "cuda", BF16, BF16, activation="gelu")
        for operation in ("route", "ffn")
    }
    agree_on_kernels(requests, lambda missing: missing)
    assert on_cuda("grouped") == "ffn.grouped"
    agree_on_kernels(requests, lambda missing: [0, 1])
    assert on_cuda("grouped") == "ffn.triton"
    assert caplog.messages == [
        "moe_core kernels: the form ffn.grouped bfloat16 gelu is not used, since another rank of"
        " the group does not use it"
    ]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("device", "capability", "reason"),
    [
        ("cpu", (9, 0), "alone"),
        ("cuda", (8, 0), r"alone, this one has 8\.0"),
    ],
)
def test_grouped_where_it_does_not_run(device, capability, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    with pytest.raises(
        ValueError,
        match=rf"^kernels \('grouped'\) cannot run on device type '{device}': F\.grouped_mm has"
        rf" kernels for CUDA devices of compute capability 9\.0 and 10\.0 {reason}$",
    ):
        backend.check_kernels("grouped", device)
    backend.check_kernels("grouped", "meta")
