"""The check of Triton's kernels on a new card notices a wrong kernel and names the result.

`TestKernels` runs in Triton's interpreter, in a process that `test_under_the_interpreter` starts,
together with the few such tests of two other files.
"""

# T tokens, E experts, K top-k

import re
from pathlib import Path

import pytest
import torch
from triton_cases import INTERPRETED, run_interpreted

from moe_core.ops import backend
from moe_core.ops.backend import KERNEL_ACTIVATIONS

triton = pytest.importorskip("triton")

from moe_core.ops import verify  # noqa: E402 - it imports triton
from moe_core.ops.verify import CHECKS, Checked, check_forms, fault_of  # noqa: E402

DTYPES = {"plan": torch.int64}


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


# operation, launcher, the fault, what is named
FAULTS = {
    "last column": ("combine", "dispatch_rows", last_column_off_by_one, "^dispatch is off by"),
    "sums": ("combine", "sum_rows", last_column_off_by_one, "^combine is off by"),
    "swapped gates": ("ffn", "forward", gates_swapped, "^y with K = 2 is off"),
    "row": ("ffn", "backward", weight_row_not_written, "of w1 with K = 2 is off by nan .* allowed"),
    "slot": ("plan", "make_plan", slot_not_written, "^slots of a plan differs in 1 "),
    "launch": ("route", "forward", raises, "^RuntimeError: out of resource: shared memory$"),
    "ties": ("route", "forward", ties_to_the_last, "^choice of a linear router differs in"),
}


class TestKernels:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("name", FAULTS)
    def test_a_wrong_kernel_is_named(self, name, monkeypatch):
        operation, launcher, fault, named = FAULTS[name]
        module = backend.load(operation, "triton")
        monkeypatch.setattr(module, launcher, fault(getattr(module, launcher)))
        checked = Checked(operation, DTYPES.get(operation, torch.float32), "gelu")
        assert re.search(named, fault_of(checked, "cpu"))

    def test_right_kernels_pass(self, monkeypatch):
        checks = [Checked("route", torch.float32), Checked("plan", torch.int64)]
        checks += [Checked("combine", torch.float16), Checked("ffn", torch.float32, "silu")]
        monkeypatch.setattr(verify, "CHECKS", checks)
        assert dict(check_forms("cpu")) == dict.fromkeys((each.name for each in checks), "")


@pytest.mark.skipif(INTERPRETED, reason="starts it")
@pytest.mark.timeout(1260)  # on a busy machine
def test_under_the_interpreter():
    tests = Path(__file__).parents[2]
    others = ("unit/moe_core/test_host_work.py", "distributed/test_host_reads.py")
    run_interpreted(__file__, *(str(tests / other) for other in others))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(INTERPRETED, reason="on the device itself")
def test_all_forms_are_right_on_this_gpu():
    assert {name: fault for name, fault in check_forms() if fault} == {}


def test_every_form_of_triton_is_checked():
    forms = Path(verify.__file__).parent.glob("*/triton.py")
    assert {each.operation for each in CHECKS} == {form.parent.name for form in forms}
    assert {each.activation for each in CHECKS} == {None, *KERNEL_ACTIVATIONS}


def test_a_line_for_each_form(monkeypatch, capsys):
    faults = {"plan int64": "", "combine float32": "dispatch is off by 1"}
    monkeypatch.setattr(verify, "check_forms", lambda: faults.items())
    with pytest.raises(SystemExit, match=r"^1 of 17 forms are wrong; MoEConfig\(kernels="):
        verify.main()
    assert capsys.readouterr().out == "plan int64: right\ncombine float32: dispatch is off by 1\n"
    del faults["combine float32"]
    verify.main()


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="Triton can run")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match=r"^kernels \('triton'\) cannot run on .*: "):
        verify.main()


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

    monkeypatch.setitem(verify._CASES, "combine", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        fault_of(Checked("combine", torch.float32), "cpu")
