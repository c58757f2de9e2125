"""QuACK's grouped products as libraries of 0.1 MB each, compiled without a GPU.

    python benchmarks/quack_kernels.py SITE [--output output/quack]

SITE is a folder called site-packages, made by the Python version of the machine with the GPU, which
also runs this script: pip install --no-deps --target SITE quack-kernels==0.6.5
nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1 nvidia-cutlass-dsl-libs-core==4.8.1
nvidia-cutlass-dsl-libs-cu13==4.8.1 apache-tvm-ffi torch-c-dlpack-ext einops. A linked library needs
neither QuACK nor NVIDIA's DSL, only apache-tvm-ffi and libcudart of torch for CUDA 13.
"""

# T tokens, E experts, N rows, M model dim, H hidden dim

import argparse
import os
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

LIBRARIES = Path(__file__).parent.parent / "output" / "quack"
ARCHITECTURE = "sm_90a"
TILE = 128  # rows and columns of a tile
# the arguments of a kernel that are the same in each call: multiprocessors, swizzle
SCHEDULE = (132, None, 8, None, None, None)
NO_EPILOGUE = (None,) * 12


class Quack:
    """The libraries of a folder, called with QuACK's own conventions.

    A kernel takes (A, B, D, C, epilogue, schedule, rows, None, None); `rows` holds the ends of the
    experts' rows along M, those along K, the token of each row, and the ends of the experts' tiles.

    Attributes:
        note: what the libraries are, or why there are none.
    """

    def __init__(self, folder: Path) -> None:
        self.kernels: dict[str, Callable] = {}
        self.note = f"QuACK: no libraries in {folder}; quack_kernels.py compiles them"
        files = sorted(folder.glob("*.so"))
        try:
            if files:
                import tvm_ffi

                self.kernels = {f.stem: tvm_ffi.load_module(str(f))["func"] for f in files}
                self.note = f"QuACK: {len(files)} libraries of quack-kernels 0.6.5"
        except Exception as error:  # another Python, or a library of CUDA that is not here
            self.note = f"QuACK: {type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def products(self, inputs) -> dict[str, Callable[[], Tensor]]:
        """As `products.ours`, of `products.Inputs`; results of a token are summed by torch.

        Raises:
            RuntimeError: there are no libraries.
        """
        if not self.kernels:
            raise RuntimeError("see the note on QuACK")
        i, ids = inputs, inputs.token_ids
        w1, w2 = i.w1.transpose(1, 2), i.w2.transpose(1, 2)
        num_rows, hidden_dim = i.z.shape
        counts = i.ends.diff()
        tiles = torch.nn.functional.pad(((counts + TILE - 1) // TILE).cumsum(0), (1, 0)).int()
        num_tiles = -(-num_rows // TILE) + len(counts)

        def new(*sizes: int, dtype: torch.dtype = i.x.dtype) -> Tensor:
            return torch.empty(sizes, device=i.x.device, dtype=dtype)

        def call(name: str, a, b, d, c, epilogue, rows) -> None:
            self.kernels[name](a, b, d, c, epilogue, SCHEDULE, rows, None, None)

        def up() -> Tensor:
            z, h = new(num_rows, hidden_dim), new(num_rows, hidden_dim)
            call("up", i.x, w1, z, None, (i.b1, h, None, None), (i.ends, None, ids, None))
            return h

        def hidden() -> Tensor:
            dz, weighted = new(num_rows, hidden_dim), new(num_rows, hidden_dim)
            dots = new(num_rows, -(-hidden_dim // TILE), dtype=torch.float32)
            sums = new(num_tiles, hidden_dim, dtype=torch.float32)
            epilogue = (i.gate, weighted, dots, sums, None, None)
            call("hidden_grad", i.grad, w2, dz, i.z, epilogue, (i.ends, None, ids, tiles))
            return dz

        def to_tokens(name: str, rows: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
            out = new(num_rows, i.x.shape[1])
            epilogue = list(NO_EPILOGUE)
            epilogue[2] = bias
            call(name, rows, weights, out, None, tuple(epilogue), (i.ends, None, None, None))
            if bias is not None:
                out = out * i.gate.unsqueeze(1)
            return torch.zeros_like(i.x, dtype=out.dtype).index_add(0, ids, out)

        def of_weight(name: str, a: Tensor, b: Tensor, ids: Tensor | None) -> Tensor:
            out = new(len(counts), a.shape[1], b.shape[1], dtype=torch.float32)
            call(name, a.t(), b.t(), out, None, NO_EPILOGUE, (None, i.ends, ids, None))
            return out

        return {
            "up": up,
            "down": lambda: to_tokens("down", i.h, w2, i.b2),
            "hidden gradient": hidden,
            "token gradient": lambda: to_tokens("token_grad", i.dz, w1, None),
            "gradient of w1": lambda: of_weight("w1_grad", i.x, i.dz, ids).transpose(1, 2),
            "gradient of w2": lambda: of_weight("w2_grad", i.h, i.grad_rows, None),
        }


def compile_all(output: Path) -> None:
    """Compile and link the six kernels. The calls fail at the launch, as tensors are on a CPU."""
    import quack.cache
    from quack.activation import dgelu_erf
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.ops import ColVecLoad, ColVecReduce, RowVecReduce
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm, gemm_act

    @gemm_epilogue(
        outputs=("postact",),
        ops={"score": ColVecLoad("score")},
        reduces={"dscore": ColVecReduce("dscore", scaled=True), "dbias": RowVecReduce("dbias")},
    )
    def backward(acc, c, score):
        dz, hidden = dgelu_erf(c, acc * score)
        return {"D": dz, "postact": hidden * score, "dscore": (hidden, acc), "dbias": dz}

    tokens, m, h, experts = 1024, 512, 2048, 8  # sizes are arguments of the kernels
    x, g = torch.empty(tokens, m).bfloat16(), torch.empty(tokens, m).bfloat16()
    w = torch.empty(experts, h, m).bfloat16()
    z = torch.empty(tokens, h).bfloat16()
    ends, ids = (torch.arange(experts + 1) * (tokens // experts)).int(), torch.arange(tokens).int()
    config = GemmConfig(tile_m=TILE, tile_n=TILE, pingpong=True, is_dynamic_persistent=False,
                        cluster_m=1, cluster_n=1)  # fmt: skip
    rows = {"cu_seqlens_m": ends, "A_idx": ids, "config": config, "tuned": False}
    sums = {"cu_seqlens_k": ends, "out_dtype": torch.float32, "tuned": False}
    along = {"cu_seqlens_m": ends, "tuned": False}
    bias, gate = torch.zeros(experts, h), torch.rand(tokens)
    out = {"D": torch.empty_like(z), "postact": torch.empty_like(z)}
    calls = {
        "up": lambda: gemm_act(x, w.transpose(1, 2), bias=bias, activation="gelu_erf", **rows),
        "down": lambda: gemm(z, w, bias=torch.zeros(experts, m), **along),
        "hidden_grad": lambda: backward(
            g, w.transpose(1, 2), z, out=out, dynamic_scheduler=False, score=gate, **rows
        ),
        "token_grad": lambda: gemm(z, w, **along),
        "w1_grad": lambda: gemm(x.t(), z, A_idx=ids, **sums),
        "w2_grad": lambda: gemm(z.t(), g, **sums),
    }
    for name, call in calls.items():
        with tempfile.TemporaryDirectory() as folder:
            with mock.patch.object(quack.cache, "CACHE_DIR", folder):
                try:
                    call()
                except ValueError as error:
                    if "expected device_type=cuda" not in str(error):
                        raise
            (item,) = Path(folder).rglob("*.o")
            link(item, output / f"{name}.so")
        print(f"{output / name}.so", flush=True)


def link(item: Path, library: Path) -> None:
    """A library of a compiled object, in which one symbol of the DSL's runtime is replaced."""
    import nvidia_cutlass_dsl
    import tvm_ffi

    stub = item.with_suffix(".c")
    stub.write_text("int CuteDSLRT_TVMFFISetRaisedCudaError(int error) { return -1; }\n")
    (dsl,) = nvidia_cutlass_dsl.__path__
    runtime = Path(dsl, "cu13", "lib", "libcuda_dialect_runtime_static.a")
    place = Path(tvm_ffi.__file__).parent / "lib"
    words = ["gcc", "-shared", "-fPIC", "-o", library, item, stub, runtime, f"-L{place}"]
    subprocess.run([*words, "-ltvm_ffi", "-lpthread", "-ldl"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=Path, help="the folder site-packages with QuACK")
    parser.add_argument("--output", type=Path, default=LIBRARIES, metavar="FOLDER")
    args = parser.parse_args()
    if not (args.site / "quack").is_dir():
        parser.error(f"{args.site}: has no package quack; --help says how to install it")
    os.environ |= {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": ARCHITECTURE}
    site.addsitedir(str(args.site.resolve()))
    args.output.mkdir(parents=True, exist_ok=True)
    import quack.gemm_interface  # noqa: F401

    for name, module in list(sys.modules.items()):  # there is no device to ask
        if name.startswith("quack") and hasattr(module, "get_max_active_clusters"):
            module.get_max_active_clusters = lambda size, *_, **__: SCHEDULE[0] // size
    compile_all(args.output.resolve())


if __name__ == "__main__":
    main()
