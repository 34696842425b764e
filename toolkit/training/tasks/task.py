"""Task: what the one loop must know of a kind of work — its batches, its losses, and how good a network is at it.

A loss comes as a *sum* with the number of items it is over, never as a mean. A batch can therefore be worked through in
pieces, or spread over processes, and still give the same step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100  # a target that is not counted: padding, or a token that was not masked

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Batch:
    """Tensors with the batch on their first axis. `counts` are the items that each loss is over, in the whole batch."""

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    counts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.inputs[0])

    def rows(self, start: int, stop: int) -> Batch:
        """Some rows; the counts stay those of the whole."""
        inputs, targets = (tuple(item[start:stop] for item in items) for items in (self.inputs, self.targets))
        return Batch(inputs, targets, self.counts)

    def to(self, device: torch.device) -> Batch:
        inputs, targets = (tuple(item.to(device) for item in items) for items in (self.inputs, self.targets))
        return Batch(inputs, targets, self.counts)


class Task(Protocol):
    metric: str  # what the validation part is judged by, the first that `evaluate` gives
    higher_is_better: bool

    def steps(self, part: Any) -> int:
        """Batches in an epoch."""

    def batches(self, part: Any, generator: torch.Generator) -> Iterator[Batch]:
        """One pass over `part` in random order."""

    def losses(self, module: nn.Module, batch: Batch, state: State | None) -> tuple[tuple[Tensor, ...], State | None]:
        """The sum of each loss over the batch, and the state that the next batch starts with."""

    def evaluate(self, module: nn.Module, part: Any, *, quick: bool) -> dict[str, float]:
        """Metrics on `part`. `quick` may look at fewer rows where that takes long: it is for the end of every epoch."""


def token_loss(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy summed over the tokens that count. logits (…, vocabulary), targets (…)"""
    flat = logits.float().flatten(0, -2)
    return functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def row_count(size: int, rows: int) -> int:
    """Rows a batch: 0 stands for all."""
    return size or max(1, rows)


def bucketed(lengths: NDArray[np.int64], size: int, generator: torch.Generator) -> list[NDArray[np.int64]]:
    """Batches of rows of similar length in random order: pools of 64 batches are sorted within, then all batches shuffled."""
    order = torch.randperm(len(lengths), generator=generator).numpy()
    batches: list[NDArray[np.int64]] = []
    for start in range(0, len(order), 64 * size):
        pool = order[start : start + 64 * size]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        batches += [pool[at : at + size] for at in range(0, len(pool), size)]
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[index] for index in shuffled]


def in_order_of_length(lengths: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Batches for evaluation, longest first."""
    order = np.argsort(-lengths, kind="stable")
    return [order[at : at + size] for at in range(0, len(order), size)]
