"""List the keys of the configuration."""


def main() -> None:
    from swinv2_moe.config.__main__ import main as list_keys

    list_keys()
