"""Plans: the shipped ones are safe and compute what they say; seeded faults are refused."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from ring_plans import ring_reduce_scatter

from moe_core.comm.check import PlanError, check
from moe_core.comm.plan import Input, Output, Plan, Program, Slot
from moe_core.comm.plans import (
    linear_all_gather,
    linear_all_to_all,
    linear_reduce_scatter,
)

SIZES = (1, 2, 3, 4, 8)


def shipped(num_ranks: int) -> list[Plan]:
    return [
        linear_all_to_all(num_ranks),
        linear_all_gather(num_ranks),
        linear_reduce_scatter(num_ranks),
        ring_reduce_scatter(num_ranks),
    ]


@pytest.mark.parametrize("num_ranks", SIZES)
def test_the_shipped_plans_compute_what_they_say(num_ranks):
    ranks = range(num_ranks)
    for plan in shipped(num_ranks):
        contents = check(plan)
        if "all-to-all" in plan.name:
            expected = [[[(i, j)] for i in ranks] for j in ranks]
        elif "all-gather" in plan.name:
            expected = [[[(i, 0)] for i in ranks] for j in ranks]
        else:
            expected = [[[(i, j) for i in ranks]] for j in ranks]
        if plan.name == "ring reduce-scatter":
            contents = [[sorted(terms) for terms in outputs] for outputs in contents]
        assert contents == expected, plan.name


def test_sums_are_in_the_order_that_is_documented():
    order = [terms for (terms,) in check(linear_reduce_scatter(3))]
    assert order == [[(0, j), (1, j), (2, j)] for j in range(3)]
    assert check(ring_reduce_scatter(3))[0] == [[(1, 0), (2, 0), (0, 0)]]


def two_ranks(rank_0: Callable[[Program], None], rank_1: Callable[[Program], None]) -> Plan:
    """Two inputs and outputs, three slots."""
    plan = Plan("test", 2, 2, 3, 2)
    rank_0(plan.programs[0])
    rank_1(plan.programs[1])
    return plan


def sends(peer: int, slots: tuple[int, int] = (0, 1)) -> Callable[[Program], None]:
    def write(program: Program) -> None:
        program.put(Input(0), peer, Slot(slots[0]), signal=False)
        program.put(Input(1), peer, Slot(slots[1]))
        program.wait(peer)
        program.copy(Slot(slots[0]), Output(0))
        program.copy(Slot(slots[1]), Output(1))

    return write


def changed(change: Callable[[Program], None]) -> Plan:
    """A sound plan whose rank 0 is changed."""
    plan = two_ranks(sends(1), sends(0))
    check(plan)
    change(plan.programs[0])
    return plan


def swap(first: int, second: int) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        steps = program.steps
        steps[first], steps[second] = steps[second], steps[first]

    return change


def put(source, peer, slot) -> Callable[[Program], None]:
    return lambda program: program.steps.insert(0, _step("put", source, peer, slot))


def _step(action: str, *arguments):
    program = Program()
    getattr(program, action)(*arguments)
    return program.steps[0]


def signal_first(program: Program) -> None:
    late = replace(program.steps[1], with_signal=False)
    program.steps[:2] = [_step("signal", 1), program.steps[0], late]


FAULTS = {
    "put to itself": (put(Input(0), 0, Slot(2)), r"step 0 .*rank 0 is no other rank of 2"),
    "no such rank": (put(Input(0), 2, Slot(2)), "rank 2 is no other rank of 2"),
    "no such input": (put(Input(2), 1, Slot(2)), "there are 2 inputs"),
    "no such slot": (put(Input(0), 1, Slot(3)), "there are 3 slots"),
    "negative slot": (put(Input(0), 1, Slot(-1)), "there are 3 slots"),
    "put to an output": (put(Input(0), 1, Output(0)), "cannot put input 0 to output 0"),
    "put of an output": (put(Output(0), 1, Slot(2)), "cannot put output 0"),
    "no such output": (lambda p: p.copy(Slot(0), Output(2)), "there are 2 outputs"),
    "copy to an input": (lambda p: p.copy(Slot(0), Input(0)), "cannot copy slot 0 to input 0"),
    "wait without signal": (
        lambda p: p.steps.insert(2, _step("wait", 1)),
        r"rank 0, step 3 \(wait rank 1\): a wait without a signal: rank 1 signals 1 times",
    ),
    "signal without wait": (
        lambda p: p.signal(1),
        r"rank 0, step 5 \(signal rank 1\): a signal that nobody waits for: rank 1 waits 1 times",
    ),
    "output before the wait": (swap(2, 3), r"rank 0, step 2 .* nothing was written to slot 0"),
    "no output": (lambda p: p.steps.pop(), "rank 0 never writes output 1"),
    "output twice": (lambda p: p.copy(Slot(0), Output(0)), "output 0 is written before"),
    "add to nothing": (
        lambda p: p.steps.insert(3, _step("add", Slot(0), Output(0))),
        "adds to output 0, to which nothing was copied",
    ),
    "slot that nobody writes": (
        lambda p: p.steps.insert(3, _step("copy", Slot(2), Output(0))),
        "nothing was written to slot 2 in this round",
    ),
    "signal before the put": (signal_first, "nothing was written|no signal orders it"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_with_its_rank_and_step(name):
    change, message = FAULTS[name]
    with pytest.raises(PlanError, match=message):
        check(changed(change))


def test_two_writes_without_order_are_refused():
    plan = Plan("test", 3, 1, 1, 1)
    for rank, program in enumerate(plan.programs):
        for peer in range(3):
            if peer != rank:
                program.put(Input(0), peer, Slot(0))
        for peer in range(3):
            if peer != rank:
                program.wait(peer)
        program.copy(Slot(0), Output(0))
    with pytest.raises(PlanError, match=r"rank 1, .* no signal orders it after test: rank 0, step"):
        check(plan)


def test_ranks_that_wait_for_each_other_are_refused():
    def waits_first(peer: int) -> Callable[[Program], None]:
        def write(program: Program) -> None:
            program.wait(peer)
            program.put(Input(0), peer, Slot(0))
            program.copy(Slot(0), Output(0))
            program.copy(Slot(0), Output(1))

        return write

    cycle = r"wait for each other: rank 0, step 0 \(wait rank 1\); rank 1, step 0 \(wait rank 0\)"
    with pytest.raises(PlanError, match=cycle):
        check(two_ranks(waits_first(1), waits_first(0)))


def test_a_rank_that_could_run_ahead_is_refused():
    """Rank 0 sends to rank 1 and hears nothing back."""

    def receives(program: Program) -> None:
        program.wait(0)
        program.copy(Slot(0), Output(0))
        program.copy(Slot(0), Output(1))

    def only_sends(program: Program) -> None:
        program.put(Input(0), 1, Slot(0))
        program.copy(Input(0), Output(0))
        program.copy(Input(0), Output(1))

    with pytest.raises(PlanError, match=r"rank 0 reads no message that rank 1 wrote or passed on"):
        check(two_ranks(only_sends, receives))


def mutations(plan: Plan, random_numbers: random.Random) -> list[Plan]:
    """The plan without one step, for a few steps."""
    mutants = []
    for rank, program in enumerate(plan.programs):
        steps = program.steps
        for index in random_numbers.sample(range(len(steps)), min(3, len(steps))):
            if steps[index].action != "add":  # without it the plan is safe, but another
                mutant = copy.deepcopy(plan)
                del mutant.programs[rank].steps[index]
                mutants.append(mutant)
    return mutants


def test_every_step_of_the_shipped_plans_is_needed():
    random_numbers = random.Random(0)
    refused = 0
    for num_ranks in (2, 3, 4):
        for plan in shipped(num_ranks):
            for mutant in mutations(plan, random_numbers):
                with pytest.raises(PlanError):
                    check(mutant)
                refused += 1
    assert refused > 80


def test_a_slot_for_the_messages_of_two_ranks_is_refused():
    plan = linear_all_to_all(3)
    order = [str(step) for step in plan.programs[0].steps]
    assert order[:2] == [
        "put input 1 -> slot 0 of rank 1 and signal",
        "put input 2 -> slot 0 of rank 2 and signal",
    ]
    crowded = copy.deepcopy(plan)
    for program in crowded.programs:  # every message to the slot of rank 0
        for index, step in enumerate(program.steps):
            if step.action == "put":
                program.steps[index] = replace(step, destination=Slot(0))
    with pytest.raises(PlanError, match="no signal orders it after"):
        check(crowded)


def test_equal_plans_have_equal_digests():
    assert linear_all_to_all(4).digest() == linear_all_to_all(4).digest()
    assert linear_reduce_scatter(4).digest() != ring_reduce_scatter(4).digest()
