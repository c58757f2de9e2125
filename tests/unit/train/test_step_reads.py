"""How often a training step waits for its device."""

from host_reads import count_reads
from trainer_cases import make_batch, make_step


def test_a_step_reads_once():
    # A CPU's loop over experts reads where their rows end; a GPU's kernels do not, see
    # tests/distributed/test_host_reads.py.
    step = make_step(0, 1, "MODEL.MOE.NUM_EXPERTS 0")
    batch = make_batch(1)
    step.run([batch], 0)
    assert count_reads(lambda: step.run([batch], 1)) == ["tolist"]
    assert count_reads(lambda: step.run([batch, batch], 2)) == ["tolist"]
