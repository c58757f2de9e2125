"""A training step as a CUDA graph, whose kernels the host launches with one call."""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from moe_core import MoELayer
from swinv2_moe.errors import UserError
from swinv2_moe.train.distributed import World

STEPS_BEFORE = 3  # as usual: they compile kernels and make the optimiser's state

Batches = list[tuple[Tensor, ...]]


class Compute(Protocol):
    """A step's work on the device: (flag, inputs of each batch) -> results."""

    def __call__(self, signalled: Tensor, batches: Batches) -> Tensor: ...


def check_device(world: World, key: str) -> None:
    """Check that passes and steps can be captured on this device by this number of ranks.

    Args:
        key: what asks for it, for the message.

    Raises:
        UserError: they cannot.
    """
    if world.size > 1:
        raise UserError(
            f"{key} needs one rank, not {world.size}: a rank waits for the counts of the others"
        )
    if world.device.type != "cuda":
        raise UserError(f"{key} needs a GPU, the device is {world.device.type!r}")


def capture(
    run: Callable[[], object], stream: torch.cuda.Stream | None = None
) -> Callable[[], None]:
    """Capture the kernels of `run()` as a CUDA graph, and return a function that launches them all
    together. Nothing is computed yet.

    The tensors that `run` reads must stay at their addresses. Random numbers of a replay follow
    from the seed and the offset that the default generator then has.

    Args:
        stream: on which `run` has run before; None: torch's for captures.

    Raises:
        RuntimeError: `run` reads from the device on the host.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state()
    try:
        with torch.cuda.graph(graph, stream=stream):
            run()
    except RuntimeError:
        # torch leaves the generator in the capture that failed. It would draw no number any more.
        generator.graphsafe_set_state(state)
        raise
    return graph.replay


class StepGraph:
    """Computes steps as a CUDA graph: the first ones as usual, the others by replaying the kernels
    of one step for other inputs.

    What the step decides on the host stays as it was in the captured step.

    Args:
        layers: the MoE layers, whose `last_routing` describes the last replay.
    """

    def __init__(self, layers: Iterable[MoELayer]) -> None:
        self.layers = list(layers)
        self._stream: torch.cuda.Stream | None = None
        self._num_before = 0  # steps that were computed as usual
        self._replay: Callable[[], None] | None = None
        self._inputs: list[Tensor] = []  # which the graph reads
        self._results = torch.empty(0)
        self._restore_routing: list[Callable[[], None]] = []

    @property
    def replays(self) -> bool:
        """Whether the step has been captured."""
        return self._replay is not None

    def __call__(self, compute: Compute, signalled: Tensor, batches: Batches) -> Tensor:
        """The results of a step.

        Args:
            compute: the step's work, the same in each call, on inputs of the same shapes.
            signalled: a flag, a scalar.
            batches: the inputs of each batch.

        Raises:
            UserError: the step cannot be captured.
        """
        if self._num_before < STEPS_BEFORE:
            self._num_before += 1
            return self._as_usual(compute, signalled, batches)
        if self._replay is None:
            self._replay = self._captured(compute, signalled, batches)
        else:
            for captured, tensor in zip(self._inputs, _flat(signalled, batches), strict=True):
                assert captured.shape == tensor.shape, tensor.shape
                captured.copy_(tensor)
        self._replay()
        for restore in self._restore_routing:  # a validation may have been between
            restore()
        return self._results

    def _captured(
        self, compute: Compute, signalled: Tensor, batches: Batches
    ) -> Callable[[], None]:
        """A function that computes a step on what is then in copies of these inputs."""
        own_signalled = signalled.clone()
        own_batches = [tuple(tensor.clone() for tensor in batch) for batch in batches]
        self._inputs = _flat(own_signalled, own_batches)

        def run() -> None:
            self._results = compute(own_signalled, own_batches)

        try:
            replay = capture(run, self._stream)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"TRAIN.GRAPH is True: this step cannot be captured ({reason})"
            ) from error
        self._restore_routing = [layer.routing_of_replay() for layer in self.layers]
        return replay

    def _as_usual(self, compute: Compute, signalled: Tensor, batches: Batches) -> Tensor:
        """Compute on the stream of the capture: the backward pass of a parameter belongs to the
        stream on which it first ran."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            results = compute(signalled, batches)
        torch.cuda.current_stream().wait_stream(self._stream)
        return results


def _flat(signalled: Tensor, batches: Batches) -> list[Tensor]:
    return [signalled, *(tensor for batch in batches for tensor in batch)]
