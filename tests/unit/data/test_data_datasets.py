"""Samples and batches: reproducible augmentation, unreadable files, image modes."""

import os
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from swinv2_moe.data.build import build_data
from swinv2_moe.data.datasets import IGNORE, Batch, UnreadableImages, read_image, seed_random_states
from swinv2_moe.data.sources import ImageFiles
from swinv2_moe.errors import UserError


@pytest.fixture
def root(make_folder):
    return make_folder(per_class=8)


@pytest.fixture
def load(make_data, root, full_augmentation):
    """`load({"DATA.BATCH_SIZE": 8}, rank, world_size)`: loaders of 16 images in train/ and 16 in
    val/, with all augmentations."""
    dataset = {"DATA.DATASET": "folder", "DATA.PATH": str(root)}

    def build(keys=None, rank=0, world_size=1):
        return build_data(make_data(full_augmentation, dataset, keys or {}), rank, world_size)

    return build


def epoch_images(data, epoch=0):
    """{sampler index: the augmented image's bytes} of one epoch, and its batches."""
    data.set_epoch(epoch)
    batches = list(data.train_loader)
    order = list(data.train_loader.sampler)
    images = [image.numpy().tobytes() for batch in batches for image in batch.images]
    return dict(zip(order, images, strict=True)), batches


def draws():
    """One number from each generator that the augmentations draw from."""
    return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002


def test_augmentation_is_the_same_for_any_number_of_workers(load):
    reference, _ = epoch_images(load(), epoch=3)
    assert len(reference) == 16
    assert epoch_images(load({"DATA.NUM_WORKERS": 2}), epoch=3)[0] == reference


def test_augmentation_and_steps_are_the_same_for_any_number_of_ranks(load):
    reference, whole = epoch_images(load({"DATA.BATCH_SIZE": 8}), epoch=1)
    ranks = [epoch_images(load({"DATA.BATCH_SIZE": 2}, rank, 4), epoch=1) for rank in range(4)]
    together = {index: image for images, _ in ranks for index, image in images.items()}
    assert together == reference
    for step, batch in enumerate(whole):
        images = torch.stack([rank[step].images for _, rank in ranks], dim=1).flatten(0, 1)
        targets = torch.stack([rank[step].targets for _, rank in ranks], dim=1).flatten()
        assert torch.equal(images, batch.images)
        assert torch.equal(targets, batch.targets)


def test_epoch_seed_and_index_each_change_the_augmentation(load):
    data = load()
    epochs = [epoch_images(data, epoch)[0] for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2]
    assert all(epochs[0][index] != epochs[1][index] for index in epochs[0])
    assert list(epochs[0]) != list(epochs[1])  # the order
    source = data.train_loader.dataset.source
    # one file under two indices
    source.paths[1], source.targets[1] = source.paths[0], source.targets[0]
    assert not torch.equal(data.train_loader.dataset[0].image, data.train_loader.dataset[1].image)
    other = epoch_images(load({"SEED": 1}))[0]
    assert all(epochs[0][index] != other[index] for index in epochs[0])


def test_seeds_of_swapped_numbers_and_generators_of_one_sample_differ():
    seed_random_states(0, 0, 1)
    first = draws()
    seed_random_states(0, 1, 0)
    assert not set(first) & set(draws())
    seed_random_states(1, 2, 3)
    numpy_draws = np.random.randint(0, 2**32, 8, dtype=np.uint64)  # noqa: NPY002
    torch_draws = torch.randint(0, 2**32, (8,)).numpy()
    assert not set(numpy_draws.tolist()) & set(torch_draws.tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_random_states_alone(load, workers):
    data = load({"DATA.NUM_WORKERS": workers})
    seed_random_states(5)
    want = draws()
    seed_random_states(5)
    epoch_images(data)
    list(data.val_loader)
    assert draws() == want


def test_workers_of_training_stay_and_know_the_epoch(load):
    """Also if an epoch is left in its middle, as by TRAIN.MAX_STEPS."""
    reference, data = load({"DATA.NUM_WORKERS": 0}), load({"DATA.NUM_WORKERS": 2})
    found = []
    for epoch in (3, 0, 7):
        next(iter(data.train_loader))
        images, _ = epoch_images(data, epoch)
        assert images == epoch_images(reference, epoch)[0]
        found.append([worker.pid for worker in iter(data.train_loader)._workers])
    assert found[0] == found[1] == found[2]
    assert not data.val_loader.persistent_workers


def test_workers_run_one_thread_each_and_end_when_the_data_is_closed(load):
    data = load({"DATA.NUM_WORKERS": 2})
    data.train_loader.dataset.transform = lambda image: torch.full(
        (3, 16, 16), float(torch.get_num_threads())
    )
    batch = next(iter(data.train_loader))
    assert batch.images.unique().tolist() == [1.0]
    workers = iter(data.train_loader)._workers
    assert all(worker.is_alive() for worker in workers)
    for _ in range(2):
        data.close()
    assert not any(worker.is_alive() for worker in workers)
    assert len(list(data.train_loader)) == len(data.train_loader)


def test_workers_outlive_the_signals_that_make_a_run_save(load):
    """A scheduler signals every process of a job, Ctrl-C all in the foreground; torch's workers
    would end, and their run with an error."""
    data = load({"DATA.NUM_WORKERS": 2})
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


ALONE = """
import multiprocessing, sys
from pathlib import Path

def mask(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))

if __name__ == "__main__":
    from PIL import Image
    from swinv2_moe.data.build import Loader

    Image.open(sys.argv[2]).load()
    multiprocessing.set_start_method(sys.argv[1])
    batches = iter(Loader(range(4), num_workers=1))
    print([mask(worker.pid) for worker in batches._workers], mask("self"))
    list(batches)  # a worker that is still starting would print that its parent is gone
"""


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_process_of_its_own(method, tmp_path):
    """Workers block the signals under the other start methods too: Python's resource tracker,
    which these start, lifts the block of two. A broken EXIF tag prints nothing."""
    exif = b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\x00"  # announces 255 tags and ends
    Image.new("RGB", (6, 6)).save(tmp_path / "a.jpg", exif=exif)
    with pytest.warns(UserWarning, match="Corrupt EXIF"):
        Image.open(tmp_path / "a.jpg").load()
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    command = [sys.executable, script, method, tmp_path / "a.jpg"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    blocked = sum(1 << (number - 1) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
    assert (done.stdout, done.stderr) == (f"[{blocked}] 0\n", "")


def test_batch_types(load):
    batch = next(iter(load().train_loader))
    assert isinstance(batch, Batch)
    assert (batch.images.shape, batch.images.dtype) == ((4, 3, 16, 16), torch.float32)
    assert (batch.targets.shape, batch.targets.dtype) == ((4,), torch.int64)
    assert batch.unreadable == []
    grey = {"DATA.CHANNELS": 1, "DATA.MEAN": [0.5], "DATA.STD": [0.25]}
    assert next(iter(load(grey).train_loader)).images.shape == (4, 1, 16, 16)


def test_val_targets_count_every_image_once_over_ranks(load):
    # 16 images over 3 ranks: 6 each, 2 of them padding
    ranks = [list(load({"DATA.BATCH_SIZE": 3}, rank, 3).val_loader) for rank in range(3)]
    assert [[len(batch.targets) for batch in rank] for rank in ranks] == [[3, 3]] * 3
    targets = torch.cat([batch.targets for rank in ranks for batch in rank])
    assert (targets == IGNORE).sum() == 2
    assert torch.bincount(targets[targets != IGNORE]).tolist() == [8, 8]


@pytest.mark.parametrize(("kind", "workers"), [("missing", 0), ("text", 0), ("truncated", 1)])
def test_an_unreadable_image_is_replaced_in_training_and_blank_in_validation(
    load, root, kind, workers
):
    data = load({"DATA.NUM_WORKERS": workers, "DATA.MAX_BAD_SHARE": 0.5})
    whole = epoch_images(data)[0]
    bad = []
    for split in ("train", "val"):
        # indices 14 and 15: the next readable image is number 0
        for name in ("dog/6.png", "dog/7.png"):
            path = root / split / name
            bad.append(str(path))
            content = {"text": b"not an image", "truncated": path.read_bytes()[:700]}.get(kind)
            path.unlink()
            if content:
                path.write_bytes(content)
    images, batches = epoch_images(data)
    assert {index for index in whole if images[index] != whole[index]} == {14, 15}
    assert {path for batch in batches for path in batch.unreadable} == set(bad[:2])
    found = torch.cat([batch.targets for batch in batches]).tolist()
    targets = dict(zip(data.train_loader.sampler, found, strict=True))
    assert targets[15] == targets[14] == 0
    assert all(targets[index] == index // 8 for index in range(14))
    val = list(data.val_loader)
    assert [path for batch in val for path in batch.unreadable] == bad[2:]
    assert torch.cat([batch.targets for batch in val]).tolist() == [0] * 8 + [1] * 6 + [IGNORE] * 2
    assert not torch.cat([batch.images for batch in val])[-2:].any()


def test_the_replacement_is_augmented_like_any_image_and_deterministic(load, root):
    (root / "train/cat/2.png").write_bytes(b"")
    dataset = load({"DATA.MAX_BAD_SHARE": 0.5}).train_loader.dataset
    first, again = dataset[2], dataset[2]
    assert torch.equal(first.image, again.image)
    assert first.target == 0
    shutil.copy(root / "train/cat/3.png", root / "train/cat/2.png")
    # number 3's pixels with number 2's random numbers
    assert torch.equal(dataset[2].image, first.image)


def test_a_run_over_vanished_images_stops_instead_of_walking_the_whole_set(load, root):
    data = load({"DATA.MAX_BAD_SHARE": 0.125})
    shutil.rmtree(root / "train")
    samples = [data.train_loader.dataset[index] for index in range(16)]
    assert all(len(sample.unreadable) == 5 for sample in samples)  # one more than 4 of all 32
    # IGNORE would break a training loss
    assert [sample.target for sample in samples] == [0] * 8 + [1] * 8
    message = r"of 32 images could not be read, DATA\.MAX_BAD_SHARE .* 0\.125"
    with pytest.raises(UserError, match=message):
        UnreadableImages(data.train_size + data.val_size, 0.125).add(samples[0].unreadable)


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


MODES = [
    ("grey.png", grey(90, np.uint8), (90, 90, 90)),
    ("rgba.png", Image.new("RGBA", (6, 6), (10, 200, 30, 128)), (10, 200, 30)),
    ("grey-alpha.png", Image.new("LA", (6, 6), (77, 3)), (77, 77, 77)),
    ("palette.png", Image.new("RGB", (6, 6), (250, 0, 5)).quantize(4), (250, 0, 5)),
    ("bits.png", Image.new("1", (6, 6), 1), (255, 255, 255)),
    ("cmyk.tif", Image.new("CMYK", (6, 6), (0, 255, 255, 0)), (255, 0, 0)),
    ("sixteen.png", grey(128 * 256 + 7, np.uint16), (128, 128, 128)),
    ("sixteen.tif", grey(20 * 256, np.uint16), (20, 20, 20)),
    ("sixteen.pgm", grey(40 * 256, np.int32), (40, 40, 40)),
]


def test_every_mode_becomes_rgb_or_grey(tmp_path):
    for name, image, rgb in MODES:
        image.save(tmp_path / name)
        source = ImageFiles(str(tmp_path), np.array([name.encode()]), np.zeros(1, np.int64))
        assert read_image(source, 0, "RGB").getpixel((3, 3)) == rgb, name
        want = Image.new("RGB", (1, 1), rgb).convert("L").getpixel((0, 0))
        assert read_image(source, 0, "L").getpixel((3, 3)) == want, name
