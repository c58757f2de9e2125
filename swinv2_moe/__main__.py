"""`python -m swinv2_moe NAME`: the commands, also under torchrun with -m swinv2_moe."""

from swinv2_moe.commands import main

if __name__ == "__main__":
    main()
