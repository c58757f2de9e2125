"""The checkpoint of a run that a command uses: `--checkpoint best`, `latest` or a step."""

from pathlib import Path

from swinv2_moe.errors import UserError
from swinv2_moe.train.checkpoint import checkpoints_below, order_of


def select_checkpoint(run: str, which: str = "best") -> tuple[str, str]:
    """Select the checkpoint of a run.

    Args:
        run: a run, or a checkpoint, which is taken as it is.
        which: "best" (highest validation accuracy; the newest if none is marked), "latest" or the
            number of a step.

    Returns:
        The argument for `open_deployed`, and a line about the selection. For the newest checkpoint,
        the argument is the run itself, so that damaged checkpoints are skipped. The line names the
        checkpoint and the reason; it is empty if `run` is a checkpoint.

    Raises:
        UserError: `which` is none of these, or the run has no checkpoint of that step.
    """
    if which not in ("best", "latest") and not which.isdecimal():
        raise UserError(f"--checkpoint {which}: must be best, latest or the number of a step")
    root = Path(run)
    if (root / "checkpoints").is_dir():
        root = root / "checkpoints"
    newest_first = checkpoints_below(root)
    if not newest_first:
        return run, ""
    if which == "latest":
        return run, "the newest checkpoint of the run"
    best = root / "best"
    if which == "best" and not best.is_dir():
        return run, "the newest checkpoint of the run, which has no best one"
    newest = newest_first[0].name
    if which == "best":
        name = best.resolve().name
        if name == newest:
            return run, f"{name}: the best in validation and the newest"
        return str(root / name), f"{name}: the best in validation (--checkpoint latest: {newest})"
    steps = [order_of(directory)[0] for directory in newest_first]
    if int(which) not in steps:
        listed = ", ".join(map(str, sorted(set(steps))))
        raise UserError(f"--checkpoint {which}: {run} has checkpoints of the steps {listed}")
    name = newest_first[steps.index(int(which))].name
    return str(root / name), f"{name}: as --checkpoint says"
