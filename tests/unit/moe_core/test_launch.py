"""Recorded launches of Triton kernels only say which kernels to compile: those that they need."""

import importlib
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import triton_cases
from triton_cases import INTERPRETED, StubDriver

from moe_core import MoEConfig, MoELayer, compile_ahead

triton = pytest.importorskip("triton")
tl = triton.language
launch = pytest.importorskip("moe_core.ops.launch")
verify = pytest.importorskip("moe_core.ops.verify")
recordable = launch.recordable

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter has no launches"),
    pytest.mark.skipif(not launch._IS_KNOWN, reason="this version of Triton launches itself"),
]
FORMS = ("route.triton", "route.loss_triton", "plan.triton", "combine.triton", "ffn.triton")
DTYPES = {"route": torch.float32, "plan": torch.int64}
FACTOR = tl.constexpr(2)


@recordable
@triton.jit(do_not_specialize=["size"])
def double(source, target, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, place < size) * FACTOR, place < size)


def forget() -> None:
    modules = [importlib.import_module(f"moe_core.ops.{form}") for form in FORMS]
    found = [value for module in modules for value in vars(module).values()]
    for kernel in [*found, double]:
        if isinstance(kernel, launch.RecordableKernel):
            kernel.kernel.device_caches.clear()


@pytest.fixture
def driver(monkeypatch):
    """Of a GPU that is not here. Kernels are not compiled, and have handles of their own."""
    found = StubDriver()

    def compile(source, target, options, **_):
        compiled = object.__new__(triton.compiler.CompiledKernel)
        compiled.name, compiled.src = source.name, source
        compiled.metadata, compiled.packed_metadata = SimpleNamespace(target=target), (4, 1, 0)
        _, compiled.function, *_ = found.load_binary()
        compiled.module, compiled._run = 1, found.launcher_cls(source, None)
        return compiled

    monkeypatch.setattr(triton.runtime.driver, "_active", found)
    monkeypatch.setattr(triton.compiler, "compile", compile)
    monkeypatch.setattr(triton.compiler.compiler, "compile", compile)
    forget()
    yield found
    forget()


X, Y = torch.ones(64), torch.empty(64)
PLAIN = (X, Y, 60, 16)
SPECIALISATIONS = {
    "another dtype": (X.double(), Y, 60, 16),
    "a misaligned pointer": (X[2:], Y, 60, 16),
    "another misaligned pointer": (X, Y[3:], 60, 16),
    "no pointer": (None, Y, 60, 16),
    "a number of 64 bits": (X, Y, 2**31, 16),
    "a negative number of 64 bits": (X, Y, -(2**31) - 1, 16),
    "a number that is no integer": (X, Y, 60.0, 16),
    "another constant": (X, Y, 60, 32),
}


@pytest.mark.parametrize("arguments", SPECIALISATIONS.values(), ids=SPECIALISATIONS)
def test_each_specialisation_is_compiled(driver, arguments):
    """And each once: launches compile no other kernel."""

    def work() -> None:
        for size in (60, 61):  # one kernel for both
            double[(3,)](X.clone(), Y.clone(), size, 16)
        double[(3,)](*arguments)

    assert launch.compile_ahead(work) == 2
    compiled = dict(double.kernel.device_caches[0][0])
    assert len(compiled) == 2
    double[(3,)](*PLAIN)
    double[(3,)](*arguments)
    assert double.kernel.device_caches[0][0].keys() == compiled.keys()
    assert len({launched.function for launched in driver.launched}) == 2


def test_options_are_a_specialisation(driver):
    def work() -> None:
        for warps in (4, 8, 8):
            double[(3,)](*PLAIN, num_warps=warps)

    assert launch.compile_ahead(work) == 2


def test_other_versions_of_triton_launch_themselves(monkeypatch):
    monkeypatch.setattr(launch, "_IS_KNOWN", False)
    assert recordable(double.kernel) is double.kernel


def test_recorded_launches_only_say_what_to_compile(driver):
    def work() -> None:
        for size in (60, 61):  # one kernel for both
            double[(3,)](source, target, size, 16)
        double[(3,)](source, target, 60, 32)
        double[(3,)](source[1:], target, 60, 16)  # as Triton alone would launch it
        launch.compile_ahead(lambda: double[(3,)](source, target, 60, 64))  # within another
        assert target.sum() == source.sum() == 0  # an index from it would be valid
        raise RuntimeError("the rest of the work")

    source, target = torch.ones(64), torch.full((64,), torch.nan)
    assert launch.compile_ahead(work) == 3
    assert driver.launched == []
    assert not launch._recorded
    compiled = len(double.kernel.device_caches[0][0])
    assert compiled == 4
    for block in (16, 32, 64):
        double[(3,)](source, target, 60, block)
    assert len(driver.launched) == 3
    assert len(double.kernel.device_caches[0][0]) == compiled


def test_another_thread_launches_while_one_is_recorded(driver):
    def work() -> None:
        double[(3,)](*PLAIN)
        thread = threading.Thread(target=lambda: double[(5,)](*PLAIN))
        thread.start()
        thread.join()

    assert launch.compile_ahead(work) == 1
    assert [launched.grid for launched in driver.launched] == [(5, 1, 1)]


def test_a_kernel_that_does_not_compile_is_left_to_its_launch(driver, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(triton.compiler, "compile", fail)
    assert launch.compile_ahead(lambda: double[(3,)](*PLAIN)) == 1
    with pytest.raises(RuntimeError, match="no such instruction"):
        double[(3,)](*PLAIN)


def test_an_interrupt_does_not_wait_for_kernels_in_the_queue(driver, monkeypatch):
    begun = []

    def interrupt(futures) -> None:
        raise KeyboardInterrupt

    def compile_slowly(number: int) -> None:
        begun.append(number)
        released.wait(60)

    released = threading.Event()
    monkeypatch.setattr(launch, "_cores", lambda: 1)
    monkeypatch.setattr(launch, "wait", interrupt)
    pool = launch.ThreadPoolExecutor
    shutdown = pool.shutdown

    def release_and_shut_down(self, *arguments, **options) -> None:
        shutdown(self, *arguments, **options)  # what has not begun is cancelled
        released.set()

    monkeypatch.setattr(pool, "shutdown", release_and_shut_down)
    with pytest.raises(KeyboardInterrupt):
        launch.compile_together([lambda n=n: compile_slowly(n) for n in range(5)])
    assert begun in ([], [0])


def test_a_tensor_that_is_protected_stays_as_it_is(driver):
    source = torch.ones(64)
    address = source.untyped_storage().data_ptr()

    def work() -> None:
        double[(3,)](X.clone(), Y.clone(), 60, 16)
        double[(3,)](source[16:], Y.clone(), 60, 32)
        double[(3,)](X.clone(), Y.clone(), 60, 64)

    assert launch.compile_ahead(work, [address]) == 1
    assert source.sum() == 64


def test_where_launches_cannot_be_recorded_nothing_runs(monkeypatch):
    monkeypatch.setattr(launch, "_IS_KNOWN", False)
    ran = []
    assert launch.compile_ahead(lambda: ran.append(1)) == 0
    assert ran == []
    with pytest.raises(RuntimeError, match=r"the launches of triton .* cannot be recorded"):
        launch.recorded_launches().__enter__()


@pytest.fixture
def triton_on_cpu(driver, monkeypatch):
    with triton_cases.triton_on_cpu(monkeypatch):
        yield driver


def test_a_model_stays_as_it_is(triton_on_cpu):
    layer = MoELayer(MoEConfig(16, 32, 4, gate_noise=1.0, kernels="triton"))
    layer.router.weight.grad = torch.ones_like(layer.router.weight)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    state = torch.get_rng_state()
    number = compile_ahead(layer, lambda copy: copy(torch.zeros(48, 16))[0].sum().backward())
    assert number > 10
    assert triton_on_cpu.launched == []
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert layer.experts.w1.grad is None
    assert (layer.router.weight.grad == 1).all()


def test_a_copy_that_runs_the_model_itself_changes_nothing(triton_on_cpu, caplog):
    layer = MoELayer(MoEConfig(16, 32, 4, kernels="triton"))
    forward = layer.forward
    layer.forward = lambda *inputs: forward(*inputs)  # a closure is not copied
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with caplog.at_level("INFO", "moe_core"):
        compile_ahead(layer, lambda copy: copy(torch.zeros(48, 16))[0].sum().backward())
    assert "not all are compiled ahead: RuntimeError: a kernel got a tensor" in caplog.text
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_no_kernel_is_compiled_by_its_launch(triton_on_cpu, monkeypatch):
    """The passes that are recorded launch the same kernels as those that run."""
    compiled: list[str] = []
    compile = triton.compiler.compile

    def counted(source, **options):
        compiled.append(source.name)
        return compile(source, **options)

    monkeypatch.setattr(triton.compiler, "compile", counted)
    for operation, number in (("route", 8), ("plan", 5), ("combine", 4), ("ffn", 35)):
        checked = verify.Checked(operation, DTYPES.get(operation, torch.bfloat16), "gelu")

        def check(checked=checked) -> None:
            list(verify.results_of(checked, "triton", "cpu"))

        before = len(compiled)
        assert launch.compile_ahead(check) == number
        assert len(compiled) > before
        before = len(compiled)
        triton_on_cpu.launched.clear()
        with suppress(Exception):  # of indices that no kernel has written
            check()
        assert len(triton_on_cpu.launched) >= 4
        assert len(compiled) == before
