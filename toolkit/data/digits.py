"""1,797 handwritten digits, 8x8 pixels of 0 to 16 (Alpaydin and Kaynak, UCI optical recognition of handwritten digits)."""

from __future__ import annotations

import numpy as np

from runtime.errors import MissingDependency

from .dataset import Dataset


def load() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingDependency.of("scikit-learn", "data", "the digits data") from None
    data = load_digits()
    return Dataset(
        name="digits",
        task="classification",
        kind="image",
        inputs=data.images.astype(np.float32)[:, None],
        targets=data.target.astype(np.int64),
        labels=tuple(str(digit) for digit in range(10)),
        maximum=16.0,
    )
