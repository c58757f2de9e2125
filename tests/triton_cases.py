"""What tests of GPU code share: CUDA graphs, a mended Triton interpreter, and compilation without a
GPU."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

# Of `torch.library.opcheck`: its fourth check compiles, which takes seconds under the interpreter.
CHEAP_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
# read when Triton is imported: for a whole process
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def captured(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `step`, after three steps to warm up, and what each replay writes its result
    to."""
    torch.cuda.synchronize()  # the stream below does not wait for what made the step's inputs
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


@contextlib.contextmanager
def no_reads_from_the_device() -> Iterator[None]:
    """Whatever makes the host wait for the device raises an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_interpreted(*files: str) -> None:
    """The tests of the files' TestKernels, in a process with Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    command += ["-k", "TestKernels"]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert outcome.returncode == 0, outcome.stdout[-5000:] + outcome.stderr[-2000:]


def _mend_interpreter() -> None:
    """Triton 3.6's cannot loop up to a number that a kernel has read, under numpy 2.4.

    numpy no longer makes an int of an array of one element that has a dimension (its 1.25 had
    announced it).
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


if INTERPRETED:
    _mend_interpreter()


def compile_launches(monkeypatch, architecture: int) -> dict:
    """From here on a launch compiles its kernel for this architecture of NVIDIA's, and the result
    is in the dict."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from moe_core.ops.launch import RecordableKernel

    compiled, target = {}, GPUTarget("cuda", architecture, 32)

    def launcher(function, grid):
        def launch(*arguments, num_warps=4, num_stages=3, **named):
            named |= dict(zip(function.arg_names, arguments, strict=False))
            options = {"num_warps": num_warps, "num_stages": num_stages}
            if "maxnreg" in named:
                options["maxnreg"] = named.pop("maxnreg")
            compiled[function.fn.__name__] = _compile(target, function, named, options)

        return launch

    monkeypatch.setattr(JITFunction, "__getitem__", launcher, raising=False)
    by_kernel = lambda self, grid: launcher(self.kernel, grid)  # noqa: E731
    monkeypatch.setattr(RecordableKernel, "__getitem__", by_kernel)
    return compiled


def _compile(target, function, arguments: dict, options: dict):
    """One launch's kernel, all of whose pointers are multiples of 16."""
    from triton.compiler import ASTSource, compile

    types = {
        torch.float32: "fp32",
        torch.float16: "fp16",
        torch.bfloat16: "bf16",
        torch.int64: "i64",
        torch.int32: "i32",
        torch.int16: "i16",
        torch.uint8: "u8",
    }
    signature, constants, hints = {}, {}, {}
    for i, parameter in enumerate(function.params):
        value = arguments[parameter.name]
        signature[parameter.name] = "i32"
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], hints[(i,)] = (
                "*" + types[value.dtype],
                [["tt.divisibility", 16]],
            )
    return compile(ASTSource(function, signature, constants, hints), target, options)


class Launch(NamedTuple):
    """What reached the launch of a compiled kernel."""

    name: str
    grid: tuple[int, ...]
    stream: int
    function: int  # handle of the loaded kernel
    arguments: tuple


class StubDriver:
    """Triton's driver of an H100 that is not here. Launches are noted."""

    def __init__(self) -> None:
        self.launched: list[Launch] = []
        self.utils = self
        self.device = 0
        self.num_loaded = 0

    def launcher_cls(self, source, metadata) -> Callable:
        def launch(x, y, z, stream, function, metadata, described, enter, leave, *arguments):
            for hook in (enter, leave):
                if hook is not None:  # as in C
                    hook(described)
            self.launched.append(Launch(source.name, (x, y, z), stream, function, arguments))

        return launch

    def load_binary(self, *args) -> tuple:
        self.num_loaded += 1
        return 1, self.num_loaded, 0, 0, 1024

    def get_device_properties(self, device) -> dict:
        return {"max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32}

    def unload_module(self, *args) -> None:
        pass

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device=0) -> int:
        return 7 + device

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextlib.contextmanager
def triton_on_cpu(monkeypatch) -> Iterator[None]:
    """Within it Triton's forms take a CPU's tensors, for a GPU of which `StubDriver` is the driver.
    Their results are meaningless."""
    from moe_core.ops import backend
    from moe_core.ops.ffn import triton as ffn

    monkeypatch.setattr(backend, "_triton_obstacle", lambda device: None)
    monkeypatch.setattr(ffn, "_shared_memory", lambda tokens: 232448)
    backend.language.cache_clear()
    try:
        yield
    finally:
        backend.language.cache_clear()
