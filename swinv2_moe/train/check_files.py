"""DATA.CHECK_FILES: reading every image before the first step."""

from swinv2_moe.config import DataConfig
from swinv2_moe.data import Data, UnreadableImages, evaluation_loader
from swinv2_moe.tables import Console
from swinv2_moe.train.distributed import World
from swinv2_moe.train.record import Bar


def check_files(config: DataConfig, data: Data, world: World) -> None:
    """Print one line for each image that cannot be read. Collective.

    The ranks share the work. It takes as long as reading the images of an epoch.

    Raises:
        UserError: more than DATA.MAX_BAD_SHARE of the images cannot be read.
    """
    console = Console(quiet=not world.is_main)
    unreadable = []
    for name, loader in (("training", data.train_loader), ("validation", data.val_loader)):
        loader = evaluation_loader(config, loader.dataset.source, world.rank, world.size)
        visible = world.is_main and console.is_terminal
        with Bar(console, f"checking {name} images", len(loader), 0, visible) as bar:
            for batch in loader:
                unreadable += batch.unreadable
                bar.advance("")
    # padding repeats images
    paths = dict.fromkeys(path for paths in world.gather(unreadable) for path in paths)
    if not paths:
        return
    size = data.train_size + data.val_size
    console.print(f"warning: {len(paths):,} of {size:,} images cannot be read:")
    for path in paths:
        console.print(f"  {path}")
    UnreadableImages(size, config.max_bad_share).add(paths)
