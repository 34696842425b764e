"""The table of data sets, and how a recipe's [data] section is turned into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import DataError, UnknownName

from .dataset import Dataset, DataSettings


@dataclass(frozen=True)
class DatasetEntry:
    name: str
    description: str
    task: str
    load: Callable[[], Dataset]


def _diabetes() -> Dataset:
    from .diabetes import load

    return load()


def _digits() -> Dataset:
    from .digits import load

    return load()


DATASETS = {
    entry.name: entry
    for entry in (
        DatasetEntry(
            "diabetes",
            "442 patients, 10 measurements, disease progression after a year (scikit-learn)",
            "regression",
            _diabetes,
        ),
        DatasetEntry("digits", "1,797 handwritten digits of 8x8 pixels (scikit-learn)", "classification", _digits),
    )
}


def load_data(settings: DataSettings, *, tasks: tuple[str, ...], image_size: int | None = None) -> Dataset:
    """The data a recipe asks for. `tasks` are those the network can do; the data or data.task picks one of them."""
    tasks = (settings.task,) if settings.task in tasks else tasks
    if settings.task and settings.task not in tasks:
        raise DataError(f"data.task is {settings.task}, but this network does {' or '.join(tasks)}")
    if settings.path is None:
        if settings.name not in DATASETS:
            raise UnknownName.of("data set", settings.name, DATASETS)
        data = DATASETS[settings.name].load()
    else:
        data = load_path(Path(settings.path), settings, tasks=tasks, image_size=image_size)
    if data.task not in tasks:
        raise DataError(
            f"{data.name} is data for {data.task}, but this network does {' or '.join(tasks)}; choose another network"
        )
    return data


def load_path(path: Path, settings: DataSettings, *, tasks: tuple[str, ...], image_size: int | None = None) -> Dataset:
    """The user's own data, by what `path` is."""
    if not path.exists():
        raise DataError(
            f"there is no {path}; expected a .csv, .tsv or .npz file, or a folder with one folder of images a class"
        )
    if path.is_dir():
        from .image_folder import load_folder

        return load_folder(path, size=settings.image_size or image_size or 32)
    suffix = path.suffix.lower()
    if settings.columns and suffix not in (".csv", ".tsv"):
        raise DataError(f"data.columns chooses columns of a table, but {path} is not one; leave it out")
    if suffix in (".csv", ".tsv"):
        from .table import load_table

        return load_table(path, target=settings.target, columns=settings.columns, tasks=tasks)
    if suffix == ".npz":
        from .arrays import load_arrays

        return load_arrays(path, tasks=tasks)
    raise DataError(f"{path} is not of a known kind; expected .csv, .tsv, .npz, or a folder with one folder of images a class")
