"""`swinv2-moe scaling` from a clone of the repository."""

from swinv2_moe.commands import run

if __name__ == "__main__":
    run("scaling")
