"""The sections of a campaign, in order of importance. Each is one command of a minute or less."""

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

# SwinV2-B at 192 px has 144 tokens an image in stage 3 (M = 512) and 36 in stage 4 (M = 1024): 128
# images, 512 images; d = 768 is compared with SonicMoE's share
SHAPES_128 = "18432x512x8 18432x512x32"
SHAPES_512 = "73728x512x8 73728x512x32"
HOST_SHAPES = "64x64x8 64x64x32x4"  # so small that a pass takes the host's time
OTHER_SHAPES = "18432x768x8 4608x1024x8 4608x1024x32"
# 32 experts with a quarter of the hidden dim, of which a token chooses 4: stage 3 of SwinV2-B, and
# narrow blocks
FINE_SHAPES = "18432x512x32x4x512 narrow"
# All kernels of the layers: those of SHAPES_512 are those of SHAPES_128
PRECOMPILED = f"{SHAPES_128} {HOST_SHAPES} {FINE_SHAPES} {OTHER_SHAPES}"
# 72, 144, 576, 2,304 and 9,216 rows an expert, for the choice between forms
TILE_SHAPES = "2304x512x32 18432x512x128 18432x512x32 18432x512x8 73728x512x8"
TEST_SECONDS = 120  # of one test; the first of a kernel compiles it
TEST_PROCESSES = 14  # that share the GPU
OPERATIONS = (  # each compared with torch
    "tests/unit/moe_core/test_triton_kernels.py",
    "tests/unit/moe_core/test_triton_ffn.py",
    "tests/unit/moe_core/test_layer_on_gpu.py",
    "tests/unit/models/test_window_attention_kernels.py",
)
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
    " --kernel-name regex:hidden|model_kernel|weight_grad|route"
)
SANITIZER = "compute-sanitizer --tool memcheck --error-exitcode 1"


@dataclass(frozen=True)
class Section:
    """A section of a campaign."""

    name: str
    title: str
    seconds: float  # on an H100: without at least so much time left, it does not begin
    script: str  # of benchmarks/, with the options of both runs; or files of tests
    full: str = ""  # arguments on a GPU; of tests, which ones (default: "gpu")
    tiny: str | None = None  # arguments of a dry run on a CPU; None: it needs a GPU
    prefix: str = ""  # a program that runs the command, on a GPU

    @property
    def tool(self) -> str:
        return self.prefix.partition(" ")[0]

    def command(self, is_dry_run: bool, tables: Path, junit: Path) -> list[str]:
        """The words of the command. It writes its tables, or the outcomes of its tests, to the
        given files."""
        if self.script.startswith("tests/"):
            options = [
                "-m",
                self.full or "gpu",
                "-v",
                "-rfE",
                "--tb=short",
                f"--timeout={TEST_SECONDS}",
            ]
            options += ["-p", "no:cacheprovider", "-p", "no:benchmark", f"--junitxml={junit}"]
            options += ["--disable-warnings", "--durations=15"]
            if not is_dry_run and importlib.util.find_spec("xdist"):
                processes = min(TEST_PROCESSES, os.cpu_count() or 1)
                options += ["-n", f"{processes}"]
            return [sys.executable, "-m", "pytest", *options, *self.script.split()]
        if is_dry_run:
            words = f"benchmarks/{self.script} {self.tiny}"
            return [sys.executable, *words.split(), "--output", str(tables)]
        words = f"benchmarks/{self.script} {self.full} --device cuda --output {tables}"
        return [*self.prefix.split(), sys.executable, *words.split()]


def other_tests() -> list[Section]:
    """A section for each other file that has tests with the marker gpu. Those of several processes
    come last."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    files.sort(key=lambda file: file.parent.name == "distributed")
    found = []
    for file in files:
        script = f"{file.relative_to(ROOT)}"
        if script not in OPERATIONS and "mark.gpu" in file.read_text():
            found.append(Section(file.stem, f"Tests: {file.stem}", 40, script, tiny=""))
    return found


SECTIONS = (
    Section("operations", "Every operation against torch", 75, " ".join(OPERATIONS),
            "gpu and not slow", tiny=""),
    Section("ceilings", "Ceilings", 20, "ceilings.py", "", "--device cpu --rounds 2"),
    Section("compile-layers", "Kernels of the layers, compiled", 30, "kernels.py layer --compile",
            f"--shapes {PRECOMPILED}"),
    Section("layer", "Layer, 128 images", 45, "layer.py --peak --no-peers",
            f"--dtypes bfloat16 --shapes {SHAPES_128}", TINY_SHAPES),
    Section("layer-512", "Layer, 512 images", 20, "layer.py --peak --no-peers",
            f"--dtypes bfloat16 --shapes {SHAPES_512}", TINY_SHAPES),
    Section("kernels", "Kernels of a layer", 25, "kernels.py layer",
            f"--shapes {SHAPES_128} {HOST_SHAPES}", TINY_SHAPES),
    Section("ncu", "Counters of its kernels", 60, "kernels.py layer --bare",
            "--shapes 18432x512x8", prefix=NCU),
    Section("compile", "Kernels of the network, compiled", 60, "kernels.py network --compile"),
    Section("network", "Network", 90, "model.py", "--dtypes bfloat16", TINY_NETWORK),
    Section("network-kernels", "Kernels of the network", 75, "kernels.py network",
            "--batch-sizes 128", f"{TINY_NETWORK} --passes 1"),
    Section("fine", "Fine experts and narrow blocks", 45, "layer.py --no-peers",
            f"--dtypes bfloat16 --shapes {FINE_SHAPES}",
            "--device cpu --shapes 64x16x8x4x16 --dtypes bfloat16 --rounds 2"),
    Section("layer-other", "Layer, other widths", 30, "layer.py --peak --no-peers",
            f"--dtypes bfloat16 --shapes {OTHER_SHAPES}", TINY_SHAPES),
    Section("memory", "Memory", 30, "memory.py --dropout 0.1",
            "--measure 4096 8192 16384 32768", "--device cpu --size 32 --measure 4096"),
    Section("tiles", "Tiles of the experts, and F.grouped_mm", 120, "tuning.py experts",
            f"--rounds 5 --shapes {TILE_SHAPES}", "--device cpu --shapes 70x16x4x2 --rounds 1"),
    Section("attention", "Window attention", 75, "tuning.py attention", "--rounds 5",
            "--device cpu --shapes 4x16x1x16 --rounds 1"),
    Section("memcheck", "Invalid reads and writes", 60, "kernels.py layer --bare",
            "--shapes 200x64x4", prefix=SANITIZER),
    Section("graph", "The network as CUDA graphs", 90, "model.py --graph",
            "--dtypes bfloat16", TINY_NETWORK),
    Section("trunk", "Dense trunk", 45, "model.py --timm",
            "--dtypes bfloat16 --batch-sizes 128", TINY_NETWORK),
    Section("operations-slow", "Slow tests of the operations", 120, " ".join(OPERATIONS),
            "gpu and slow", tiny=""),
    *other_tests(),
)  # fmt: skip
