"""digits: the 1,797 handwritten digits that scikit-learn ships, 8 x 8 pixels."""

import numpy as np

from swinv2_moe.data.section import DataConfig, register_dataset
from swinv2_moe.data.sources.base import ImageArrays, Sources


@register_dataset("digits", needs_path=False, use_workers=False)
def digits(config: DataConfig) -> Sources:
    """Load the digits. A fixed, stratified fifth of them is for validation."""
    # Importing scikit-learn takes a second.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, targets = load_digits(return_X_y=True)  # [1797, 64], 0 to 16
    images = np.round(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    targets = targets.astype(np.int64)
    # random_state does not depend on SEED, so that every run is validated on the same images.
    train, val = train_test_split(
        np.arange(len(targets)), test_size=0.2, stratify=targets, random_state=0
    )
    return Sources(
        ImageArrays("digits", images[train], targets[train]),
        ImageArrays("digits", images[val], targets[val]),
        [str(digit) for digit in range(10)],
    )
