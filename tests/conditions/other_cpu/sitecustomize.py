"""Python imports this at its start, if its directory is on PYTHONPATH: a CPU that torch takes for
this one and that computes otherwise. TORCH_CHANGES names what changes:

numpy products: matrix products of torch are numpy's, whose BLAS adds in another order.
flush denormals: numbers below 1.2e-38 are 0, in the thread that imports torch.
"""

import importlib.abc
import importlib.util
import os
import sys
import warnings

_LIBRARIES = []


def _product(a, b):
    """a @ b of vectors, matrices or batches of them; halves are added in fp32."""
    import numpy as np
    import torch

    # copies: FullyShardedDataParallel cannot free a storage that NumPy has seen
    factors = [x.detach().resolve_conj().resolve_neg().clone() for x in (a, b)]
    if a.dtype in (torch.float16, torch.bfloat16):
        factors = [x.float() for x in factors]
    result = np.matmul(*(x.numpy() for x in factors))
    return torch.from_numpy(np.asarray(result)).to(a.dtype, copy=True)


def _sum_with_product(start, a, b, *, beta=1, alpha=1):
    """beta * start + alpha * (a @ b). `start` is not read where beta is 0: it may hold NaN."""
    product = _product(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else start.detach() * beta + product


def _register_products(torch) -> None:
    library = torch.library.Library("aten", "IMPL")

    def add(name, function) -> None:
        def into(*inputs, out, **factors):
            result = function(*inputs, **factors)
            return out.resize_(result.shape).copy_(result)

        def in_place(start, *inputs, **factors):
            return start.copy_(function(start, *inputs, **factors))

        library.impl(name, function, "CPU")
        library.impl(f"{name}.out", into, "CPU")
        if function is _sum_with_product:
            library.impl(f"{name}_", in_place, "CPU")

    for name in ("mm", "bmm"):
        add(name, _product)
    for name in ("addmm", "baddbmm", "addmv"):
        add(name, _sum_with_product)
    for name in ("dot", "vdot"):
        library.impl(name, _product, "CPU")
    _LIBRARIES.append(library)  # torch takes its own kernels back when it is deleted


class _OtherCPU(importlib.abc.MetaPathFinder):
    """Changes torch when it is imported, in child processes, too."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module) -> None:
            execute(module)
            if "flush denormals" in os.environ["TORCH_CHANGES"]:
                module.set_flush_denormal(True)
            if "numpy products" not in os.environ["TORCH_CHANGES"]:
                return
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of each kernel that is replaced
                _register_products(module)

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, _OtherCPU())
