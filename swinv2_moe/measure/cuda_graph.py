"""CUDA graphs of passes without gradients: all kernels of a pass are launched together."""

from collections.abc import Callable, Sequence

import torch

from swinv2_moe.errors import UserError
from swinv2_moe.train.distributed import World

_WARM_UP = 3  # passes before the capture, which compile kernels and fill the caches of `prepared`


def check_graph(modes: Sequence[str], compiled: Sequence[str], world: World) -> None:
    """Check that the passes to measure can be captured.

    Args:
        modes: the mode of each pass, "inference" or "training".
        compiled: whether each pass is compiled, "off" or "on".

    Raises:
        UserError: a pass cannot be captured.
    """
    if "training" in modes:
        raise UserError("--graph captures inference alone, but --mode is 'training'")
    if "on" in compiled:
        raise UserError("--graph captures passes that are not compiled, but --compile is 'on'")
    if world.size > 1:
        raise UserError(
            f"--graph needs one rank, not {world.size}: a rank waits for the counts of the others"
        )
    if world.device.type != "cuda":
        raise UserError(f"--graph needs a GPU, the device is {world.device.type!r}")


def capture(run: Callable[[], object], name: str) -> Callable[[], None]:
    """Capture the kernels of `run()`, and return a function that launches them.

    The tensors that `run` reads, weights included, must stay at their addresses, and the caches of
    `moe_core.prepared` must live as long as the graph: call both within the same context.

    Args:
        name: name of the captured pass, for the error message.

    Raises:
        UserError: `run` reads from the device on the host.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"--graph: {name} cannot be captured: {reason}") from error
    return graph.replay
