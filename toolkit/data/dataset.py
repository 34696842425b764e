"""Dataset: raw samples with their targets in memory, and the fixed split into training, validation and test parts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DataError, OptionError

if TYPE_CHECKING:  # it needs torch, and `edgekit run` reads its input on devices that have none
    from architectures.raw_input import Preprocessing

Rows = NDArray[np.int64]
TASKS = ("classification", "regression", "language-model", "seq2seq", "masked-lm")
UNITS = ("characters", "words", "bpe")
MIN_ROWS = 10  # fewer cannot be split into three parts that mean anything


@dataclass(frozen=True)
class DataSettings:
    """The [data] section of a recipe."""

    name: str = ""  # a data set of `edgekit list datasets`; ignored when path is given
    path: str | None = None  # the user's own: .csv, .tsv, .npz, .txt, or a folder of images (one folder a class) or idx files
    target: str | None = None  # table: the column to predict; without it "target", then "label"
    text: str | None = None  # table: the column with text; without it "text" (pairs: "source")
    unit: str | None = None  # text: how it is cut into tokens: characters, words or bpe; without it what suits the data
    vocabulary: int = 1000  # bpe: number of tokens
    minimum_count: int = 1  # words: those that the training part has less often are <unk>
    limit: int | None = None  # use at most this many rows, spread evenly; for quick trials
    columns: tuple[str, ...] = ()  # table: the columns to use; empty for all but the target
    task: str | None = None  # what to learn, where network and data leave it open
    image_size: int | None = None  # image folder: side in pixels; without it what the network wants
    seed: int = 0
    validation: float = 0.1
    test: float = 0.2
    folds: int | None = None  # cross-validation: validate on the fold numbered `fold` of this many instead
    fold: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.validation < 1 and 0 < self.test < 1 and self.validation + self.test < 1):
            raise OptionError(f"validation {self.validation} and test {self.test} must be shares whose sum is below 1")
        if self.folds is not None and self.folds < 2:
            raise OptionError(f"data.folds is {self.folds}, expected 2 or more")
        if self.folds is not None and not 0 <= self.fold < self.folds:
            raise OptionError(f"data.fold is {self.fold}, expected 0 to {self.folds - 1}: data.folds is {self.folds}")
        if self.task is not None and self.task not in TASKS:
            raise OptionError(f"data.task is {self.task!r}, expected {', '.join(TASKS[:-1])} or {TASKS[-1]}")
        if self.unit is not None and self.unit not in UNITS:
            raise OptionError(f"data.unit is {self.unit!r}, expected {', '.join(UNITS[:-1])} or {UNITS[-1]}")
        if not 260 <= self.vocabulary <= 2**20:
            raise OptionError(f"data.vocabulary is {self.vocabulary}, expected 260 or more: 256 bytes and 4 special tokens")
        if self.minimum_count < 1:
            raise OptionError(f"data.minimum_count is {self.minimum_count}, expected 1 or more")
        if self.limit is not None and self.limit < MIN_ROWS:
            raise OptionError(f"data.limit is {self.limit}, expected {MIN_ROWS} or more")
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
    test_rows: int = 0  # the last rows that are always the test part, where the data comes with one

    @cached_property
    def fingerprint(self) -> str:
        """Tells the same rows again, so that `evaluate` on the training file uses only its test part."""
        digest = hashlib.sha256()
        for array in (self.inputs, self.targets):
            digest.update(str((array.shape, array.dtype)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        if self.test_rows:
            digest.update(f"test_rows {self.test_rows}".encode())
        return digest.hexdigest()

    def rows(self, indices: Rows) -> Dataset:
        """Some of the rows; which of them were kept for testing is no longer told."""
        return replace(self, inputs=self.inputs[indices], targets=self.targets[indices], test_rows=0)

    def limited(self, limit: int) -> Dataset:
        """At most `limit` rows, spread evenly over all, and over those kept for testing."""
        chosen = spread(len(self), limit)
        return replace(self.rows(chosen), test_rows=int(np.sum(chosen >= len(self) - self.test_rows)))

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
    strata = data.targets if data.task == "classification" else None
    parts = split_rows(len(data), settings, strata, name=data.name, test_rows=data.test_rows)
    train_part, validation_part, test_part = map(data.rows, parts)
    return Split(train_part, validation_part, test_part, _statistics(train_part))


def split_rows(
    count: int,
    settings: DataSettings,
    strata: NDArray[np.int64] | None = None,
    *,
    name: str = "the data",
    test_rows: int = 0,
) -> tuple[Rows, Rows, Rows]:
    """The rows to train, validate and test on, each in order. Rows of equal `strata` (classes) are spread evenly.

    The last `test_rows` rows, where there are any, are the test part, whatever data.test says.
    """
    if count < MIN_ROWS:
        raise DataError(f"{name} has {count} rows, expected at least {MIN_ROWS} to train, validate and test on")
    free = count - test_rows
    order = np.random.default_rng(settings.seed).permutation(free)
    if strata is not None:
        order = order[np.argsort(_rank_within_class(strata[order]), kind="stable")]
    test = 0 if test_rows else max(1, round(count * settings.test))
    validation = max(1, round(free * settings.validation))
    if test + validation >= free:
        raise DataError(
            f"no rows of {name} are left to train on: data.test is {settings.test}, data.validation {settings.validation}"
        )
    tested, validated, trained = np.split(order, [test, test + validation])
    if settings.folds is not None:
        rest = order[test:]
        if strata is not None:  # class by class, so that every fold gets its share of each
            rest = rest[np.argsort(strata[rest], kind="stable")]
        chosen = np.arange(len(rest)) % settings.folds == settings.fold
        validated, trained = rest[chosen], rest[~chosen]
        if not len(validated) or not len(trained):
            raise DataError(f"{name} has {free - test} rows to validate and train on, too few for {settings.folds} folds")
    if test_rows:
        tested = np.arange(free, count)
    return np.sort(trained), np.sort(validated), np.sort(tested)


def spread(count: int, limit: int) -> Rows:
    """At most `limit` of `count` rows, at equal distances."""
    return np.arange(count, dtype=np.int64) if count <= limit else np.arange(limit, dtype=np.int64) * count // limit


def _rank_within_class(targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each row its place within its class as a share of the class: sorting by it spreads classes evenly."""
    shares = np.empty(len(targets), dtype=np.float64)
    for label in np.unique(targets):
        members = np.flatnonzero(targets == label)
        shares[members] = (np.arange(len(members)) + 0.5) / len(members)
    return shares


def _statistics(train: Dataset) -> Preprocessing:
    from architectures.raw_input import Preprocessing

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
