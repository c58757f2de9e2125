"""A layer of moe_core.compat.tutel trains as Tutel's own does: the same losses in every step.

The figures were recorded from Tutel's CPU build; tests/tutel_cases.py says how.
"""

import pytest
from tutel_cases import CASES, losses, recorded

from moe_core.compat.tutel import moe, net


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_those_of_tutel(name):
    # fp32 (eps 6e-8) in other orders of sums: 4 steps of 2 layers of at most 38 * 24 terms
    assert losses(CASES[name], moe, net) == pytest.approx(recorded(1)[name], rel=2e-5, abs=1e-6)


def test_the_cases_differ():
    """A case whose options were ignored would have the losses of another one."""
    firsts = [tuple(values) for name, values in recorded(1).items() if name != "fp64"]
    same_as_top2 = {"dropless"}  # nothing is dropped at a factor of 1 either
    assert len(set(firsts)) >= len(firsts) - len(same_as_top2)
