"""What `predict` gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import FeedError


@dataclass(frozen=True)
class Prediction:
    """Answers for a batch; `label` and `value` are for a batch of one.

    Classification fills `labels` and `probabilities` (batch, classes); regression fills `values` (batch,).
    """

    labels: tuple[str, ...] | None = None
    probabilities: NDArray[np.float32] | None = None
    values: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.labels) if self.labels is not None else len(self.values if self.values is not None else ())

    @property
    def label(self) -> str:
        if self.labels is None:
            raise FeedError("this is a regression: read .value or .values")
        self._require_one("labels")
        return self.labels[0]

    @property
    def value(self) -> float:
        if self.values is None:
            raise FeedError("this is a classification: read .label, .labels or .probabilities")
        self._require_one("values")
        return float(self.values[0])

    def _require_one(self, plural: str) -> None:
        if len(self) != 1:
            raise FeedError(f"the batch holds {len(self)} predictions; read .{plural}")


def softmax(logits: NDArray[Any]) -> NDArray[np.float32]:
    shifted = np.exp((logits - logits.max(axis=-1, keepdims=True)).astype(np.float32))
    total: NDArray[np.float32] = shifted / shifted.sum(axis=-1, keepdims=True)
    return total
