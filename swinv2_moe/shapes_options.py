"""Options of a generated data set for detection."""

from dataclasses import dataclass

from swinv2_moe.errors import UserError


@dataclass(frozen=True)
class Options:
    """Options of a generated data set.

    Raises:
        UserError: values out of range.
    """

    train: int = 40
    val: int = 10
    min_size: int = 160  # pixels; height and width are drawn independently
    max_size: int = 256
    max_objects: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        minimum = {"train": 1, "val": 1, "min_size": 64, "max_objects": 1, "seed": 0}
        for name, least in minimum.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}, it must be at least {least}")
        if self.max_size < self.min_size:
            raise UserError(
                f"max_size ({self.max_size}) must be at least min_size ({self.min_size})"
            )
