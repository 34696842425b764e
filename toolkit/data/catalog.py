"""The table of data sets, and how a recipe's [data] section is turned into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, overload

from runtime.errors import DataError, UnknownName

from .dataset import Dataset, DataSettings
from .text_data import Documents, LabelledTexts, TextData

AnyData = Dataset | TextData
_KINDS = {"image": "images", "columns": "columns of numbers", "tokens": "text"}
_LANGUAGE = ("language-model", "masked-lm")  # tasks that learn from text alone
_EXPECTED = (
    "expected a .csv, .tsv, .npz or .txt file, or a folder with one folder of images a class, or with the four idx files"
)


@dataclass(frozen=True)
class DatasetEntry:
    name: str
    description: str
    task: str
    load: Callable[[], AnyData]


def _from(module: str) -> Callable[[], Any]:
    """The `load` of a module beside this one, imported when it is called: each brings a library of its own."""
    return lambda: import_module(f"{__package__}.{module}").load()


DATASETS = {
    entry.name: entry
    for entry in (
        DatasetEntry(
            "cmudict",
            "124,926 words, letters to phonemes",
            "seq2seq",
            _from("cmudict"),
        ),
        DatasetEntry(
            "diabetes",
            "442 patients, 10 measurements (scikit-learn)",
            "regression",
            _from("diabetes"),
        ),
        DatasetEntry("digits", "1,797 digits of 8x8 pixels (scikit-learn)", "classification", _from("digits")),
        DatasetEntry(
            "docstrings",
            "16,000 docstring sentences of 8 libraries",
            "classification",
            _from("docstrings"),
        ),
        DatasetEntry(
            "fashion-mnist",
            "70,000 clothes of 28x28 pixels (Debian)",
            "classification",
            _from("fashion_mnist"),
        ),
        DatasetEntry(
            "topics",
            "370,000 characters of Python's help topics",
            "language-model",
            _from("topics"),
        ),
    )
}


@overload
def load_data(settings: DataSettings, *, tasks: tuple[str, ...], image_size: int | None = None) -> Dataset: ...


@overload
def load_data(
    settings: DataSettings, *, tasks: tuple[str, ...], image_size: int | None = None, takes: tuple[str, ...]
) -> AnyData: ...


def load_data(
    settings: DataSettings,
    *,
    tasks: tuple[str, ...],
    image_size: int | None = None,
    takes: tuple[str, ...] = ("image", "columns"),
) -> AnyData:
    """The data a recipe asks for.

    `tasks` are those the network can do; the data or data.task picks one of them. `takes` are the kinds of samples the
    network can be given: "image", "columns", "tokens".
    """
    if settings.task and settings.task not in tasks:
        raise DataError(f"data.task is {settings.task}, but this network does {' or '.join(tasks)}")
    tasks = (settings.task,) if settings.task else tasks
    if settings.path is None:
        if settings.name not in DATASETS:
            if not settings.name:
                raise DataError(
                    f"there is no data to train on; pass --data PATH, or --set data.name=NAME of {', '.join(DATASETS)}"
                )
            raise UnknownName.of("data set", settings.name, DATASETS)
        data = DATASETS[settings.name].load()
    else:
        data = load_path(Path(settings.path), settings, tasks=tasks, image_size=image_size, takes=takes)
    if not _serves(data, tasks):
        raise DataError(
            f"{data.name} is data for {data.task}, but this network does {' or '.join(tasks)}; choose another network"
        )
    if data.kind not in takes:
        wanted = " or ".join(_KINDS[kind] for kind in takes)
        raise DataError(f"{data.name} holds {_KINDS[data.kind]}, but this network takes {wanted}; choose another network")
    return data.limited(settings.limit) if settings.limit else data


def _serves(data: AnyData, tasks: tuple[str, ...]) -> bool:
    if isinstance(data, Documents | LabelledTexts) and set(_LANGUAGE) & set(tasks):
        return True  # any text can be modelled
    return data.task in tasks


@overload
def load_path(path: Path, settings: DataSettings, *, tasks: tuple[str, ...], image_size: int | None = None) -> Dataset: ...


@overload
def load_path(
    path: Path, settings: DataSettings, *, tasks: tuple[str, ...], image_size: int | None = None, takes: tuple[str, ...]
) -> AnyData: ...


def load_path(
    path: Path,
    settings: DataSettings,
    *,
    tasks: tuple[str, ...],
    image_size: int | None = None,
    takes: tuple[str, ...] = ("image", "columns"),
) -> AnyData:
    """The user's own data, by what `path` is and, where text is concerned, by what the network does."""
    if not path.exists():
        raise DataError(f"there is no {path}; {_EXPECTED}")
    suffix = path.suffix.lower()
    if settings.columns and (path.is_dir() or suffix not in (".csv", ".tsv")):
        raise DataError(f"data.columns chooses columns of a table, but {path} is not one; leave it out")
    if path.is_dir():
        return _load_folder(path, size=settings.image_size or image_size or 32)
    if suffix in (".csv", ".tsv"):
        if "tokens" in takes:
            return _load_text_table(path, settings, tasks)
        from .table import load_table

        return load_table(path, target=settings.target, columns=settings.columns, tasks=tasks)
    if suffix == ".npz":
        from .arrays import load_arrays

        return load_arrays(path, tasks=tasks)
    if suffix == ".txt":
        from .text_files import load_text

        if not set(_LANGUAGE) & set(tasks):
            raise DataError(f"{path} is plain text, for a language model, but this network does {' or '.join(tasks)}")
        return load_text(path)
    raise DataError(f"{path} is not of a known kind; {_EXPECTED}")


def _load_folder(path: Path, *, size: int) -> Dataset:
    from .idx import is_idx_folder, load_idx_folder
    from .image_folder import load_folder

    return load_idx_folder(path) if is_idx_folder(path) else load_folder(path, size=size)


def _load_text_table(path: Path, settings: DataSettings, tasks: tuple[str, ...]) -> TextData:
    from .text_files import has_label_column, load_labelled, load_pairs, load_text_column

    if "seq2seq" in tasks:
        return load_pairs(path, settings)
    if "classification" in tasks and (not set(_LANGUAGE) & set(tasks) or has_label_column(path, settings)):
        return load_labelled(path, settings)
    return load_text_column(path, settings)
