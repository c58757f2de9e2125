"""`python -m swinv2_moe NAME` runs a command. Under torchrun, use `-m swinv2_moe NAME`."""

from swinv2_moe.commands import main

if __name__ == "__main__":
    main()
