"""Options of a throughput measurement."""

from dataclasses import dataclass

from swinv2_moe.errors import UserError
from swinv2_moe.measure.spread import check_rounds

# matrix products in units of a forward pass; the backward pass has two for each of them
PASSES = {"inference": 1, "training": 3}
DTYPES = ("float32", "bfloat16", "float16")
SWITCH = ("off", "on")


@dataclass(frozen=True)
class Options:
    """Options of a measurement: all combinations of the first five fields are measured. Without
    capacity factors, the configured one is used.

    Raises:
        UserError: a field has an invalid value.
    """

    mode: tuple[str, ...] = ("inference",)
    batch_sizes: tuple[int, ...] = (1, 8)  # images of a rank
    dtypes: tuple[str, ...] = ("float32",)
    capacity_factors: tuple[float, ...] = ()
    compile: tuple[str, ...] = ("off",)
    rounds: int = 10
    warmup: int = 2
    graph: bool = False  # replay CUDA graphs of the models' passes

    def __post_init__(self) -> None:
        for option, values, allowed in (
            ("mode", self.mode, PASSES),
            ("dtypes", self.dtypes, DTYPES),
            ("compile", self.compile, SWITCH),
        ):
            for value in values:
                if value not in allowed:
                    raise UserError(f"--{option} is {value!r}, allowed: {', '.join(allowed)}")
        if min(self.batch_sizes) < 1:
            raise UserError(f"--batch-sizes is {min(self.batch_sizes)}, it must be at least 1")
        check_rounds(self.rounds, self.warmup)
