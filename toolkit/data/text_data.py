"""Text in memory: labelled texts, pairs of texts, and documents. Cut into tokens only when a network is trained on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.errors import OptionError
from runtime.text import Tokenizer, characters_of, words_of

from .dataset import UNITS, DataSettings, Rows, split_rows, spread

SEPARATOR = "\n\n"  # between the documents of a stream


@dataclass(frozen=True)
class Documents:
    """Texts to model. A document is in one part of a split as a whole."""

    task: ClassVar[str] = "language-model"
    kind: ClassVar[str] = "tokens"
    name: str
    texts: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        return _digest(self.texts)

    @property
    def stream(self) -> str:
        """All documents as one text, the way language models read a part of the data."""
        return SEPARATOR.join(self.texts)

    def rows(self, indices: Rows) -> Documents:
        return replace(self, texts=_pick(self.texts, indices))

    def limited(self, limit: int) -> Documents:
        return self.rows(spread(len(self), limit))

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class LabelledTexts:
    """Texts of classes: `targets` are places in `labels`."""

    task: ClassVar[str] = "classification"
    kind: ClassVar[str] = "tokens"
    name: str
    texts: tuple[str, ...]
    targets: NDArray[np.int64]
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.targets):
            raise OptionError(f"{self.name} has {len(self.texts)} texts but {len(self.targets)} targets; give one for each")

    @cached_property
    def fingerprint(self) -> str:
        return _digest((*self.texts, *self.labels), self.targets.astype(np.int64).tobytes())

    def rows(self, indices: Rows) -> LabelledTexts:
        return replace(self, texts=_pick(self.texts, indices), targets=self.targets[indices])

    def limited(self, limit: int) -> LabelledTexts:
        return self.rows(spread(len(self), limit))

    def documents(self) -> Documents:
        """The same texts without their labels, for language modelling."""
        return Documents(self.name, self.texts)

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TextPairs:
    """Sources, each with one or more accepted targets. A unit says how a side is cut into tokens: "characters" or "words"."""

    task: ClassVar[str] = "seq2seq"
    kind: ClassVar[str] = "tokens"
    name: str
    sources: tuple[str, ...]
    targets: tuple[tuple[str, ...], ...]
    source_unit: str = "words"
    target_unit: str = "words"

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.targets):
            raise OptionError(
                f"{self.name} has {len(self.sources)} sources but {len(self.targets)} targets; give some for each"
            )
        if lacking := next((source for source, targets in zip(self.sources, self.targets, strict=True) if not targets), None):
            raise OptionError(f"{self.name}: {lacking!r} has no target; give one or more")
        for unit in (self.source_unit, self.target_unit):
            if unit not in UNITS:
                raise OptionError(f"{self.name}: texts cannot be cut into {unit!r}; expected {', '.join(UNITS)}")

    @cached_property
    def fingerprint(self) -> str:
        pairs = zip(self.sources, self.targets, strict=True)
        return _digest(text for source, targets in pairs for text in (source, *targets, ""))

    def rows(self, indices: Rows) -> TextPairs:
        return replace(self, sources=_pick(self.sources, indices), targets=tuple(self.targets[index] for index in indices))

    def limited(self, limit: int) -> TextPairs:
        return self.rows(spread(len(self), limit))

    def __len__(self) -> int:
        return len(self.sources)


TextData = Documents | LabelledTexts | TextPairs
_Text = TypeVar("_Text", Documents, LabelledTexts, TextPairs)


def split_texts(data: _Text, settings: DataSettings) -> tuple[_Text, _Text, _Text]:
    """The parts to train, validate and test on; labelled texts spread evenly by class."""
    strata = data.targets if isinstance(data, LabelledTexts) else None
    train, validation, test = split_rows(len(data), settings, strata, name=data.name)
    return data.rows(train), data.rows(validation), data.rows(test)


def build_tokenizer(
    texts: Iterable[str], *, unit: str, vocabulary: int = 1000, specials: Sequence[str] = (), minimum_count: int = 1
) -> Tokenizer:
    """The tokenizer of `unit` ("characters", "words" or "bpe") for `texts`, which are of the training part alone."""
    if unit == "characters":
        return characters_of(texts, specials=specials)
    if unit == "words":
        return words_of(texts, specials=specials, minimum_count=minimum_count)
    if unit != "bpe":
        raise OptionError(f"texts cannot be cut into {unit!r}; expected {', '.join(UNITS)}")
    from .bpe import train_bpe

    return train_bpe(texts, vocabulary=vocabulary, specials=specials)


def _pick(texts: tuple[str, ...], indices: Rows) -> tuple[str, ...]:
    return tuple(texts[index] for index in indices)


def _digest(texts: Iterable[str], more: bytes = b"") -> str:
    digest = hashlib.sha256(more)
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(f"{len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()
