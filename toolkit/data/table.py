"""The user's own table: CSV or TSV with a header, numeric columns and one target column."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DataError

from .dataset import Dataset

TARGET_NAMES = ("target", "label")
_LARGEST = float(np.finfo(np.float32).max)
_MOST_CLASSES = 20  # whole numbers with more distinct values than this are taken for a quantity


def read_rows(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and each row with its line number in the file; every row is as long as the header."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            table = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as text ({error}); expected a UTF-8 table with a header") from None
    if not table:
        raise DataError(f"{path} is empty; expected a header and rows")
    header, rows = [name.strip() for name in table[0][1]], table[1:]
    if len(header) == 1 and ";" in header[0]:
        raise DataError(f"{path} looks separated by semicolons; expected commas, with a point in decimal numbers")
    if not rows:
        raise DataError(f"{path} has a header but no rows; expected at least one row of values")
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise DataError(f"{path} has two columns named {twice!r}; rename one")
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(f"{path} line {line} has {len(row)} values but the header has {len(header)}; mend that line")
    return header, rows


def read_columns(path: Path, wanted: Sequence[str]) -> NDArray[np.float32]:
    """The wanted columns of a table as numbers, (rows, columns)."""
    header, rows = read_rows(path)
    return _numbers(path, header, rows, wanted)


def load_table(path: Path, *, target: str | None, columns: Sequence[str], tasks: tuple[str, ...]) -> Dataset:
    header, rows = read_rows(path)
    target = target or next((name for name in TARGET_NAMES if name in header), None)
    if target is None:
        raise DataError(
            f"{path} has no column 'target' or 'label'; name the one to predict with --set data.target=COLUMN "
            f"(it has {', '.join(header)})"
        )
    _place(path, header, target)
    wanted = tuple(columns) or tuple(name for name in header if name != target)
    if not wanted or target in wanted:
        raise DataError(f"{path}: the target {target!r} cannot be the only column, nor be among the columns to learn from")
    inputs = _numbers(path, header, rows, wanted)
    cells = cells_of(path, header, rows, target)
    task = tasks[0] if len(tasks) == 1 else _task_of(cells)
    if task == "regression":
        return Dataset(path.name, task, "columns", inputs, _numbers(path, header, rows, [target])[:, 0], columns=wanted)
    labels, targets = classes_of(path, target, cells, advice="for a quantity use a network for regression (linear, mlp)")
    return Dataset(path.name, task, "columns", inputs, targets, labels, wanted)


def classes_of(path: Path, column: str, cells: list[str], *, advice: str) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The different values of a column in order, and each cell's place among them."""
    labels = tuple(sorted(set(cells), key=_label_order))
    if len(labels) < 2:
        raise DataError(f"{path}: column {column!r} has a single value, {labels[0]!r}; there is nothing to learn to tell apart")
    if len(labels) > max(_MOST_CLASSES, len(cells) // 2):
        raise DataError(
            f"{path}: column {column!r} has {len(labels)} different values in {len(cells)} rows, too many to be classes; "
            + advice
        )
    places = {label: place for place, label in enumerate(labels)}
    return labels, np.array([places[cell] for cell in cells], dtype=np.int64)


def _numbers(path: Path, header: list[str], rows: list[tuple[int, list[str]]], wanted: Sequence[str]) -> NDArray[np.float32]:
    places = [_place(path, header, name) for name in wanted]
    values = np.empty((len(rows), len(wanted)), dtype=np.float32)
    for index, (line, row) in enumerate(rows):
        for slot, place in enumerate(places):
            try:
                value = float(row[place])
            except ValueError:
                value = math.nan
            if not abs(value) <= _LARGEST:  # NaN is not
                raise DataError(
                    f"{path} line {line}, column {header[place]!r} has {row[place]!r}, expected a number; "
                    "mend it, or choose columns with --set data.columns=a,b"
                )
            values[index, slot] = value
    return values


def cells_of(path: Path, header: list[str], rows: list[tuple[int, list[str]]], name: str) -> list[str]:
    """The text in a column; none may be empty."""
    place = _place(path, header, name)
    for line, row in rows:
        if not row[place].strip():
            raise DataError(f"{path} line {line} has nothing in column {name!r}; fill or remove it")
    return [row[place].strip() for _, row in rows]


def _place(path: Path, header: list[str], name: str) -> int:
    if name not in header:
        raise DataError(f"{path} has no column {name!r}; it has: {', '.join(header)}")
    return header.index(name)


def _task_of(cells: list[str]) -> str:
    """Text and a few whole numbers are classes; other numbers are quantities. `data.task` overrides."""
    try:
        numbers = [float(cell) for cell in cells]
    except ValueError:
        return "classification"
    whole = all(number.is_integer() for number in numbers)
    return "classification" if whole and len(set(numbers)) <= _MOST_CLASSES else "regression"


def _label_order(label: str) -> tuple[int, float, str]:
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)
