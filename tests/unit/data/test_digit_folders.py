"""The folders of digits that `workflow` uses without data."""

from PIL import Image

from swinv2_moe.data.prepare.digit_folders import write_digit_folders


def test_two_folders_with_other_classes_and_every_digit_once(tmp_path):
    folders = write_digit_folders(tmp_path)
    classes, names = [], []
    for folder in folders:
        for split in ("train", "val"):
            classes.append(sorted(path.name for path in (folder / split).iterdir()))
            names += [path.name for path in (folder / split).rglob("*.png")]
    assert classes == [list("01234")] * 2 + [list("56789")] * 2
    assert sorted(names) == [f"{index:04d}.png" for index in range(1797)]
    image = Image.open(next((folders[0] / "val").rglob("*.png")))
    assert (image.size, image.mode) == ((64, 64), "RGB")


def test_complete_folders_are_kept_and_begun_ones_completed(tmp_path):
    pretrain, _ = write_digit_folders(tmp_path)
    image = next(pretrain.rglob("*.png"))
    before = image.read_bytes()
    image.write_bytes(b"mine")
    write_digit_folders(tmp_path)
    assert image.read_bytes() == b"mine"
    (tmp_path / "complete").unlink()
    write_digit_folders(tmp_path)
    assert image.read_bytes() == before
