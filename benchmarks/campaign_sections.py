"""The sections of a campaign, in order of importance. Each is one command."""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

# SwinV2-B at 192 px has 144 tokens an image in stage 3 (M = 512) and 36 in stage 4 (M = 1024). The
# first two are of 128 images, the next two of 512; d = 768 is compared with SonicMoE's share.
LAYER_SHAPES = (
    "18432x512x8 18432x512x32 18432x768x8 73728x512x8 73728x512x32 4608x1024x8 4608x1024x32"
)
# 32 experts with a quarter of the hidden dim, of which a token chooses 4: stage 3 of SwinV2-B, and
# narrow blocks
FINE_SHAPES = "18432x512x32x4x512xsigmoid narrow"
# 72, 144, 576, 2,304 and 9,216 rows an expert, for the choice between forms
TILE_SHAPES = "2304x512x32 18432x512x128 18432x512x32 18432x512x8 73728x512x8"
PIECES_SHAPES = "18432x512x8 18432x512x32"
TEST_SECONDS = 120  # of one test; the first of a kernel compiles it
TINY_NETWORK = (
    "--device cpu --cfg configs/quickstart_digits.yaml --batch-sizes 2 --dtypes float32 --rounds 2"
    " --opts MODEL.SWINV2.EMBED_DIM 16 MODEL.SWINV2.DEPTHS [1,1,1] MODEL.MOE.BLOCKS [[],[0],[0]]"
)
TINY_SHAPES = "--device cpu --shapes 64x16x4 48x16x4x2 --dtypes bfloat16 --rounds 2"


@dataclass(frozen=True)
class Section:
    """A section of a campaign."""

    name: str
    weight: float  # minutes in a campaign of 25 minutes: its share of the time that is left
    script: str  # of benchmarks/, with the options of both runs
    full: str  # arguments on a GPU
    tiny: str  # arguments of a dry run on a CPU

    def command(self, is_dry_run: bool, tables: Path, junit: Path) -> list[str]:
        """The words of the command. It writes its tables, or the outcomes of its tests, to the
        given files."""
        arguments = self.full
        if is_dry_run:
            arguments = self.tiny
        if self.name == "tests":
            options = ["-m", "gpu", "-v", "-rfE", "--tb=short", f"--timeout={TEST_SECONDS}"]
            options += ["-p", "no:cacheprovider", f"--junitxml={junit}"]
            return [sys.executable, "-m", "pytest", *options, *gpu_test_files()]
        words = f"benchmarks/{self.script} {arguments}".split()
        return [sys.executable, *words, "--output", str(tables)]


SECTIONS = (
    Section("tests", 6, "", "", ""),
    Section("layer", 4, "layer.py --peak --no-peers",
            f"--device cuda --dtypes bfloat16 --shapes {LAYER_SHAPES}", TINY_SHAPES),
    Section("fine", 2, "layer.py --no-peers",
            f"--device cuda --dtypes bfloat16 --shapes {FINE_SHAPES}",
            "--device cpu --shapes 64x16x8x4x16xsigmoid --dtypes bfloat16 --rounds 2"),
    Section("tiles", 2, "tuning.py experts",
            f"--device cuda --rounds 7 --shapes {TILE_SHAPES}",
            "--device cpu --shapes 70x16x4x2 --rounds 1"),
    Section("attention", 1, "tuning.py attention",
            "--device cuda", "--device cpu --shapes 4x16x1x16 --rounds 1"),
    Section("pieces", 2, "pieces.py",
            f"--device cuda --dtypes bfloat16 --shapes {PIECES_SHAPES}", TINY_SHAPES),
    Section("memory", 1, "memory.py --dropout 0.1",
            "--device cuda --measure 4096 8192 16384 32768",
            "--device cpu --size 32 --measure 4096"),
    Section("routers", 1, "routers.py",
            "--device cuda --dtypes bfloat16", "--device cpu --shapes 2x16x16x4 --rounds 1"),
    Section("model", 6, "model.py", "--device cuda --dtypes bfloat16", TINY_NETWORK),
    Section("shares", 3, "shares.py",
            "--device cuda --batch-sizes 128", f"{TINY_NETWORK} --passes 1"),
    Section("trunk", 2, "model.py --timm",
            "--device cuda --dtypes bfloat16 --batch-sizes 128", TINY_NETWORK),
    Section("graph", 1, "model.py --graph", "--device cuda --dtypes bfloat16", TINY_NETWORK),
)  # fmt: skip


def gpu_test_files() -> list[str]:
    """The test files that have tests with the marker gpu. Tests of several ranks come last."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    files.sort(key=lambda file: file.parent.name == "distributed")
    return [str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text()]
