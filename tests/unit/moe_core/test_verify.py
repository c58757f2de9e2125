"""A wrong Triton kernel is noticed at its first use, named, and replaced; what passed is remembered
for this device and these versions alone.

`TestKernels` runs in Triton's interpreter, in a process that `test_under_the_interpreter` starts.
"""

# T tokens, E experts, K top-k

import json
import os
import re

import pytest
import torch
from moe_cases import make_layer
from torch.utils._python_dispatch import TorchDispatchMode
from triton_cases import INTERPRETED, run_interpreted

from moe_core.ops import backend

triton = pytest.importorskip("triton")

from moe_core.ops import verify  # noqa: E402 - it imports triton

ROWS = backend.Checked("combine.triton", torch.bfloat16, None, "cuda", 0)


@pytest.fixture(autouse=True)
def nothing_checked_yet(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_CORE_VERIFY", "always")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    for form in verify._CASES:
        backend.load(form)  # before a launcher is replaced, which another form may import
    backend._verdicts.clear()
    backend._languages.cache_clear()
    yield
    backend._verdicts.clear()
    backend._languages.cache_clear()


def select(operation: str, dtype=torch.float32, **properties) -> str:
    return backend.select(operation, backend.Request("triton", "cpu", dtype, **properties))


def last_column_off_by_one(launch):
    def faulty(*arguments):
        out = launch(*arguments)
        out[:, -1] = out[:, -2]
        return out

    return faulty


def gates_swapped(launch):
    def faulty(inputs):
        if inputs.gates is not None and inputs.gates.shape[1] > 1:
            inputs = inputs._replace(gates=inputs.gates.flip(1))
        return launch(inputs)

    return faulty


def weight_row_not_written(launch):
    def faulty(inputs, *arguments):
        gradients = launch(inputs, *arguments)
        gradients[2][-1, -1] = torch.nan
        return gradients

    return faulty


def slot_not_written(launch):
    def faulty(*arguments):
        plan = launch(*arguments)
        plan[2][-1, -1] += 1
        return plan

    return faulty


def raises(launch):
    def faulty(*arguments):
        raise RuntimeError("out of resource: shared memory\nRequired: 300000")

    return faulty


def ties_to_the_last(launch):
    """The experts 1 and 3 change places where a token's logits of them are equal."""

    def faulty(x, weight, *arguments):
        results = launch(x, weight, *arguments)
        if weight is not None:
            logits = (x @ weight.T).unsqueeze(1)
            ids = results[1]
            is_tie = (logits[..., 1] == logits[..., 3]) & ((ids == 1) | (ids == 3))
            ids[is_tie] = 4 - ids[is_tie]
        return results

    return faulty


# operation, launcher, the fault, what the warning names
FAULTS = {
    "last column": (
        "combine", "dispatch_rows", last_column_off_by_one, r"combine float32 .* dispatch is off",
    ),
    "sums": ("combine", "sum_rows", last_column_off_by_one, r"combine float32 .* combine is off"),
    "swapped gates": ("ffn", "forward", gates_swapped, r"ffn float32 gelu .* y with K = 2 is off"),
    "row": (
        "ffn", "backward", weight_row_not_written, r"of w1 with K = 2 is off by nan .* allowed",
    ),
    "slot": ("plan", "make_plan", slot_not_written, r"plan int64 .* slots of a plan differs in 1 "),
    "launch": (
        "route", "forward", raises, r"RuntimeError: out of resource: shared memory \(cpu",
    ),
    "ties": ("route", "forward", ties_to_the_last, r"choice of a linear router differs in"),
}  # fmt: skip


class NoOperation(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(function)


class TestKernels:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("name", FAULTS)
    def test_a_wrong_kernel_is_named_and_replaced(self, name, monkeypatch, caplog):
        operation, launcher, fault, named = FAULTS[name]
        module = backend.load(f"{operation}.triton")
        monkeypatch.setattr(module, launcher, fault(getattr(module, launcher)))
        if operation != "ffn":  # which takes seconds
            monkeypatch.setitem(verify._CASES, "ffn.triton", lambda form: iter(()))
        config = {"top_k": 2, "capacity_factor": 1.0, "dtype": torch.float32}
        layer, plain = (make_layer(kernels=kernels, **config) for kernels in ("triton", "torch"))
        with torch.no_grad():
            layer.router.weight[3] = layer.router.weight[1]
        plain.load_state_dict(layer.state_dict())
        x = torch.randn(40, 6)
        for _ in range(2):  # steps of training
            results = []
            for each in (layer, plain):
                y, loss = each(x)
                (y.square().sum() + loss).backward()
                results.append([y, *(parameter.grad for parameter in each.parameters())])
                torch.optim.SGD(each.parameters(), 0.01).step()
            torch.testing.assert_close(*results)
        forms = [select(each, activation="gelu") for each in ("route", "plan", "combine", "ffn")]
        assert [form for form in forms if not form.endswith(".triton")] == [
            f"{operation}.reference"
        ]
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert f"the Triton form of {operation} " in record.getMessage()
        assert re.search(named, record.getMessage())
        assert "Please report" in record.getMessage()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
    def test_right_kernels_pass(self, dtype, caplog):
        operations = ["route", "plan", "combine"]
        if dtype != torch.float64:
            operations.append("ffn")
        for operation in operations:
            form = select(operation, dtype, activation="silu")
            assert form == f"{operation}.triton"
        assert caplog.messages == []

    def test_the_state_of_the_caller_does_not_matter(self, caplog):
        """Inference mode, autocast, a mode of dispatch such as that of fake tensors, hooks of saved
        tensors, and random numbers."""
        state = torch.get_rng_state()
        with (
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: 1 / 0),
            NoOperation(),
        ):
            assert select("combine") == "combine.triton"
            assert select("route") == "route.triton"
        assert torch.equal(torch.get_rng_state(), state)
        assert len(backend._verdicts) == 2
        assert caplog.messages == []

    def test_a_compiled_layer_is_checked_when_it_is_traced(self, monkeypatch, caplog):
        module = backend.load("combine.triton")
        monkeypatch.setattr(module, "sum_rows", raises(None))
        monkeypatch.setitem(verify._CASES, "ffn.triton", lambda form: iter(()))
        layer = make_layer(kernels="triton", dtype=torch.float32)
        torch.compile(layer, backend="eager")(torch.randn(9, 6))
        assert select("combine") == "combine.reference"
        assert len([each for each in caplog.records if each.name == "moe_core"]) == 1

    def test_within_forward_mode_nothing_is_decided(self):
        with torch.autograd.forward_ad.dual_level():
            assert select("combine") == "combine.triton"
        assert backend._verdicts == {}
        torch.func.vmap(lambda x: select("combine") and x)(torch.zeros(2))
        assert list(backend._verdicts.values()) == [True]

    def test_1_leaves_the_interpreter_unchecked(self, monkeypatch):
        monkeypatch.setenv("MOE_CORE_VERIFY", "1")
        monkeypatch.setattr(verify, "_fault", lambda checked: "planted")
        assert select("combine") == "combine.triton"


@pytest.mark.skipif(INTERPRETED, reason="starts it")
@pytest.mark.timeout(1260)  # on a busy machine
def test_under_the_interpreter():
    run_interpreted(__file__)


# What is remembered


class Device:
    """Stands for a GPU: counts the checks, each of which gives `fault`."""

    def __init__(self, monkeypatch) -> None:
        self.fault, self.checks, self.driver = "", 0, "580.1"
        monkeypatch.setenv("MOE_CORE_VERIFY", "1")
        monkeypatch.setattr(verify, "_fault", self.check)
        monkeypatch.setattr(verify, "device_name", lambda checked: f"GPU, driver {self.driver}")
        monkeypatch.setattr(verify, "_driver", lambda: self.driver)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def check(self, checked: backend.Checked) -> str:
        self.checks += 1
        return self.fault

    def verdicts(self, *checked: backend.Checked) -> tuple[list[bool | None], int]:
        """Verdicts of a new process, and how many checks it made."""
        before = self.checks
        return [verify.verdict(each) for each in checked or (ROWS,)], self.checks - before


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def test_a_passed_check_is_not_repeated_on_the_same_device_and_versions(device, monkeypatch):
    assert device.verdicts() == ([True], 1)
    assert device.verdicts() == ([True], 0)
    fp16 = ROWS._replace(dtype=torch.float16)
    assert device.verdicts(fp16, ROWS) == ([True, True], 1)
    device.driver = "590.0"
    assert device.verdicts() == ([True], 1)
    device.driver = "580.1"
    assert device.verdicts(fp16, ROWS) == ([True, True], 0)
    monkeypatch.setenv("MOE_CORE_VERIFY", "always")
    assert device.verdicts() == ([True], 1)
    monkeypatch.setenv("MOE_CORE_VERIFY", "0")
    assert device.verdicts(ROWS._replace(activation="relu")) == ([True], 0)


def test_a_failure_is_found_again_by_each_process(device):
    device.fault = "dispatch is off by 1"
    assert device.verdicts() == ([False], 1)
    assert device.verdicts() == ([False], 1)
    device.fault = ""
    assert device.verdicts() == ([True], 1)


def test_results_depend_on_device_and_versions(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda ordinal: (9, ordinal))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda ordinal: "NVIDIA H100")
    name = verify.device_name(ROWS)
    assert name.startswith("NVIDIA H100, capability 9.0, driver ")
    assert f"torch {torch.__version__}, triton {triton.__version__}, sources " in name
    assert verify.device_name(ROWS._replace(ordinal=1)) == name.replace("9.0", "9.1")


def test_nothing_is_kept_for_an_unknown_driver(device, tmp_path):
    device.driver = None
    assert device.verdicts() == ([True], 1)
    assert device.verdicts() == ([True], 1)
    assert list(tmp_path.iterdir()) == []


CONTENTS = {
    "empty": b"",
    "cut": b'{"GPU, driver 580.1": ["combine bfl',
    "not UTF-8": b"\xff\xfe\x00",
    "a list": b'["GPU, driver 580.1"]',
    "no lists": b'{"GPU, driver 580.1": "combine bfloat16"}',
    "other values": b'{"GPU, driver 580.1": [{"combine bfloat16": 1}, null]}',
    "deep": b"[" * 60_000,
    "large": b'{"GPU, driver 580.1": ["combine bfloat16"]' + b" " * 70_000 + b"}",
    "of another device": b'{"GPU, driver 1": ["combine bfloat16"]}',
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_damaged_or_foreign_file_is_not_believed_and_is_replaced(content, device, tmp_path):
    file = tmp_path / "moe_core_checks.json"
    file.write_bytes(content)
    assert device.verdicts() == ([True], 1)
    assert device.verdicts() == ([True], 0)
    assert ROWS.name in json.loads(file.read_text())["GPU, driver 580.1"]
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_read_or_written_costs_a_check(device, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "moe_core_checks.json")  # reading one would wait for ever
    assert device.verdicts() == ([True], 1)
    monkeypatch.setattr(triton.knobs.cache, "dir", "/proc/nowhere")
    assert device.verdicts() == ([True], 1)
    assert device.verdicts() == ([True], 1)


def test_the_file_stays_small(device, tmp_path):
    for version in range(40):
        device.driver = str(version)
        assert device.verdicts() == ([True], 1)
    kept = json.loads((tmp_path / "moe_core_checks.json").read_text())
    assert list(kept) == [f"GPU, driver {version}" for version in range(8, 40)]


@pytest.mark.parametrize("value", ["2", "yes", "Always"])
def test_another_value_of_the_variable(value, monkeypatch):
    monkeypatch.setenv("MOE_CORE_VERIFY", value)
    with pytest.raises(
        ValueError, match=rf"^MOE_CORE_VERIFY \('{value}'\) must be 0, 1 or always$"
    ):
        make_layer(dtype=torch.float32)(torch.zeros(2, 6))


@pytest.mark.parametrize(
    ("value", "dtype", "named"),
    [
        (torch.tensor([1.0, -0.3, 0.2 + 2e-5]), torch.float32, "^$"),
        (torch.tensor([1.0, -0.3, 0.2 + 5e-5]), torch.float32, r"off by 5e-05 .* 3\.1e-05 is"),
        (torch.tensor([1.0, -0.3, 0.25]), torch.bfloat16, "^$"),
        (torch.tensor([1.0, -0.3, 0.3]), torch.bfloat16, r"is off by 0\.1 .* 0\.063 is allowed"),
        (torch.tensor([1.0, -0.3, torch.nan]), torch.float16, "is off by nan"),
        (torch.zeros(2), torch.float32, r"has shape \[2\], not \[3\]"),
    ],
)
def test_what_rounding_explains(value, dtype, named):
    difference = verify._difference(value, torch.tensor([1.0, -0.3, 0.2]).double(), dtype)
    assert re.search(named, difference)


def test_no_memory_says_nothing_about_a_form(monkeypatch):
    def no_memory(form):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(verify._CASES, "combine.triton", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        verify.verdict(ROWS._replace(device="cpu"))


def test_nothing_is_decided_while_a_graph_is_captured(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert device.verdicts() == ([None], 0)
