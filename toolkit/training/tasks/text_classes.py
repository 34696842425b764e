"""Classification of texts: one label for a row of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from runtime.metrics import accuracy
from runtime.text import pad_batch

from ...data.tokens import TokenRows
from ..recipe import TrainingSettings
from .task import Batch, State, bucketed, device_of, in_order_of_length, row_count

_EVALUATION_BATCH = 256


class TextClassificationTask:
    metric = "accuracy"
    higher_is_better = True

    def __init__(self, settings: TrainingSettings, *, segments: bool) -> None:
        self.settings = settings
        self.segments = segments  # the network also takes the number of the sentence each token belongs to: all 0 here

    def steps(self, part: TokenRows) -> int:
        return -(-len(part) // row_count(self.settings.batch_size, len(part)))

    def batches(self, part: TokenRows, generator: torch.Generator) -> Iterator[Batch]:
        for rows in bucketed(part.lengths, row_count(self.settings.batch_size, len(part)), generator):
            yield Batch(self._inputs(part, rows), (torch.from_numpy(part.targets[rows]),), (len(rows),))

    def losses(self, module: nn.Module, batch: Batch, state: State | None) -> tuple[tuple[Tensor, ...], None]:
        logits = module(*batch.inputs).float()
        smoothing = self.settings.label_smoothing
        return (functional.cross_entropy(logits, batch.targets[0], label_smoothing=smoothing, reduction="sum"),), None

    def evaluate(self, module: nn.Module, part: TokenRows, *, quick: bool) -> dict[str, float]:
        return {self.metric: accuracy(self.predict(module, part), part.targets)}

    def predict(self, module: nn.Module, part: TokenRows) -> NDArray[Any]:
        """Logits of every row."""
        module.eval()
        device = device_of(module)
        found: dict[int, NDArray[Any]] = {}
        with torch.inference_mode():
            for rows in in_order_of_length(part.lengths, _EVALUATION_BATCH):
                logits = module(*(item.to(device) for item in self._inputs(part, rows))).float().cpu().numpy()
                found |= dict(zip(rows.tolist(), logits, strict=True))
        return np.stack([found[row] for row in range(len(part))])

    def _inputs(self, part: TokenRows, rows: NDArray[np.int64]) -> tuple[Tensor, ...]:
        tokens = torch.from_numpy(pad_batch([part.sequences[row] for row in rows]))
        return (tokens, torch.zeros_like(tokens)) if self.segments else (tokens,)
