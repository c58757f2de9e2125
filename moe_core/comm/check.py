"""Checks a plan before it runs.

Three rounds are simulated symbolically. In turn, each rank advances until it has to wait. Each rank
has a vector clock: clock[r] is the number of steps of rank r that are known to have happened. A
signal carries the sender's clock to the rank that waits for it. A step is ordered after an earlier
step if the clock of its rank includes the earlier step. Every round has the same signals and waits,
and a slot is reused after two rounds. So three rounds show every conflict.
"""

# P ranks

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from moe_core.comm.plan import Place, Plan, Step

_ROUNDS = 3
# The content of a message: (rank, input) of every message in its sum.
Contents = list[tuple[int, int]]


class PlanError(ValueError):
    """A plan that could hang, or whose result could differ between runs."""


@dataclass
class _Access:
    """An access to a slot: the rank, its time and its step."""

    rank: int
    time: int  # on the rank's own clock
    where: str


@dataclass
class _Slot:
    """A slot of one rank, for even or odd rounds."""

    round: int = -1  # the round of the last write
    write: _Access | None = None
    reads: list[_Access] = field(default_factory=list)  # since that write
    contents: Contents = field(default_factory=list)
    informed: set[int] = field(default_factory=set)


@dataclass
class _Rank:
    clock: list[int]  # [P]
    next_step: int = 0  # counted over all rounds
    # In this round: the ranks whose longest message this rank knows, and the outputs it wrote.
    informed: set[int] = field(default_factory=set)
    outputs: dict[int, Contents] = field(default_factory=dict)


def check(plan: Plan) -> list[list[Contents]]:
    """Raise an error if a plan is not safe.

    Returns:
        For each rank and output, [P][outputs], the (rank, input) of every message in its sum.

    Raises:
        PlanError: the first fault, with its ranks and steps. Faults are: a peer or place that does
            not exist; a wait without a signal, or a signal without a wait; ranks that wait for each
            other in a cycle; a write or read of a slot that is not ordered relative to another
            write; an output that is not written exactly once; a rank that cannot know the number of
            rounds.
    """
    for rank, program in enumerate(plan.programs):
        for index, step in enumerate(program.steps):
            _check_places(plan, rank, step, where(plan, rank, index))
    _check_signals(plan)
    return _Play(plan).run()


def where(plan: Plan, rank: int, index: int) -> str:
    """Describe a step, for error messages."""
    step = plan.programs[rank].steps[index]
    return f"{plan.name}: rank {rank}, step {index} ({step})"


def _check_places(plan: Plan, rank: int, step: Step, place: str) -> None:
    if step.action in ("put", "signal", "wait"):
        if step.peer == rank or not 0 <= step.peer < plan.num_ranks:
            raise PlanError(f"{place}: rank {step.peer} is no other rank of {plan.num_ranks}")
        if step.action != "put":
            return
    allowed = ("slot",) if step.action == "put" else ("slot", "output")
    if step.source.kind not in ("input", "slot") or step.destination.kind not in allowed:
        raise PlanError(f"{place}: cannot {step.action} {step.source} to {step.destination}")
    sizes = {"input": plan.num_inputs, "slot": plan.num_slots, "output": plan.num_outputs}
    for operand in (step.source, step.destination):
        if not 0 <= operand.index < sizes[operand.kind]:
            raise PlanError(f"{place}: there are {sizes[operand.kind]} {operand.kind}s")


def _signals(plan: Plan, rank: int, peer: int) -> Iterator[int]:
    """The steps of `rank` that signal `peer`."""
    for index, step in enumerate(plan.programs[rank].steps):
        if step.peer == peer and (step.action == "signal" or step.with_signal):
            yield index


def _waits(plan: Plan, rank: int, peer: int) -> Iterator[int]:
    for index, step in enumerate(plan.programs[rank].steps):
        if step.peer == peer and step.action == "wait":
            yield index


def _check_signals(plan: Plan) -> None:
    """Check that each pair of ranks has equally many waits and signals."""
    for sender in range(plan.num_ranks):
        for receiver in range(plan.num_ranks):
            signals = list(_signals(plan, sender, receiver))
            waits = list(_waits(plan, receiver, sender))
            if len(waits) > len(signals):
                step = where(plan, receiver, waits[len(signals)])
                raise PlanError(
                    f"{step}: a wait without a signal: rank {sender} signals {len(signals)} times"
                )
            if len(signals) > len(waits):
                step = where(plan, sender, signals[len(waits)])
                raise PlanError(
                    f"{step}: a signal that nobody waits for: rank {receiver} waits {len(waits)}"
                    " times"
                )


class _Play:
    """The symbolic simulation of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ranks = [_Rank([0] * plan.num_ranks) for _ in range(plan.num_ranks)]
        self.slots: dict[tuple[int, int, int], _Slot] = {}  # by owner, index, parity
        self.signals: dict[tuple[int, int], deque[list[int]]] = {}  # the senders' clocks

    def run(self) -> list[list[Contents]]:
        moved = True
        while moved:
            moved = False
            for rank in range(self.plan.num_ranks):
                while self._advance(rank):
                    moved = True
        for rank, state in enumerate(self.ranks):
            if state.next_step < _ROUNDS * len(self.plan.programs[rank].steps):
                raise PlanError(self._cycle(rank))
        return [
            [state.outputs[output] for output in range(self.plan.num_outputs)]
            for state in self.ranks
        ]

    def _advance(self, rank: int) -> bool:
        """Run the next step of a rank. Returns False if the rank has to wait or has finished."""
        state, program = self.ranks[rank], self.plan.programs[rank].steps
        round_index, index = divmod(state.next_step, max(len(program), 1))
        if round_index == _ROUNDS or not program:
            return False
        step = program[index]
        if step.action == "wait":
            arrived = self.signals.get((step.peer, rank))
            if not arrived:
                return False
            state.clock = [max(pair) for pair in zip(state.clock, arrived.popleft(), strict=True)]
        if index == 0:
            state.informed = {rank}
            state.outputs = {}
        state.clock[rank] += 1
        self._take(rank, step, round_index, where(self.plan, rank, index))
        if step.action == "signal" or step.with_signal:
            self.signals.setdefault((rank, step.peer), deque()).append(list(state.clock))
        state.next_step += 1
        if index == len(program) - 1:
            self._end_round(rank)
        return True

    def _take(self, rank: int, step: Step, round_index: int, place: str) -> None:
        if step.action in ("signal", "wait"):
            return
        contents = self._read(rank, step.source, round_index, place)
        if step.destination.kind == "output":
            self._write_output(rank, step, contents, place)
            return
        owner = step.peer if step.action == "put" else rank
        if step.action == "add":
            contents = self._read(rank, step.destination, round_index, place) + contents
        self._write_slot(rank, owner, step.destination.index, round_index, contents, place)

    def _read(self, rank: int, source: Place, round_index: int, place: str) -> Contents:
        if source.kind == "input":
            return [(rank, source.index)]
        slot = self._slot(rank, source.index, round_index)
        if slot.write is None or slot.round != round_index:
            raise PlanError(f"{place}: nothing was written to {source} in this round")
        self._check_order(rank, slot.write, place)
        slot.reads.append(_Access(rank, self.ranks[rank].clock[rank], place))
        self.ranks[rank].informed |= slot.informed
        return slot.contents

    def _write_slot(
        self, rank: int, owner: int, index: int, round_index: int, contents: Contents, place: str
    ) -> None:
        slot = self._slot(owner, index, round_index)
        earlier = slot.reads if slot.write is None else [slot.write] + slot.reads
        for access in earlier:
            self._check_order(rank, access, place)
        state = self.ranks[rank]
        slot.write = _Access(rank, state.clock[rank], place)
        slot.round, slot.reads, slot.contents = round_index, [], contents
        slot.informed = set(state.informed)

    def _write_output(self, rank: int, step: Step, contents: Contents, place: str) -> None:
        outputs, index = self.ranks[rank].outputs, step.destination.index
        if step.action == "copy":
            if index in outputs:
                raise PlanError(f"{place}: output {index} is written before")
            outputs[index] = contents
            return
        if index not in outputs:
            raise PlanError(f"{place}: adds to output {index}, to which nothing was copied")
        outputs[index] = outputs[index] + contents

    def _slot(self, owner: int, index: int, round_index: int) -> _Slot:
        return self.slots.setdefault((owner, index, round_index % 2), _Slot())

    def _check_order(self, rank: int, earlier: _Access, place: str) -> None:
        """Raise PlanError if the access of `rank` is not ordered after `earlier`."""
        if self.ranks[rank].clock[earlier.rank] < earlier.time:
            raise PlanError(f"{place}: no signal orders it after {earlier.where}")

    def _end_round(self, rank: int) -> None:
        state, plan = self.ranks[rank], self.plan
        everyone = set(range(plan.num_ranks))
        if state.informed != everyone:
            silent = min(everyone - state.informed)
            raise PlanError(
                f"{plan.name}: rank {rank} reads no message that rank {silent} wrote or passed on,"
                " so it cannot know how many rounds that rank needs"
            )
        for output in range(plan.num_outputs):
            if output not in state.outputs:
                raise PlanError(f"{plan.name}: rank {rank} never writes output {output}")

    def _cycle(self, rank: int) -> str:
        """The ranks that wait for each other, from `rank` on."""
        text, seen = [], set()
        while rank not in seen:
            seen.add(rank)
            index = self.ranks[rank].next_step % len(self.plan.programs[rank].steps)
            step = self.plan.programs[rank].steps[index]
            text.append(f"rank {rank}, step {index} ({step})")
            rank = step.peer
        return f"{self.plan.name}: ranks wait for each other: {'; '.join(text)}"
