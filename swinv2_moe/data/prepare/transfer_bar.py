"""Progress of a transfer in images and bytes."""

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from swinv2_moe.tables import Console


class TransferBar(Progress):
    """A context with a line in the terminal: images, images/s, MB, MB/s and the time left.

    Args:
        total: the amount of work, in units of `unit`.
        unit: "images" or "bytes".
    """

    def __init__(self, title: str, total: int, unit: str):
        super().__init__(
            TextColumn(title),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            TimeRemainingColumn(),
            console=Console(),
        )
        self.unit = unit
        self.total = total
        self.task = self.add_task("", total=total, done="")

    def skip(self, images: int, bytes: int) -> None:
        """Exclude the work of an earlier call from the total."""
        self.total -= self._count(images, bytes)
        self.update(self.task, total=self.total)

    def show(self, images: int, bytes: int) -> None:
        """Show the work done so far."""
        seconds = self.tasks[0].elapsed or 1.0
        done = ""
        if images:
            done = f"{images:,} images, {images / seconds:,.0f}/s, "
        done += f"{bytes / 1e6:,.0f} MB, {bytes / 1e6 / seconds:,.0f} MB/s"
        self.update(self.task, completed=self._count(images, bytes), done=done)

    def _count(self, images: int, bytes: int) -> int:
        """`images` or `bytes`, depending on the unit of the bar."""
        if self.unit == "images":
            return images
        return bytes
