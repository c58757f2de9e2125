"""shards: tars of images and an index, as `swinv2-moe make-shards` writes them."""

from swinv2_moe.data.section import DataConfig, register_dataset
from swinv2_moe.data.shards import load_shards
from swinv2_moe.data.sources.base import Sources, copies_of_files


@register_dataset("shards")
def shards(config: DataConfig) -> Sources:
    train, val, class_names = load_shards(config.path)
    notes = [] if config.validation_only else copies_of_files(train, val)
    return Sources(train, val, class_names, tuple(notes))
