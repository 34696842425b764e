"""Task metrics, in numpy. Each says its unit and which direction is better, so that a quality budget can be applied to any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    higher_is_better: bool
    default_budget: float  # the drop that is allowed when nobody says otherwise, in the unit of `drop`
    compute: Callable[[Values, Values], float]  # (outputs, targets)

    def drop(self, before: float, after: float) -> float:
        """Quality lost, in percent: points for a percentage, relative growth for an error. Negative is a gain."""
        if self.higher_is_better:
            return before - after
        return 0.0 if before == after else 100.0 * (after - before) / max(abs(before), np.finfo(np.float64).tiny)


def accuracy(logits: Values, labels: Values) -> float:
    """Percent of rows whose largest logit is at the label."""
    return float(100.0 * np.mean(logits.argmax(axis=-1) == labels))


def mean_squared_error(values: Values, targets: Values) -> float:
    difference = values.reshape(len(values), -1)[:, 0].astype(np.float64) - targets
    return float(np.mean(difference**2))


def agreement(outputs: Values, reference: Values) -> float:
    """100 minus the relative L2 error in percent: 100 is equality. For networks without labelled data."""
    difference = outputs.astype(np.float64) - reference
    scale = float(np.linalg.norm(reference.astype(np.float64)))
    return float(100.0 * (1.0 - np.linalg.norm(difference) / scale)) if scale else float(100.0 * np.all(difference == 0))


METRICS = {
    "classification": Metric("accuracy", "%", True, 0.5, accuracy),
    "regression": Metric("mse", "", False, 2.0, mean_squared_error),
    "tensors": Metric("agreement", "%", True, 5.0, agreement),
}
