"""A model's prediction for a picture."""

from dataclasses import dataclass

TOP_K = 3  # classes of a prediction
BATCH_SIZE = 32  # pictures per forward pass


@dataclass(frozen=True)
class ClassProbability:
    """A class and its probability, 0 to 1."""

    class_name: str
    index: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of a picture, or the reason why it could not be read.

    Attributes:
        file: path of the picture; "" for an image in memory.
        top: K classes, the most probable first; empty if the picture could not be read.
        error: the reason why the picture could not be read; None if it could be read.
    """

    file: str
    top: tuple[ClassProbability, ...] = ()
    error: str | None = None

    @property
    def best(self) -> ClassProbability:
        """The most probable class.

        Raises:
            ValueError: the picture could not be read.
        """
        if self.error is not None:
            raise ValueError(f"{self.file or 'image'}: cannot be read ({self.error})")
        return self.top[0]

    @property
    def class_name(self) -> str:
        """Name of the most probable class; raises as `best`."""
        return self.best.class_name

    @property
    def index(self) -> int:
        """Index of the most probable class; raises as `best`."""
        return self.best.index

    @property
    def probability(self) -> float:
        """Probability of the most probable class, 0 to 1; raises as `best`."""
        return self.best.probability
