"""The user's own arrays: an `.npz` with `inputs` and `targets`, or with one array for each input of a graph."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DataError
from runtime.model import convert
from runtime.signature import GraphSignature

from .dataset import Dataset

_NAMES = (("inputs", "targets"), ("x", "y"), ("X", "y"))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    if not path.is_file():
        raise DataError(f"{path} is not there, or is a folder; expected an .npz file as np.savez writes it")
    try:
        if not zipfile.is_zipfile(path):
            raise DataError(f"{path} cannot be read as .npz; save named arrays with np.savez")
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} cannot be read as .npz ({' '.join(str(error).split())[:120]}); save it with np.savez"
        ) from None


def load_arrays(path: Path, *, tasks: tuple[str, ...]) -> Dataset:
    arrays = read_arrays(path)
    pair = next((names for names in _NAMES if set(names) <= set(arrays)), None)
    if pair is None:
        raise DataError(f"{path} has the arrays {', '.join(arrays) or 'none'}; expected 'inputs' and 'targets'")
    inputs, targets = arrays[pair[0]], arrays[pair[1]]
    if inputs.dtype.kind not in "fiub" or inputs.ndim not in (2, 3, 4) or len(inputs) != len(targets) or targets.ndim != 1:
        raise DataError(
            f"{path}: inputs are {inputs.dtype}{list(inputs.shape)} and targets {targets.dtype}{list(targets.shape)}; "
            "expected numbers of (rows, columns), (rows, height, width) or (rows, channels, height, width), one target a row"
        )
    with np.errstate(over="ignore"):
        values = inputs.astype(np.float32)
    if not np.isfinite(values).all():
        raise DataError(
            f"{path}: inputs hold NaN or infinite values, first in row "
            f"{int(np.argwhere(~np.isfinite(values))[0][0])}; fill or drop them"
        )
    values = values[:, None] if values.ndim == 3 else values
    kind = "columns" if values.ndim == 2 else "image"
    columns = tuple(f"column_{index}" for index in range(values.shape[1])) if kind == "columns" else None
    maximum = float(values.max(initial=0.0)) or 255.0
    task = tasks[0] if len(tasks) == 1 else ("regression" if targets.dtype.kind == "f" else "classification")
    if task == "regression":
        if targets.dtype.kind not in "fiu" or not np.isfinite(targets).all():
            raise DataError(f"{path}: targets are {targets.dtype}, expected finite numbers for regression")
        return Dataset(path.name, task, kind, values, targets.astype(np.float32), columns=columns, maximum=maximum)
    names, numbers = np.unique(targets, return_inverse=True)
    if len(names) < 2:
        raise DataError(f"{path}: targets hold a single class; there is nothing to learn to tell apart")
    labels = tuple(map(str, arrays.get("labels", names)))
    if len(labels) != len(names):
        raise DataError(f"{path} has {len(labels)} labels but its targets hold {len(names)} classes; give one label for each")
    return Dataset(path.name, task, kind, values, numbers.astype(np.int64), labels, columns, maximum)


def load_feeds(path: Path, signature: GraphSignature) -> dict[str, NDArray[Any]]:
    """One array for each input of a graph, as it takes them."""
    feeds = load_samples(path, signature)
    signature.check_feeds(feeds)
    return feeds


def load_samples(path: Path, signature: GraphSignature) -> dict[str, NDArray[Any]]:
    """One array for each input of a graph, converted to its dtype; the first axis counts samples, for a fixed batch too."""
    arrays = read_arrays(path)
    expected = {spec.name: spec for spec in signature.inputs}
    if set(arrays) != set(expected):
        raise DataError(
            f"{path} has the arrays {', '.join(arrays) or 'none'}; "
            f"expected one for each input: {', '.join(map(str, expected.values()))}"
        )
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub":
            raise DataError(f"{path}: {name!r} holds {array.dtype}, expected numbers")
    return {name: convert(expected[name], array) for name, array in arrays.items()}
