"""Training steps and forward passes as CUDA graphs: the host launches all kernels with one call."""

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Protocol, cast

import torch
from torch import Tensor, nn

import moe_core
from moe_core import moe_layers, prepared, reset_balance_loads
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel
from swinv2_moe.ranks.world import World

_log = logging.getLogger(__name__)

STEPS_BEFORE = 3  # as usual: they compile kernels and make the optimiser's state
PASSES_BEFORE = 3  # as usual: fewer are not worth a capture

_AS_USUAL = "%s cannot be captured as a CUDA graph, going on without (%s)"

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


def step_graph(
    wanted: bool | str, obstacle: str, model: nn.Module, world: World
) -> "StepGraph | None":
    """The graph of a training's steps, as TRAIN.GRAPH says; None: steps are computed as usual.

    Args:
        wanted: the value of TRAIN.GRAPH.
        obstacle: why the configuration prevents it; empty: it does not.

    Raises:
        UserError: it is True, and there are several ranks or the device is no GPU.
    """
    if wanted is True:
        check_device(world, "TRAIN.GRAPH")
        return StepGraph(model)
    if wanted == "auto" and world.size == 1 and not obstacle and can_replay(model, world.device):
        return StepGraph(model, key=None)
    return None


def compile_kernels(
    model: MoEModel,
    image_shape: torch.Size,
    device: torch.device,
    dtype: torch.dtype,
    autocast: Callable[[], AbstractContextManager],
) -> None:
    """Compile the kernels of a training step and of validation on all cores.

    Args:
        image_shape: of a batch, [B, C, H, W].
        dtype: in which steps compute.
    """

    def passes(model: nn.Module) -> None:
        images = torch.zeros(image_shape, device=device)
        with moe_core.step(model, dtype, equal_tokens=True):
            with autocast():
                logits, aux_loss = cast(MoEModel, model).forward_with_aux(images)
            (logits.float().sum() + aux_loss).backward()
        model.eval()
        with torch.inference_mode(), prepared(model), autocast():
            model(images)

    moe_core.compile_ahead(model, passes)


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

    What the step decides on the host stays as it was in the captured step. A step with inputs of
    other shapes is computed as usual; after STEPS_BEFORE such steps in a row the next one is
    captured in place of the old.

    Args:
        model: its parameters' gradients are those of the graph, and `last_routing` of its MoE
            layers describes the last replay.
        key: what asks for the graph, for the message. None: a step that cannot be captured is
            computed as usual, with one line in the log, and so are all after it.
    """

    def __init__(self, model: nn.Module, key: str | None = "TRAIN.GRAPH") -> None:
        self.model = model
        self.key = key
        self._stream: torch.cuda.Stream | None = None
        self._kind: Hashable = None  # shapes in the last step as usual
        self._num_before = 0  # such steps in a row
        self._failed = False
        self.replayed = False  # whether the last step was a replay
        self._replay: Callable[[], None] | None = None
        self._captured_kind: Hashable = None
        self._inputs: list[Tensor] = []  # which the graph reads
        self._results = torch.empty(0)
        self._gradients: list[Tensor | None] = []  # which the graph writes
        self._restore_routing: list[Callable[[], None]] = []

    @property
    def replays(self) -> bool:
        """Whether a step has been captured."""
        return self._replay is not None

    def __call__(self, compute: Compute, signalled: Tensor, batches: Batches) -> Tensor:
        """The results of a step.

        Args:
            compute: the step's work, the same in each call.
            signalled: a flag, a scalar.
            batches: the inputs of each batch.

        Raises:
            UserError: the step cannot be captured, and there is a `key`.
        """
        inputs = _flat(signalled, batches)
        kind = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if self._replay is None or kind != self._captured_kind:
            if kind != self._kind:
                self._kind, self._num_before = kind, 0
            if self._failed or self._num_before < STEPS_BEFORE:
                self._num_before += 1
                return self._beside_the_graph(compute, signalled, batches)
            self._drop()
            self._replay = self._captured(compute, signalled, batches)
            if self._replay is None:
                return self._beside_the_graph(compute, signalled, batches)
            self._captured_kind = kind
        else:
            for captured, tensor in zip(self._inputs, inputs, strict=True):
                captured.copy_(tensor)
        self._set_gradients(self._gradients)
        self._replay()
        self.replayed = True
        for restore in self._restore_routing:  # a validation may have been between
            restore()
        return self._results

    def _captured(
        self, compute: Compute, signalled: Tensor, batches: Batches
    ) -> Callable[[], None] | None:
        """A function that computes a step on what is then in copies of these inputs. None: it
        cannot be captured."""
        own_signalled = signalled.clone()
        own_batches = [tuple(tensor.clone() for tensor in batch) for batch in batches]
        self._inputs = _flat(own_signalled, own_batches)

        def run() -> None:
            self._results = compute(own_signalled, own_batches)

        try:
            replay = capture(run, self._stream)
        except RuntimeError as error:
            if self.key is None:
                self._failed = True
                self._drop()
                reset_balance_loads(self.model)  # of the pass that was never computed
                _log.warning(_AS_USUAL, "this step", _reason(error))
                return None
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UserError(
                f"{self.key} is True: this step cannot be captured ({_reason(error)})"
            ) from error
        self._gradients = [parameter.grad for parameter in self.model.parameters()]
        layers = moe_layers(self.model).values()
        self._restore_routing = [layer.routing_of_replay() for layer in layers]
        return replay

    def _drop(self) -> None:
        """Give the memory of the graph back."""
        self._set_gradients([])
        self._replay = None
        self._inputs, self._gradients, self._restore_routing = [], [], []
        self._results = torch.empty(0)

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Let the parameters have these gradients; without any, none."""
        parameters = self.model.parameters()
        for parameter, gradient in zip_longest(parameters, gradients):
            parameter.grad = gradient

    def _beside_the_graph(self, compute: Compute, signalled: Tensor, batches: Batches) -> Tensor:
        """Compute as usual, into gradients of its own."""
        self.replayed = False
        if self._replay is not None:
            self._set_gradients([])
        return self._as_usual(compute, signalled, batches)

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


class PassGraph:
    """Computes a model's forward pass as a CUDA graph once PASSES_BEFORE passes in a row had the
    same shape; other passes, and all on a CPU, as usual.

    For passes without gradients, within one `moe_core.prepared` context: weights and what is
    computed from them stay as they are.

    Args:
        model: whose pass it is. `last_routing` of its MoE layers describes the last pass. None: a
            program of torch.export.
        run: images [B, C, H, W] -> a tensor.
    """

    def __init__(
        self, model: nn.Module | None, run: Callable[[Tensor], Tensor], device: torch.device
    ) -> None:
        self.run = run
        self._layers = list(moe_layers(model).values()) if model is not None else []
        self._can_replay = can_replay(model, device)
        self._restore_routing: list[Callable[[], None]] = []
        self._shape: torch.Size | None = None  # of the last pass
        self._num_before = 0  # such passes in a row
        self._replay: Callable[[], None] | None = None
        self._images = self._result = torch.empty(0)

    def __call__(self, images: Tensor) -> Tensor:
        """The result of a pass. The next call may overwrite it."""
        if not self._can_replay:
            return self.run(images)
        if self._replay is not None and images.shape == self._images.shape:
            self._images.copy_(images)
            return self._replayed()
        if images.shape != self._shape:
            self._shape, self._num_before = images.shape, 0
        self._num_before += 1
        if self._num_before <= PASSES_BEFORE:
            return self.run(images)
        self._replay = None
        self._images = images.clone()

        def run() -> None:
            self._result = self.run(self._images)

        try:
            self._replay = capture(run)
        except RuntimeError as error:
            self._can_replay = False
            _log.warning(_AS_USUAL, "a pass", _reason(error))
            return self.run(images)
        self._restore_routing = [layer.routing_of_replay() for layer in self._layers]
        return self._replayed()

    def _replayed(self) -> Tensor:
        assert self._replay is not None
        self._replay()
        for restore in self._restore_routing:
            restore()
        return self._result


def can_replay(model: nn.Module | None, device: torch.device) -> bool:
    """Whether passes of this model can be captured: on a GPU, experts on one rank, not compiled,
    and no hooks, which a replay would not call. None: a program of torch.export, whose hooks check
    shapes alone."""
    if device.type != "cuda":
        return False
    if model is None:
        return True
    for part in model.modules():
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            return False
        if part._forward_hooks or part._forward_pre_hooks:
            return False
    return all(layer.group.size == 1 for layer in moe_layers(model).values())


def _reason(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def _flat(signalled: Tensor, batches: Batches) -> list[Tensor]:
    return [signalled, *(tensor for batch in batches for tensor in batch)]
