"""`swinv2-moe show-routing` from a clone of the repository."""

from swinv2_moe.commands import run

if __name__ == "__main__":
    run("show-routing")
