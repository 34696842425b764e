"""Classification and regression of images and columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from architectures.raw_input import Preprocessing
from runtime.metrics import METRICS, r2

from ...data.dataset import Dataset
from ..recipe import TrainingSettings
from .task import Batch, State, device_of, row_count

_EVALUATION_BATCH = 256


class SampleTask:
    def __init__(self, task: str, settings: TrainingSettings, preprocessing: Preprocessing) -> None:
        self.task = task
        self.settings = settings
        self.metric = METRICS[task].name
        self.higher_is_better = METRICS[task].higher_is_better
        self.target_deviation = preprocessing.target_deviation
        self.deviation = torch.tensor(preprocessing.deviation)

    def steps(self, part: Dataset) -> int:
        return -(-len(part) // row_count(self.settings.batch_size, len(part)))

    def batches(self, part: Dataset, generator: torch.Generator) -> Iterator[Batch]:
        order = torch.randperm(len(part), generator=generator)
        inputs, targets = torch.from_numpy(part.inputs), torch.from_numpy(part.targets)
        augmentation = self.settings.augmentation
        for rows in order.split(row_count(self.settings.batch_size, len(part))):
            batch = inputs[rows]
            if augmentation:
                batch = augmentation(batch, generator, self.deviation)
            yield Batch((batch,), (targets[rows],), (len(rows),))

    def losses(self, module: nn.Module, batch: Batch, state: State | None) -> tuple[tuple[Tensor, ...], None]:
        """Cross-entropy, or squared error in units of the target's variance, so that one learning rate fits any unit."""
        outputs, targets = module(*batch.inputs).float(), batch.targets[0]
        if self.task == "classification":
            loss = functional.cross_entropy(outputs, targets, label_smoothing=self.settings.label_smoothing, reduction="sum")
        else:
            scale = self.target_deviation
            loss = functional.mse_loss(outputs[:, 0] / scale, targets / scale, reduction="sum")
        return (loss,), None

    def evaluate(self, module: nn.Module, part: Dataset, *, quick: bool) -> dict[str, float]:
        outputs = predict(module, part)
        metrics = {self.metric: METRICS[self.task].compute(outputs, part.targets)}
        if self.task == "regression" and np.ptp(part.targets) > 0:  # else there is no variance to explain
            metrics["r2"] = r2(outputs.reshape(len(outputs), -1)[:, 0], part.targets)
        return metrics


def predict(module: nn.Module, data: Dataset) -> NDArray[Any]:
    """Outputs of the network for every row, as numpy."""
    module.eval()
    device = device_of(module)
    with torch.inference_mode():
        parts = [module(rows.to(device)).cpu() for rows in torch.from_numpy(data.inputs).split(_EVALUATION_BATCH)]
    outputs: NDArray[Any] = np.concatenate([part.numpy() for part in parts])
    return outputs
