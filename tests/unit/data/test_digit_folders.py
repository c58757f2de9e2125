"""The folders of digits that `workflow` uses without data."""

from PIL import Image
from sklearn.datasets import load_digits

from swinv2_moe.data.prepare import folders as module
from swinv2_moe.data.prepare.folders import write_digit_folders


def test_two_folders_with_other_classes_and_every_digit_once(tmp_path, monkeypatch):
    digits = load_digits()
    digits.images, digits.target = digits.images[:250], digits.target[:250]
    monkeypatch.setattr(module, "load_digits", lambda: digits)
    folders = write_digit_folders(tmp_path)
    classes, names = [], []
    for folder in folders:
        for split in ("train", "val"):
            classes.append(sorted(path.name for path in (folder / split).iterdir()))
            names += [path.name for path in (folder / split).rglob("*.png")]
    assert classes == [list("01234")] * 2 + [list("56789")] * 2
    assert sorted(names) == [f"{index:04d}.png" for index in range(250)]
    file = next((folders[0] / "val").rglob("*.png"))
    image = Image.open(file)
    assert (image.size, image.mode) == ((64, 64), "RGB")
    # complete folders are kept and begun ones completed
    before = file.read_bytes()
    file.write_bytes(b"mine")
    write_digit_folders(tmp_path)
    assert file.read_bytes() == b"mine"
    (tmp_path / "complete").unlink()
    write_digit_folders(tmp_path)
    assert file.read_bytes() == before
