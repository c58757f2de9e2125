"""`swinv2-moe predict` from a clone of the repository."""

from swinv2_moe.command import run_command
from swinv2_moe.commands.predict import main

if __name__ == "__main__":
    run_command(main)
