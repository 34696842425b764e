"""The user's own text: a text file, a table of pairs, a table with a text and a label column."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from runtime.errors import DataError

from .dataset import DataSettings
from .table import TARGET_NAMES, cells_of, classes_of, read_rows
from .text_data import Documents, LabelledTexts, TextPairs

_PIECES = 100  # a text file is cut into about as many, so that the parts of a split come from all over it
_SMALLEST_PIECE = 500  # characters; a piece of a few words would be out of context
_FEWEST_PIECES = 20


def read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start} is wrong); save it as UTF-8") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    text = text.replace("\r\n", "\n")
    if not text.strip():
        raise DataError(f"{path} is empty; expected text")
    return text


def load_text(path: Path) -> Documents:
    """A text file, cut at blank lines, or where there are too few at line ends, into pieces of roughly equal size."""
    text = read_text(path)
    pieces: list[str] = []
    for separator in ("\n\n", "\n", " "):
        parts = [part for part in re.split(rf"{separator}+", text) if part.strip()]
        pieces = _join(parts, separator, size=max(_SMALLEST_PIECE, len(text) // _PIECES))
        if len(pieces) < _FEWEST_PIECES:  # of a short text the pieces may be smaller
            pieces = _join(parts, separator, size=len(text) // _FEWEST_PIECES)
        if len(pieces) >= _FEWEST_PIECES:
            break
    return Documents(path.name, tuple(pieces))


def _join(parts: list[str], separator: str, *, size: int) -> list[str]:
    """Neighbouring parts joined into pieces that end where the text passes the next multiple of `size`."""
    pieces: list[str] = []
    current: list[str] = []
    passed, goal = 0, size
    for part in parts:
        current.append(part)
        passed += len(part) + len(separator)
        if passed >= goal:
            pieces.append(separator.join(current))
            current = []
            goal = (passed // max(size, 1) + 1) * size
    if current:
        pieces.append(separator.join(current))
    return pieces


def load_pairs(path: Path, settings: DataSettings) -> TextPairs:
    """A table of sources and targets; rows of the same source are several accepted targets of it.

    A .tsv of two columns needs no header. A side whose texts are all single words is cut into characters, another into
    words; data.unit decides for both.
    """
    targets: dict[str, dict[str, None]] = {}
    for line, source, target in _pair_rows(path, settings):
        for name, text in (("source", source), ("target", target)):
            if not text:
                raise DataError(f"{path} line {line} has an empty {name}; fill or remove it")
        targets.setdefault(source, {})[target] = None
    accepted = tuple(map(tuple, targets.values()))
    return TextPairs(
        name=path.name,
        sources=tuple(targets),
        targets=accepted,
        source_unit=settings.unit or _unit_of(targets),
        target_unit=settings.unit or _unit_of(text for group in accepted for text in group),
    )


def load_labelled(path: Path, settings: DataSettings) -> LabelledTexts:
    """A table with a text and a label column. A column of symbols between spaces is text whose unit is words."""
    header, rows = read_rows(path)
    text = _column(path, header, settings.text, ("text",), option="text", purpose="the text")
    label = _column(path, header, settings.target, TARGET_NAMES, option="target", purpose="the one to predict")
    if text == label:
        raise DataError(f"{path}: column {text!r} cannot be both the text and the label; set data.text or data.target")
    texts = cells_of(path, header, rows, text)
    cells = cells_of(path, header, rows, label)
    labels, targets = classes_of(path, label, cells, advice="name the label column with --set data.target=COLUMN")
    return LabelledTexts(path.name, tuple(texts), targets, labels)


def load_text_column(path: Path, settings: DataSettings) -> Documents:
    """The text column of a table, a document a row."""
    header, rows = read_rows(path)
    text = _column(path, header, settings.text, ("text",), option="text", purpose="the text")
    return Documents(path.name, tuple(cells_of(path, header, rows, text)))


def has_label_column(path: Path, settings: DataSettings) -> bool:
    header, _ = read_rows(path)
    return settings.target is not None or any(name in header for name in TARGET_NAMES)


def _pair_rows(path: Path, settings: DataSettings) -> list[tuple[int, str, str]]:
    if path.suffix.lower() == ".tsv" and settings.text is None and settings.target is None:
        rows = _plain_rows(path)
        first = tuple(cell.lower() for cell in rows[0][1:])
        rows = rows[1:] if first == ("source", "target") else rows
        if not rows:
            raise DataError(f"{path} has a header but no rows; expected a source, a tab and a target on each line")
        return rows
    header, table = read_rows(path)
    source = _column(path, header, settings.text, ("source",), option="text", purpose="the source")
    target = _column(path, header, settings.target, ("target",), option="target", purpose="the target")
    places = header.index(source), header.index(target)
    return [(line, *(" ".join(row[place].split()) for place in places)) for line, row in table]  # type: ignore[misc]


def _plain_rows(path: Path) -> list[tuple[int, str, str]]:
    """Lines of two texts with one tab between; quotes mean nothing here, as they are common in language."""
    rows = []
    for line, content in enumerate(read_text(path).split("\n"), 1):
        if not content.strip():
            continue
        cells = content.split("\t")
        if len(cells) != 2:
            raise DataError(f"{path} line {line} has {len(cells)} columns; expected two: a source, a tab and a target")
        rows.append((line, " ".join(cells[0].split()), " ".join(cells[1].split())))
    return rows


def _unit_of(texts: Iterable[str]) -> str:
    return "words" if any(" " in text for text in texts) else "characters"


def _column(path: Path, header: list[str], wanted: str | None, usual: tuple[str, ...], *, option: str, purpose: str) -> str:
    found = wanted if wanted in header else next((name for name in usual if name in header), None) if wanted is None else None
    if found is None:
        missing = repr(wanted) if wanted else " or ".join(map(repr, usual))
        raise DataError(
            f"{path} has no column {missing}; name {purpose} with --set data.{option}=COLUMN (it has {', '.join(header)})"
        )
    return found
