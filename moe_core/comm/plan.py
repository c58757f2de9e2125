"""Plans: the steps of each rank in a collective.

A plan has one program for each rank. A program is a list of steps. The operands of a step are

- inputs: the rank's own messages, of any length;
- slots: places in the rank's shared buffer, which other ranks write, each for one message;
- outputs: messages that the rank returns.

>>> plan = Plan("exchange of two", num_ranks=2, num_inputs=1, num_slots=1, num_outputs=1)
>>> for rank in range(2):
...     program = plan.programs[rank]
...     program.put(Input(0), 1 - rank, Slot(0))
...     program.wait(1 - rank)
...     program.copy(Slot(0), Output(0))
>>> check(plan)  # moe_core.comm.check

Lengths are known only when a plan runs. A message that is longer than a slot is sent in pieces. The
programs are repeated, one round for each piece, until the longest message of any rank has arrived.
Every slot exists twice, for even and for odd rounds. So a rank may write to slots of one round
while another rank still reads slots of the previous round.
"""

import hashlib
from dataclasses import dataclass, field

ACTIONS = ("put", "signal", "wait", "copy", "add")
KINDS = ("none", "input", "slot", "output")


@dataclass(frozen=True)
class Place:
    """An operand of a step."""

    kind: str = "none"
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


def Input(index: int) -> Place:
    """A message of this rank."""
    return Place("input", index)


def Slot(index: int) -> Place:
    """A place for one message in a rank's shared buffer."""
    return Place("slot", index)


def Output(index: int) -> Place:
    """A message that this rank returns."""
    return Place("output", index)


@dataclass(frozen=True)
class Step:
    """One step of a rank.

    Attributes:
        action: a name in ACTIONS.
        peer: the other rank; -1 for copy and add.
        with_signal: whether a put signals its peer.
    """

    action: str
    peer: int = -1
    source: Place = Place()
    destination: Place = Place()
    with_signal: bool = False

    def __str__(self) -> str:
        if self.action == "put":
            signal = " and signal" if self.with_signal else ""
            return f"put {self.source} -> {self.destination} of rank {self.peer}{signal}"
        if self.action in ("signal", "wait"):
            return f"{self.action} rank {self.peer}"
        return f"{self.action} {self.source} -> {self.destination}"


@dataclass
class Program:
    """The steps of one rank, in order."""

    steps: list[Step] = field(default_factory=list)

    def put(self, source: Place, peer: int, slot: Place, signal: bool = True) -> None:
        """Write an input, or the message in a slot, to a slot of the peer."""
        self.steps.append(Step("put", peer, source, slot, signal))

    def signal(self, peer: int) -> None:
        """Tell the peer that all earlier steps are done."""
        self.steps.append(Step("signal", peer))

    def wait(self, peer: int) -> None:
        """Wait for the peer's next signal."""
        self.steps.append(Step("wait", peer))

    def copy(self, source: Place, destination: Place) -> None:
        """Write an input or a slot to an output, or to a slot of this rank."""
        self.steps.append(Step("copy", -1, source, destination))

    def add(self, source: Place, destination: Place) -> None:
        """Add an input or a slot to an output, or to a slot of this rank."""
        self.steps.append(Step("add", -1, source, destination))


@dataclass
class Plan:
    """A program for each rank.

    Args:
        name: the name in error messages.
        num_ranks: P.
        num_inputs, num_slots, num_outputs: input messages, buffer slots and output messages of
            each rank.
    """

    name: str
    num_ranks: int
    num_inputs: int
    num_slots: int
    num_outputs: int
    programs: list[Program] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.programs:
            self.programs = [Program() for _ in range(self.num_ranks)]

    def digest(self) -> str:
        """A hash that is equal for equal plans, in any process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]
