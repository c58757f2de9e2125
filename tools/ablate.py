"""The old name of tools/sweep.py: `swinv2-moe ablate` from a clone of the repository."""

from swinv2_moe.commands import run

if __name__ == "__main__":
    run("ablate")
