"""The sections of a campaign, in order of importance. Each is one command."""

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

# SwinV2-B at 192 px has 144 tokens an image in stage 3 (M = 512) and 36 in stage 4 (M = 1024): 128
# and 512 images; d = 768 is that of SonicMoE; fine experts, of which a token chooses 4
SHAPES_128 = "18432x512x8 18432x512x32"
SHAPES_512 = "73728x512x8 73728x512x32"
OTHER_SHAPES = "18432x768x8 4608x1024x32 18432x512x32x4x512"
SEVEN_SHAPES = f"{SHAPES_128} {SHAPES_512} {OTHER_SHAPES}"
HOST_SHAPES = "64x64x8 64x64x32x4"  # so small that a pass takes the host's time
# The kernels of SHAPES_512 are those of SHAPES_128
PRECOMPILED = f"{SHAPES_128} {OTHER_SHAPES} {HOST_SHAPES} narrow"
TEST_SECONDS = 120  # of one test; the first of a kernel compiles it
TEST_PROCESSES = 14  # that share the GPU
TINY_NETWORK = (
    "--device cpu --cfg quickstart_digits --batch-sizes 2 --dtypes float32 --rounds 2"
    " --opts MODEL.SWINV2.EMBED_DIM 16 MODEL.SWINV2.DEPTHS [1,1,1] MODEL.MOE.BLOCKS [[],[0],[0]]"
)
TINY_SHAPES = "--device cpu --dtypes bfloat16 --rounds 2 --shapes 64x16x4"
NCU = (
    "ncu --clock-control none --launch-count 8 --metrics gpu__time_duration.sum,"
    "sm__throughput.avg.pct_of_peak_sustained_elapsed,"
    "dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "lts__t_throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__warps_active.avg.pct_of_peak_sustained_active"
    " --kernel-name regex:hidden|quack|Gemm"
)
SANITIZER = "compute-sanitizer --tool memcheck --error-exitcode 1"


@dataclass(frozen=True)
class Section:
    """A section of a campaign."""

    name: str
    title: str
    seconds: float  # on an H100: without at least so much time left, it does not begin
    script: str  # of benchmarks/, with the options of both runs; or a folder of tests
    full: str = ""  # arguments on a GPU
    tiny: str | None = None  # arguments of a dry run on a CPU; None: it needs a GPU
    prefix: str = ""  # a program that runs the command, on a GPU

    @property
    def tool(self) -> str:
        return self.prefix.partition(" ")[0]

    def command(self, is_dry_run: bool, tables: Path) -> list[str]:
        """The words of the command. It writes its tables to the given file."""
        if self.script == "tests":
            options = f"-m gpu -v -rfE --tb=short --timeout={TEST_SECONDS} --disable-warnings"
            options += " -p no:cacheprovider -p no:benchmark --durations=15"
            if importlib.util.find_spec("xdist"):
                options += f" -n {min(TEST_PROCESSES, os.cpu_count() or 1)}"
            return [sys.executable, "-m", "pytest", *options.split(), self.script]
        if is_dry_run:
            words = f"benchmarks/{self.script} {self.tiny} --output {tables}"
            return [sys.executable, *words.split()]
        words = f"benchmarks/{self.script} {self.full} --device cuda --output {tables}"
        return [*self.prefix.split(), sys.executable, *words.split()]


# The kit for nine minutes: what a call runs that names no sections
KIT = (
    Section("quack", "QuACK's kernels and ours against fp64", 40, "products.py --check",
            "--shapes 18432x512x32 4608x1024x32x2", "--device cpu"),
    Section("products", "Products of seven shapes", 100, "products.py", f"--shapes {SEVEN_SHAPES}",
            "--device cpu --rounds 1"),
    Section("ncu", "Counters of the kernels with an activation", 50, "products.py --bare",
            "--shapes 18432x512x32", "--device cpu", prefix=NCU),
    Section("network-kernels", "Kernels of the network", 75, "kernels.py network",
            "--batch-sizes 128", f"{TINY_NETWORK} --passes 1"),
    Section("network", "Network, by graph and eager", 100, "model.py --graph",
            "--dtypes bfloat16 --batch-sizes 128 --experts 32 4 --rounds 3",
            f"{TINY_NETWORK} --experts 4 2"),
    Section("narrow", "Narrow blocks and 1,024 channels", 45, "layer.py --no-peers",
            "--dtypes bfloat16 --shapes 4608x1024x32 narrow --rounds 3",
            "--device cpu --shapes 64x16x8x4x16 --dtypes bfloat16 --rounds 2"),
    Section("peers", "Peers", 60, "layer.py", "--dtypes bfloat16 --shapes 18432x512x32 --rounds 3"
            " --peers grouped_mm compiled ScatterMoE Tutel",
            f"{TINY_SHAPES} --peers grouped_mm ScatterMoE Tutel"),
)  # fmt: skip
SECTIONS = (
    *KIT,
    Section("tests", "Tests on a GPU", 160, "tests"),
    Section("layer", "Layer, 128 images", 45, "layer.py --peak --no-peers",
            f"--dtypes bfloat16 --shapes {SHAPES_128}", TINY_SHAPES),
    Section("layer-512", "Layer, 512 images", 20, "layer.py --peak --no-peers",
            f"--dtypes bfloat16 --shapes {SHAPES_512}", TINY_SHAPES),
    Section("kernels", "Kernels of a layer", 25, "kernels.py layer",
            f"--shapes {SHAPES_128} {HOST_SHAPES}", TINY_SHAPES),
    Section("memory", "Memory", 30, "memory.py --dropout 0.1",
            "--measure 4096 8192 16384 32768", "--device cpu --size 32 --measure 4096"),
    Section("memcheck", "Invalid reads and writes", 60, "kernels.py layer --bare",
            "--shapes 200x64x4", prefix=SANITIZER),
)  # fmt: skip
