"""`swinv2-moe compress` from a clone of the repository."""

from swinv2_moe.commands import run

if __name__ == "__main__":
    run("compress")
