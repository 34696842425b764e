"""70,000 pictures of clothes in ten classes, 28x28 pixels (Xiao, Rasul and Vollgraf, "Fashion-MNIST", 2017; MIT licence)."""

from __future__ import annotations

from pathlib import Path

from runtime.errors import DataError

from .dataset import Dataset
from .idx import is_idx_folder, load_idx_folder

FOLDER = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts it
LABELS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def load(folder: Path = FOLDER) -> Dataset:
    if not is_idx_folder(folder):
        raise DataError(
            f"there is no Fashion-MNIST at {folder}; install Debian's package dataset-fashion-mnist, "
            "or pass --data FOLDER with its four idx files"
        )
    return load_idx_folder(folder, name="fashion-mnist", labels=LABELS)
