"""A number that changes during training, as text in a configuration.

`UNIT POSITION:VALUE POSITION:VALUE ... [linear]`. UNIT is `epoch` or `step`. A value holds from its
position to the next one; with `linear`, values between two positions are interpolated. The last
value holds to the end.

    epoch 0:2 10:1                top-2, and top-1 after ten epochs
    step 0:4 5000:1 linear        from 4 to 1 in 5,000 steps, rounded where it is used
"""

import itertools
import math
from typing import NamedTuple

_FORM = "it must be like 'epoch 0:2 10:1' or 'step 0:4 5000:1 linear'"


class Schedule(NamedTuple):
    """A function of the position in a run."""

    unit: str  # of the positions: "epoch" or "step"
    positions: list[float]  # from 0, increasing
    values: list[float]
    is_linear: bool

    def value(self, epoch: float, step: int) -> float:
        """The value after `epoch` epochs (may be fractional) and `step` steps."""
        position = epoch
        if self.unit == "step":
            position = step
        index = 0
        while index + 1 < len(self.positions) and position >= self.positions[index + 1]:
            index += 1
        if not self.is_linear or index + 1 == len(self.values):
            return self.values[index]
        start, end = self.positions[index], self.positions[index + 1]
        share = (position - start) / (end - start)
        return self.values[index] + share * (self.values[index + 1] - self.values[index])

    def check_top_k(self, num_experts: int) -> None:
        """Raise ValueError unless the values are whole numbers from 1 to `num_experts`. With 0
        experts (a dense model) there is no upper bound."""
        for value in self.values:
            if value < 1 or value != int(value):
                raise ValueError(f"{value:g} is not a whole number from 1 on")
            if num_experts and value > num_experts:
                raise ValueError(f"{value:g} must be at most MODEL.MOE.NUM_EXPERTS ({num_experts})")


def parse_schedule(text: str) -> Schedule | None:
    """Parse `text`. Returns None if it is empty.

    Raises:
        ValueError: the text has another form; the positions do not increase from 0; values are not
            finite.
    """
    if not text:
        return None
    words = text.split()
    is_linear = len(words) > 0 and words[-1] == "linear"
    if is_linear:
        words.pop()
    if len(words) < 2 or words[0] not in ("epoch", "step"):
        raise ValueError(_FORM)
    positions = []
    values = []
    for word in words[1:]:
        position, _, value = word.partition(":")
        try:
            positions.append(float(position))
            values.append(float(value))
        except ValueError:
            raise ValueError(f"{word!r} is not POSITION:VALUE, {_FORM}") from None
    if not all(map(math.isfinite, positions + values)):
        raise ValueError("its numbers must be finite")
    if positions[0] != 0:
        raise ValueError(f"its first position is {positions[0]:g}, it must be 0")
    for earlier, later in itertools.pairwise(positions):
        if later <= earlier:
            raise ValueError(f"position {later:g} must be above {earlier:g}")
    return Schedule(words[0], positions, values, is_linear)
