"""Disease progression of 442 diabetes patients from ten measurements (Efron et al., "Least angle regression", 2004)."""

from __future__ import annotations

import numpy as np

from runtime.errors import MissingDependency

from .dataset import Dataset


def load() -> Dataset:
    try:
        from sklearn.datasets import load_diabetes
    except ImportError:
        raise MissingDependency.of("scikit-learn", "data", "the diabetes data") from None
    data = load_diabetes(scaled=False)  # raw columns: age in years, blood pressure in mmHg, …
    return Dataset(
        name="diabetes",
        task="regression",
        kind="columns",
        inputs=data.data.astype(np.float32),
        targets=data.target.astype(np.float32),
        columns=tuple(data.feature_names),
    )
