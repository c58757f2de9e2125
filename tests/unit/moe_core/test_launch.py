"""Direct launches of Triton kernels: a compiled kernel runs exactly where Triton would run it, with
the same arguments, and what is not plain goes through Triton. Recorded launches only say which
kernels to compile."""

import importlib
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import triton_cases
from triton_cases import INTERPRETED, StubDriver

from moe_core import MoEConfig, MoELayer, compile_ahead
from moe_core.ops import backend

triton = pytest.importorskip("triton")
tl = triton.language
launch = pytest.importorskip("moe_core.ops.launch")
verify = pytest.importorskip("moe_core.ops.verify")
CachedKernel, cached_launch = launch.CachedKernel, launch.cached_launch

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter has no launches"),
    pytest.mark.skipif(not launch._IS_KNOWN, reason="this version of Triton launches itself"),
]
FORMS = ("route.triton", "route.loss_triton", "plan.triton", "combine.triton", "ffn.triton")
ATTENTION = "swinv2_moe.models.triton_window_attention"
FACTOR = tl.constexpr(2)


@cached_launch
@triton.jit(do_not_specialize=["size"])
def double(source, target, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, place < size) * FACTOR, place < size)


@cached_launch
@triton.jit
def with_specialised_size(source, target, size, BLOCK: tl.constexpr):
    pass


def cached_kernels() -> list:
    names = [*(f"moe_core.ops.{form}" for form in FORMS), ATTENTION]
    modules = [importlib.import_module(name) for name in names]
    named = {name: value for module in modules for name, value in vars(module).items()}
    found = [value for value in named.values() if isinstance(value, CachedKernel)]
    return [*found, double, with_specialised_size]


def forget() -> None:
    for kernel in cached_kernels():
        kernel.kernel.device_caches.clear()
        kernel._compiled.clear()


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


@pytest.fixture
def no_launch_by_triton(monkeypatch):
    """A function; after it is called, a launch by Triton is an error."""

    def refuse(self, *arguments, **options):
        raise AssertionError(f"Triton launches {self.__name__}")

    return lambda: monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", refuse)


def handles(driver: StubDriver, kernel, arguments: tuple, **options) -> list[int]:
    """Of the kernels that Triton and two direct launches of these arguments run."""
    start = len(driver.launched)
    kernel.kernel[(3,)](*arguments, **options)
    kernel[(3,)](*arguments, **options)
    kernel[(3,)](*arguments, **options)
    first, *others = driver.launched[start:]
    for other in others:
        assert other._replace(arguments=()) == first._replace(arguments=())
        pairs = zip(other.arguments, first.arguments, strict=True)
        assert all(argument is expected for argument, expected in pairs)
    return [launched.function for launched in driver.launched[start:]]


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
def test_other_kernels_for_other_arguments(driver, arguments):
    plain = handles(driver, double, PLAIN)
    assert plain == [1, 1, 1]
    assert handles(driver, double, arguments) == [2, 2, 2]
    assert handles(driver, double, PLAIN) == plain


def test_one_kernel_for_what_triton_does_not_compile_for(driver, no_launch_by_triton):
    assert handles(driver, double, PLAIN) == [1, 1, 1]
    no_launch_by_triton()
    for size in (1, 16, 61, 0, 2**31 - 1):
        double[(3,)](Y, X[16:], size, 16)
    assert [launched.arguments[2] for launched in driver.launched[-5:]] == [1, 16, 61, 0, 2**31 - 1]
    assert {launched.function for launched in driver.launched} == {1}


def test_numbers_that_triton_specialises(driver):
    found = [handles(driver, with_specialised_size, (X, Y, size, 16))[0] for size in (1, 16, 17)]
    assert found == [1, 2, 3]


def test_other_kernels_for_other_options(driver):
    found = [handles(driver, double, PLAIN, num_warps=warps) for warps in (4, 8)]
    found.append(handles(driver, double, PLAIN, num_warps=8, num_stages=2))
    assert found == [[1] * 3, [2] * 3, [3] * 3]


def test_another_device_has_its_kernel_and_stream(driver):
    handles(driver, double, PLAIN)
    driver.device = 1
    assert handles(driver, double, PLAIN) == [2, 2, 2]
    assert driver.launched[-1].stream == driver.get_current_stream(1)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_launches(driver, name):
    handles(driver, double, PLAIN)
    seen: list[str] = []

    def see(metadata) -> None:
        seen.append(metadata.get()["name"])

    hooks = getattr(triton.knobs.runtime, name)
    hooks.add(see)
    try:
        double[(3,)](*PLAIN)
    finally:
        hooks.remove(see)
    assert seen == ["double"]
    double[(3,)](*PLAIN)
    assert seen == ["double"]


def test_hook_before_each_run(driver, monkeypatch):
    handles(driver, double, PLAIN)
    seen: list[tuple] = []
    hook = [lambda *arguments, **options: seen.append(arguments)]
    monkeypatch.setattr(double.kernel, "pre_run_hooks", hook)
    double[(3,)](*PLAIN)
    assert len(seen) == 1


def test_debug_mode_is_a_specialisation(driver, monkeypatch):
    handles(driver, double, PLAIN)
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    assert handles(driver, double, PLAIN) == [2, 2, 2]


def test_changed_global_constant_is_triton_s_error(driver, monkeypatch):
    assert double.kernel.cache_key  # reads the constants, as compilation does
    handles(driver, double, PLAIN)
    monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(3))
    with pytest.raises(RuntimeError, match="Global variable FACTOR has changed"):
        double[(3,)](*PLAIN)


def test_other_versions_of_triton_launch_themselves(monkeypatch):
    monkeypatch.setattr(launch, "_IS_KNOWN", False)
    assert cached_launch(double.kernel) is double.kernel


def test_other_makers_kernels_are_launched_by_triton(driver, monkeypatch):
    target = triton.backends.compiler.GPUTarget("hip", "gfx942", 64)
    compiled = object.__new__(triton.compiler.CompiledKernel)
    compiled.metadata = SimpleNamespace(target=target)
    assert not launch._is_for_nvidia(compiled)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1, "capacity_factor": 0.0},
        {"top_k": 2, "capacity_factor": 1.25, "gated": True, "hidden_dropout": 0.1},
        {"top_k": 2, "capacity_factor": 0.0, "aux_loss": "load_importance", "gate_noise": 1.0},
    ],
    ids=["one choice", "gated", "noise"],
)
def test_layer(driver, no_launch_by_triton, monkeypatch, options):
    """A layer's launches are direct from the second step on, and equal Triton's."""
    monkeypatch.setenv("MOE_CORE_VERIFY", "0")
    monkeypatch.setattr(backend, "_triton_obstacle", lambda device: None)
    monkeypatch.setattr(backend, "_verdicts", {})
    backend._languages.cache_clear()
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(16, 32, 4, kernels="triton", **options))
    try:
        with monkeypatch.context() as triton_alone:
            by_triton = lambda kernel, grid: kernel.kernel[grid]  # noqa: E731
            triton_alone.setattr(CachedKernel, "__getitem__", by_triton)
            expected = launches_of_a_step(driver, layer)
        assert launches_of_a_step(driver, layer) == expected
        no_launch_by_triton()
        assert launches_of_a_step(driver, layer) == expected
    finally:
        backend._languages.cache_clear()


def launches_of_a_step(driver: StubDriver, layer: MoELayer) -> list[tuple]:
    driver.launched.clear()
    x = torch.ones(32, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, aux_loss = layer(x)
    (y.sum() + aux_loss).backward()
    return [
        launched._replace(arguments=tuple(map(description, launched.arguments)))
        for launched in driver.launched
    ]


def description(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.shape, argument.data_ptr() % 16
    return type(argument), argument


def test_window_attention(driver, no_launch_by_triton):
    attention = importlib.import_module(ATTENTION)
    qkv, bias = torch.zeros(8, 16, 3, 2, 16, dtype=torch.bfloat16), torch.zeros(2, 16, 16)

    def step() -> None:
        arguments = (qkv, bias, None, torch.ones(2))
        out, lse = attention.forward(*arguments, True)
        attention.backward(out, *arguments, out, lse, True)

    step()
    no_launch_by_triton()
    step()
    names = ["_forward_kernel", "_backward_queries_kernel", "_backward_keys_kernel"]
    assert [launched.name for launched in driver.launched] == 2 * names


def test_recorded_launches_only_say_what_to_compile(driver, no_launch_by_triton):
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


def test_no_kernel_of_a_check_is_compiled_by_its_launch(triton_on_cpu, monkeypatch):
    """The passes that are recorded launch the same kernels as those that run."""
    compiled: list[str] = []
    compile = triton.compiler.compile

    def counted(source, **options):
        compiled.append(source.name)
        return compile(source, **options)

    monkeypatch.setattr(triton.compiler, "compile", counted)
    for form, number in (("route", 8), ("plan", 5), ("combine", 4), ("ffn", 35)):
        request = backend.Request("triton", "cpu", torch.bfloat16, activation="gelu")
        checked = backend.Checked.of(f"{form}.triton", request)

        def check(checked=checked) -> None:
            list(verify.results_of(checked, "triton"))

        before = len(compiled)
        assert launch.compile_ahead(check) == number
        assert len(compiled) > before
        before = len(compiled)
        triton_on_cpu.launched.clear()
        with suppress(Exception):  # of indices that no kernel has written
            check()
        assert len(triton_on_cpu.launched) >= 4
        assert len(compiled) == before
