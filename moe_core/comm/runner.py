"""Runs a plan: each rank runs its program in one call of the C++ interpreter."""

# P ranks

import ctypes
from collections.abc import Sequence
from ctypes import c_long, c_void_p
from datetime import timedelta
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from moe_core.comm.channel import ChannelGroup
from moe_core.comm.check import check
from moe_core.comm.library import library
from moe_core.comm.plan import ACTIONS, KINDS, Plan, Program
from moe_core.ranks import Ranks

_HEADER_BYTES = 64  # of a slot
_TIMEOUT = 1  # a status of the interpreter
# The order is that of `comm::Dtype`.
SUM_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)


class _Run(ctypes.Structure):
    """`Run` of interpreter.cpp."""

    _fields_ = [
        ("group", c_void_p),
        ("steps", c_void_p),
        ("num_steps", c_long),
        ("num_slots", c_long),
        ("piece_bytes", c_long),
        ("dtype", c_long),
        ("round", c_long),
        ("rounds", c_long),
        ("input", c_void_p),
        ("input_offsets", c_void_p),
        ("output", c_void_p),
        ("output_offsets", c_void_p),
        ("failed_step", c_long),
        ("expected_bytes", c_long),
        ("arrived_bytes", c_long),
    ]


class PlanRunner:
    """A plan with its shared memory. The constructor and all runs are collectives.

    Args:
        piece_bytes: the size of a slot, a multiple of 64. Longer messages are sent in pieces.
        timeout: the timeout of every wait.

    Raises:
        PlanError: the plan is not safe.
        ValueError, RuntimeError: as `ChannelGroup`. ValueError also if the ranks' plans differ.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        piece_bytes: int,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        if plan.num_ranks != ranks.size:
            raise ValueError(f"a plan of {plan.num_ranks} ranks for a group of {ranks.size}")
        if piece_bytes < 64 or piece_bytes % 64:
            raise ValueError(f"piece_bytes ({piece_bytes}) must be a positive multiple of 64")
        self._origins = check(plan)[ranks.rank]
        self.plan = plan
        self.piece_bytes = piece_bytes
        buffer_bytes = 2 * plan.num_slots * (piece_bytes + _HEADER_BYTES)
        purpose = f"the plan {plan.name} ({plan.digest()}) with buffers"
        self.group = ChannelGroup(ranks, buffer_bytes, timeout, purpose)
        program = plan.programs[ranks.rank]
        self._has_sums = any(step.action == "add" for step in program.steps)
        self._steps = _encode(program)
        self._input_offsets = (c_long * (plan.num_inputs + 1))()
        self._output_offsets = (c_long * (plan.num_outputs + 1))()
        self._run = _Run(
            group=self.group.pointer,
            steps=self._steps.data_ptr(),
            num_steps=len(program.steps),
            num_slots=plan.num_slots,
            piece_bytes=piece_bytes,
            input_offsets=ctypes.addressof(self._input_offsets),
            output_offsets=ctypes.addressof(self._output_offsets),
        )

    def run(
        self, source: Tensor, inputs: Sequence[int], result: Tensor, outputs: Sequence[int]
    ) -> None:
        """Send the messages in `source`, and write the received messages to `result`.

        Args:
            source, result: contiguous CPU tensors that contain the messages one after the other. If
                the plan has sums, their dtype must be in SUM_DTYPES.
            inputs, outputs: the bytes of each message.

        Raises:
            ValueError: the messages do not fit into the tensors.
            CollectiveError: a rank does not come within the timeout, or sends a message of another
                length.
        """
        self._set_inputs(source, inputs)
        self._set_outputs(result, outputs)
        self._check(library().comm_run(ctypes.addressof(self._run)))

    def _set_inputs(self, source: Tensor, inputs: Sequence[int]) -> None:
        self.group.check_usable()
        _check_messages("source", source, inputs, self.plan.num_inputs)
        if self._has_sums:
            if source.dtype not in SUM_DTYPES:
                raise ValueError(f"{self.plan.name}: sums of {source.dtype} are not supported")
            self._run.dtype = SUM_DTYPES.index(source.dtype)
        longest = max(inputs, default=0)
        self._run.rounds = max(-(-longest // self.piece_bytes), 1)
        self._run.input = source.data_ptr()
        self._input_offsets[:] = list(accumulate(inputs, initial=0))

    def _set_outputs(self, result: Tensor, outputs: Sequence[int]) -> None:
        _check_messages("result", result, outputs, self.plan.num_outputs)
        self._run.output = result.data_ptr()
        self._output_offsets[:] = list(accumulate(outputs, initial=0))

    def _check(self, status: int) -> None:
        """Raise the error that corresponds to a status of the interpreter."""
        if not status:
            return
        group, plan = self.group, self.plan
        step = plan.programs[group.rank].steps[self._run.failed_step]
        if status == _TIMEOUT:
            message = f"{plan.name}: rank {group.rank} got no signal from rank {step.peer}"
            group.fail_wait(message, step.peer)
        senders = "its neighbour"
        if step.destination.kind == "output":
            ranks = [str(rank) for rank, _ in self._origins[step.destination.index]]
            senders = f"rank {' or '.join(ranks)}"
        group.fail(
            f"{plan.name}: rank {group.rank} expects {self._run.expected_bytes} bytes from"
            f" {senders}, and {self._run.arrived_bytes} came"
        )


def _check_messages(name: str, tensor: Tensor, sizes: Sequence[int], number: int) -> None:
    """Raise ValueError if the messages do not fit into their tensor."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous CPU tensor, not strides {tensor.stride()} on"
            f" {tensor.device}"
        )
    if len(sizes) != number or min(sizes, default=0) < 0 or sum(sizes) > tensor.nbytes:
        raise ValueError(
            f"{name} of {tensor.nbytes} bytes does not hold {number} messages of {list(sizes)}"
            " bytes"
        )


def _encode(program: Program) -> Tensor:
    """The steps as int32 [steps, 7], in the format of `Step` in interpreter.cpp."""
    rows = []
    for step in program.steps:
        row = [ACTIONS.index(step.action), step.peer, int(step.with_signal)]
        for place in (step.source, step.destination):
            row += [KINDS.index(place.kind), place.index]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), 7)
