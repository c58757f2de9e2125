"""Samples and batches: reproducible augmentation, unreadable files, image modes."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from swinv2_moe.config import data_config
from swinv2_moe.data import IGNORE, Batch, UnreadableImages, build_data
from swinv2_moe.data.datasets import ImageDataset, read_image, seed_random_states
from swinv2_moe.data.sources import ImageFiles
from swinv2_moe.errors import UserError


def epoch_images(data, epoch=0):
    """{sampler index: the augmented image's bytes} of one epoch, and its batches."""
    data.set_epoch(epoch)
    batches = list(data.train_loader)
    order = list(data.train_loader.sampler)
    return dict(
        zip(
            order,
            (image.numpy().tobytes() for batch in batches for image in batch.images),
            strict=True,
        )
    ), batches


def draws():
    """One number from each generator that the augmentations draw from."""
    return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002


@pytest.fixture
def folder_config(make_config, make_folder, full_augmentation):
    return lambda **keys: make_config(
        full_augmentation,
        {"DATA.DATASET": "folder", "DATA.PATH": str(make_folder(per_class=8))},
        {name.replace("__", "."): value for name, value in keys.items()},
    )


def test_augmentation_is_the_same_for_any_number_of_workers(folder_config):
    config = folder_config()
    reference, _ = epoch_images(build_data(data_config(config)), epoch=3)
    assert len(reference) == 16
    for workers in (1, 2):
        config.DATA.NUM_WORKERS = workers
        assert epoch_images(build_data(data_config(config)), epoch=3)[0] == reference


@pytest.mark.parametrize("world_size", [2, 4])
def test_augmentation_and_steps_are_the_same_for_any_number_of_ranks(folder_config, world_size):
    config = folder_config(DATA__BATCH_SIZE=8)
    reference, whole = epoch_images(build_data(data_config(config)), epoch=1)
    config.DATA.BATCH_SIZE = 8 // world_size
    ranks = [
        epoch_images(build_data(data_config(config), rank, world_size), epoch=1)
        for rank in range(world_size)
    ]
    together = {index: image for images, _ in ranks for index, image in images.items()}
    assert together == reference
    for step, batch in enumerate(whole):
        interleaved = torch.stack([rank[step].images for _, rank in ranks], dim=1).flatten(0, 1)
        assert torch.equal(interleaved, batch.images)
        assert torch.equal(
            torch.stack([rank[step].targets for _, rank in ranks], dim=1).flatten(), batch.targets
        )


def test_epoch_seed_and_index_each_change_the_augmentation(folder_config):
    config = folder_config()
    data = build_data(data_config(config))
    epochs = [epoch_images(data, epoch)[0] for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2]
    assert all(epochs[0][index] != epochs[1][index] for index in epochs[0])
    orders = []
    for epoch in (0, 1):
        data.set_epoch(epoch)
        orders.append(list(data.train_loader.sampler))
    assert orders[0] != orders[1]
    source = data.train_loader.dataset.source
    # one file under two indices
    source.paths[1], source.targets[1] = source.paths[0], source.targets[0]
    assert not torch.equal(data.train_loader.dataset[0].image, data.train_loader.dataset[1].image)
    config.SEED = 1
    other = epoch_images(build_data(data_config(config)))[0]
    assert all(epochs[0][index] != other[index] for index in epochs[0])


def test_the_seeds_of_swapped_numbers_differ():
    seed_random_states(0, 0, 1)
    first = draws()
    seed_random_states(0, 1, 0)
    assert not set(first) & set(draws())


def test_generators_of_one_sample_are_not_copies_of_each_other():
    seed_random_states(1, 2, 3)
    numpy_draws = np.random.randint(0, 2**32, 8, dtype=np.uint64)  # noqa: NPY002
    torch_draws = torch.randint(0, 2**32, (8,)).numpy()
    assert not set(numpy_draws.tolist()) & set(torch_draws.tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_random_states_alone(folder_config, workers):
    data = build_data(data_config(folder_config(DATA__NUM_WORKERS=workers)))

    seed_random_states(5)
    want = draws()
    seed_random_states(5)
    epoch_images(data)
    list(data.val_loader)
    assert draws() == want


def test_workers_run_one_thread_each_and_end_with_the_epoch(folder_config):
    data = build_data(data_config(folder_config(DATA__NUM_WORKERS=2)))
    data.train_loader.dataset.transform = lambda image: torch.full(
        (3, 16, 16), float(torch.get_num_threads())
    )
    batch = next(iter(data.train_loader))
    assert batch.images.unique().tolist() == [1.0]
    assert not data.train_loader.persistent_workers


def test_workers_outlive_the_signals_that_make_a_run_save(folder_config):
    """A scheduler signals every process of a job, Ctrl-C all in the foreground; torch's workers
    would end, and their run with an error."""
    data = build_data(data_config(folder_config(DATA__NUM_WORKERS=2)))
    batches = iter(data.train_loader)

    def signal_workers():
        for worker in batches._workers:
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                os.kill(worker.pid, number)

    signal_workers()  # which have hardly begun
    assert next(batches).images.shape == (4, 3, 16, 16)
    signal_workers()
    assert 1 + len(list(batches)) == len(data.train_loader) > 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


MASKS = """
import multiprocessing, sys
from pathlib import Path

def mask(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    from swinv2_moe.data.build import Loader

    batches = iter(Loader(range(4), num_workers=2))
    print([mask(worker.pid) for worker in batches._workers], mask("self"))
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_block_the_signals_under_every_start_method(method, tmp_path):
    """Python's resource tracker, which spawn and forkserver start, lifts the block of two."""
    script = tmp_path / "masks.py"
    script.write_text(MASKS)
    done = subprocess.run(
        [sys.executable, script, method], capture_output=True, text=True, check=True
    )
    blocked = sum(1 << (number - 1) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
    assert done.stdout.split() == [f"[{blocked},", f"{blocked}]", "0"], done.stderr


def test_batch_types(folder_config):
    batch = next(iter(build_data(data_config(folder_config())).train_loader))
    assert isinstance(batch, Batch)
    assert (batch.images.shape, batch.images.dtype) == ((4, 3, 16, 16), torch.float32)
    assert (batch.targets.shape, batch.targets.dtype) == ((4,), torch.int64)
    assert batch.unreadable == []


def test_val_targets_count_every_image_once_over_ranks(folder_config):
    config = folder_config(DATA__BATCH_SIZE=3)  # 16 images over 3 ranks: 6 each, 2 of them padding
    ranks = [list(build_data(data_config(config), rank, 3).val_loader) for rank in range(3)]
    assert [[len(batch.targets) for batch in rank] for rank in ranks] == [[3, 3]] * 3
    targets = torch.cat([batch.targets for rank in ranks for batch in rank])
    assert (targets == IGNORE).sum() == 2
    assert torch.bincount(targets[targets != IGNORE]).tolist() == [8, 8]


def damage(path, kind):
    data = path.read_bytes()
    if kind == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"truncated": data[: len(data) // 2], "empty": b"", "text": b"not an image"}[kind]
        )


@pytest.mark.parametrize("kind", ["missing", "truncated", "empty", "text"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_replaced_in_training_and_blank_in_validation(
    folder_config, kind, workers
):
    config = folder_config(DATA__NUM_WORKERS=workers, DATA__MAX_BAD_SHARE=0.5)
    data = build_data(data_config(config))
    whole = epoch_images(data)[0]
    bad = []
    for split in ("train", "val"):
        # indices 14 and 15: the next readable image is number 0
        for name in ("dog/6.png", "dog/7.png"):
            bad.append(f"{config.DATA.PATH}/{split}/{name}")
            damage(Path(bad[-1]), kind)
    images, batches = epoch_images(data)
    assert {index for index in whole if images[index] != whole[index]} == {14, 15}
    assert {path for batch in batches for path in batch.unreadable} == set(bad[:2])
    targets = dict(
        zip(
            data.train_loader.sampler, torch.cat([b.targets for b in batches]).tolist(), strict=True
        )
    )
    assert targets[15] == targets[14] == 0
    assert all(targets[index] == index // 8 for index in range(14))
    val = list(data.val_loader)
    assert [path for batch in val for path in batch.unreadable] == bad[2:]
    assert torch.cat([batch.targets for batch in val]).tolist() == [0] * 8 + [1] * 6 + [IGNORE] * 2
    assert not torch.cat([batch.images for batch in val])[-2:].any()


def test_the_replacement_is_augmented_like_any_image_and_deterministic(folder_config):
    config = folder_config(DATA__MAX_BAD_SHARE=0.5)
    data = build_data(data_config(config))
    damage(Path(f"{config.DATA.PATH}/train/cat/2.png"), "empty")
    dataset = data.train_loader.dataset
    first, again = dataset[2], dataset[2]
    assert torch.equal(first.image, again.image)
    assert first.target == 0
    shutil.copy(f"{config.DATA.PATH}/train/cat/3.png", f"{config.DATA.PATH}/train/cat/2.png")
    # number 3's pixels with number 2's random numbers
    assert torch.equal(dataset[2].image, first.image)


def test_a_run_over_vanished_images_stops_instead_of_walking_the_whole_set(folder_config):
    config = folder_config(DATA__MAX_BAD_SHARE=0.125)
    data = build_data(data_config(config))
    shutil.rmtree(f"{config.DATA.PATH}/train")
    samples = [data.train_loader.dataset[index] for index in range(16)]
    assert all(len(sample.unreadable) == 5 for sample in samples)  # one more than 4 of all 32
    # IGNORE would break a training loss
    assert [sample.target for sample in samples] == [0] * 8 + [1] * 8
    with pytest.raises(
        UserError, match=r"of 32 images could not be read, DATA\.MAX_BAD_SHARE .* 0\.125"
    ):
        UnreadableImages(data.train_size + data.val_size, config.DATA.MAX_BAD_SHARE).add(
            samples[0].unreadable
        )


def test_unreadable_images_are_counted_once_and_bounded():
    count = UnreadableImages(size=100, max_share=0.02)
    assert count.summary() is None
    count.add(["a", "b", "a"])
    count.add(["b"])
    assert count.summary() == "2 of 100 images could not be read; the first: a"
    with pytest.raises(UserError, match=r"^3 of 100 images .* share of 0\.02; the first: a$"):
        count.add(["c"])
    # whatever the share, something must be left
    with pytest.raises(UserError, match=r"^2 of 2 images"):
        UnreadableImages(size=2, max_share=1.0).add(["a", "b"])


def grey(values, dtype):
    return Image.fromarray(np.full((6, 6), values, dtype))


@pytest.mark.parametrize(
    ("name", "image", "rgb"),
    [
        ("grey.png", grey(90, np.uint8), (90, 90, 90)),
        ("rgba.png", Image.new("RGBA", (6, 6), (10, 200, 30, 128)), (10, 200, 30)),
        ("grey-alpha.png", Image.new("LA", (6, 6), (77, 3)), (77, 77, 77)),
        ("palette.png", Image.new("RGB", (6, 6), (250, 0, 5)).quantize(4), (250, 0, 5)),
        ("bits.png", Image.new("1", (6, 6), 1), (255, 255, 255)),
        ("cmyk.tif", Image.new("CMYK", (6, 6), (0, 255, 255, 0)), (255, 0, 0)),
        ("sixteen.png", grey(128 * 256 + 7, np.uint16), (128, 128, 128)),
        ("sixteen.tif", grey(20 * 256, np.uint16), (20, 20, 20)),
        ("sixteen.pgm", grey(40 * 256, np.int32), (40, 40, 40)),
    ],
)
def test_every_mode_becomes_rgb_or_grey(tmp_path, name, image, rgb):
    image.save(tmp_path / name)
    source = ImageFiles(str(tmp_path), np.array([name.encode()]), np.zeros(1, np.int64))
    assert read_image(source, 0, "RGB").getpixel((3, 3)) == rgb
    want = Image.new("RGB", (1, 1), rgb).convert("L").getpixel((0, 0))
    assert read_image(source, 0, "L").getpixel((3, 3)) == want


def test_a_broken_exif_tag_prints_nothing(tmp_path):
    exif = b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\x00"  # announces 255 tags and ends
    Image.new("RGB", (6, 6)).save(tmp_path / "a.jpg", exif=exif)
    read = f"from PIL import Image; Image.open({str(tmp_path / 'a.jpg')!r}).load()"
    for code, warned in ((read, True), (f"import swinv2_moe.data.datasets; {read}", False)):
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert ("Corrupt EXIF" in run.stderr) is warned


@pytest.mark.parametrize("channels", [0, 2, 4])
def test_only_one_or_three_channels(make_config, channels):
    config = make_config({"MODEL.SWINV2.IN_CHANS": channels})
    with pytest.raises(UserError, match=rf"IN_CHANS is {channels}"):
        ImageDataset(
            ImageFiles("", np.array([b""]), np.zeros(1)), data_config(config), is_train=True
        )


def test_grey_batches(folder_config):
    config = folder_config()
    config.MODEL.SWINV2.IN_CHANS, config.DATA.MEAN, config.DATA.STD = 1, [0.5], [0.25]
    batch = next(iter(build_data(data_config(config)).train_loader))
    assert batch.images.shape == (4, 1, 16, 16)
