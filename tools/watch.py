"""`swinv2-moe watch` from a clone of the repository."""

from swinv2_moe.commands import run

if __name__ == "__main__":
    run("watch")
