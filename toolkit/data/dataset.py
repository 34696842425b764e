"""Dataset: raw samples with their targets in memory, and the fixed split into training, validation and test parts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from architectures.raw_input import Preprocessing
from runtime.errors import DataError, OptionError

MIN_ROWS = 10  # fewer cannot be split into three parts that mean anything


@dataclass(frozen=True)
class DataSettings:
    """The [data] section of a recipe."""

    name: str = ""  # a data set of `edgekit list datasets`; ignored when path is given
    path: str | None = None  # the user's own: .csv, .tsv, .npz, or a folder with one folder of images a class
    target: str | None = None  # table: the column to predict; without it "target", then "label"
    columns: tuple[str, ...] = ()  # table: the columns to use; empty for all but the target
    task: str | None = None  # classification or regression, where the data leaves it open
    image_size: int | None = None  # image folder: side in pixels; without it what the network wants
    seed: int = 0
    validation: float = 0.1
    test: float = 0.2

    def __post_init__(self) -> None:
        if not (0 < self.validation < 1 and 0 < self.test < 1 and self.validation + self.test < 1):
            raise OptionError(f"validation {self.validation} and test {self.test} must be shares whose sum is below 1")
        if self.task not in (None, "classification", "regression"):
            raise OptionError(f"data.task is {self.task!r}, expected classification or regression")
        if self.image_size is not None and not 1 <= self.image_size <= 4096:
            raise OptionError(f"data.image_size is {self.image_size}, expected 1 to 4096")
        if not 0 <= self.seed <= 2**40:
            raise OptionError(f"data.seed is {self.seed}, expected 0 or more")


@dataclass(frozen=True)
class Dataset:
    name: str
    task: str
    kind: str  # "image" or "columns"
    inputs: NDArray[np.float32]  # (rows, channels, height, width) or (rows, columns), raw
    targets: NDArray[Any]  # int64 class numbers or float32 values
    labels: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    maximum: float = 255.0  # of a raw pixel

    @cached_property
    def fingerprint(self) -> str:
        """Tells the same rows again, so that `evaluate` on the training file uses only its test part."""
        digest = hashlib.sha256()
        for array in (self.inputs, self.targets):
            digest.update(str((array.shape, array.dtype)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def rows(self, indices: NDArray[np.int64]) -> Dataset:
        return replace(self, inputs=self.inputs[indices], targets=self.targets[indices])

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Split:
    train: Dataset
    validation: Dataset
    test: Dataset
    statistics: Preprocessing = field(repr=False)


def split(data: Dataset, settings: DataSettings) -> Split:
    """Three parts by seed; classes are spread evenly. The statistics come from the training part alone."""
    if len(data) < MIN_ROWS:
        raise DataError(f"{data.name} has {len(data)} rows, expected at least {MIN_ROWS} to train, validate and test on")
    random = np.random.default_rng(settings.seed)
    order = random.permutation(len(data))
    if data.task == "classification":
        order = order[np.argsort(_rank_within_class(data.targets[order]), kind="stable")]
    test = max(1, round(len(data) * settings.test))
    validation = max(1, round(len(data) * settings.validation))
    if test + validation >= len(data):
        raise DataError(
            f"no rows of {data.name} are left to train on: data.test is {settings.test}, data.validation {settings.validation}"
        )
    parts = np.split(order, [test, test + validation])
    test_part, validation_part, train_part = (data.rows(np.sort(part)) for part in parts)
    return Split(train_part, validation_part, test_part, _statistics(train_part))


def _rank_within_class(targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each row its place within its class as a share of the class: sorting by it spreads classes evenly."""
    shares = np.empty(len(targets), dtype=np.float64)
    for label in np.unique(targets):
        members = np.flatnonzero(targets == label)
        shares[members] = (np.arange(len(members)) + 0.5) / len(members)
    return shares


def _statistics(train: Dataset) -> Preprocessing:
    axes = (0,) if train.kind == "columns" else (0, 2, 3)
    mean = train.inputs.mean(axis=axes, dtype=np.float64)
    deviation = train.inputs.std(axis=axes, dtype=np.float64)
    deviation[deviation < 1e-12] = 1.0  # a constant column carries nothing; dividing by it would carry noise
    regression = train.task == "regression"
    return Preprocessing(
        kind=train.kind,
        shape=tuple(train.inputs.shape[1:]),
        mean=tuple(mean.tolist()),
        deviation=tuple(deviation.tolist()),
        columns=train.columns,
        maximum=train.maximum,
        target_mean=float(train.targets.mean()) if regression else 0.0,
        target_deviation=float(train.targets.std()) or 1.0 if regression else 1.0,
    )
