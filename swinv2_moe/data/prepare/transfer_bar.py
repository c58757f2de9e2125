"""Progress of a transfer in images and bytes."""

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class TransferBar(Progress):
    """A line in the terminal while it is entered: images, images/s, MB, MB/s and the time left.

    Args:
        total: what there is to do, in `unit`s: "images" or "bytes".
    """

    def __init__(self, title: str, total: int, unit: str):
        super().__init__(
            TextColumn(title), BarColumn(), TextColumn("{task.fields[done]}"), TimeRemainingColumn()
        )
        self.unit = unit
        self.task = self.add_task("", total=total, done="")

    def skip(self, images: int, bytes: int) -> None:
        """So much of it was done before."""
        self.update(
            self.task, total=self.tasks[0].total - (images if self.unit == "images" else bytes)
        )

    def show(self, images: int, bytes: int) -> None:
        """What has been done so far."""
        seconds = self.tasks[0].elapsed or 1.0
        done = ""
        if images:
            done = f"{images:,} images, {images / seconds:,.0f}/s, "
        done += f"{bytes / 1e6:,.0f} MB, {bytes / 1e6 / seconds:,.0f} MB/s"
        self.update(self.task, completed=images if self.unit == "images" else bytes, done=done)
