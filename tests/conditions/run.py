"""The test suite where it is hardest: each file alone, other kernels and CPUs. Not a test itself.

    python tests/conditions/run.py alone        # each test file by itself: about 25 minutes
    python tests/conditions/run.py torch        # kernels="torch" in place of "auto"
    python tests/conditions/run.py no-avx512    # without these instructions; as root
    python tests/conditions/run.py one-core
    python tests/conditions/run.py sse          # each name of VARIABLES: sums as on other CPUs

Other words go to pytest. Exits with 1 if anything failed. Other orders: `make test-random`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q"]
PARALLEL = ["--numprocesses", "auto", "--maxprocesses", "4"]
PARALLEL += ["--dist", "loadfile", "--no-loadscope-reorder", "--randomly-seed=1"]
NO_TESTS = 5  # pytest's exit code where all are deselected
# Libraries choose their instructions by the CPU, and so the order of their sums; these make them
# choose others.
OTHER_CPU = os.pathsep.join([str(HERE / "other_cpu"), str(ROOT)])
OPENBLAS = {"OPENBLAS_CORETYPE": "Prescott", "OPENBLAS_NUM_THREADS": "1"}
SSE = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}
AVX2 = {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
VARIABLES = {
    "numpy": {"PYTHONPATH": OTHER_CPU, "TORCH_CHANGES": "numpy products", **OPENBLAS},
    "sse": SSE,
    "avx2": AVX2 | {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "denormals": {"PYTHONPATH": OTHER_CPU, "TORCH_CHANGES": "flush denormals"},
    "two-threads": {"OMP_NUM_THREADS": "2"},
    "three-threads": {"OMP_NUM_THREADS": "3"},
}


def run(title: str, command: list[str], **variables: str) -> bool:
    """Run pytest, print how it ended; whether nothing failed."""
    started = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    passed = done.returncode in (0, NO_TESTS)
    seconds = time.monotonic() - started
    last_line = (done.stdout.strip().splitlines() or ["no output"])[-1]
    print(f"{'ok' if passed else 'FAILED'}  {title}: {last_line} ({seconds:.0f} s)", flush=True)
    if not passed:
        print(done.stdout[-20_000:], done.stderr[-5_000:], flush=True)
    return passed


def alone(options: list[str]) -> bool:
    results = [
        run(str(file.relative_to(ROOT)), [*PYTEST, "-p", "no:randomly", str(file), *options])
        for file in sorted(ROOT.glob("tests/**/test_*.py"))
    ]
    print(f"{sum(results)} of {len(results)} files pass alone")
    return all(results)


def without_avx512(options: list[str]) -> bool:
    """The kernel's list of the CPU's instructions is covered by one without AVX-512, for this run
    alone."""
    lines = Path("/proc/cpuinfo").read_text().splitlines(keepends=True)
    with tempfile.NamedTemporaryFile("w", suffix="-cpuinfo") as listed:
        for line in lines:
            words = line.split(" ")
            listed.write(
                " ".join(word for word in words if not word.strip().startswith(("avx512", "amx")))
            )
        listed.flush()
        covered = f'mount --bind {listed.name} /proc/cpuinfo && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", covered, "sh", *PYTEST, *PARALLEL, *options]
        return run("without AVX-512", command, ATEN_CPU_CAPABILITY="avx2")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "condition", choices=["alone", "torch", "no-avx512", "one-core", *VARIABLES]
    )
    args, options = parser.parse_known_args()
    whole = [*PYTEST, *PARALLEL, *options]
    if args.condition == "alone":
        passed = alone(options)
    elif args.condition == "torch":
        paths = os.pathsep.join([str(HERE / "torch_kernels"), str(ROOT)])
        passed = run('kernels="torch"', whole, PYTHONPATH=paths)
    elif args.condition == "no-avx512":
        passed = without_avx512(options)
    elif args.condition in VARIABLES:
        passed = run(args.condition, whole, **VARIABLES[args.condition])
    else:
        passed = run("one core", ["taskset", "-c", "0", *whole])
    sys.exit(not passed)


if __name__ == "__main__":
    main()
