"""Texts as numbers: what the tasks on text learn from. One class for each shape that text data has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .dataset import spread

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class TokenRows:
    """Texts, each with the number of its class (all 0 where there are no classes)."""

    sequences: tuple[Tokens, ...]
    targets: NDArray[np.int64]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(sequence) for sequence in self.sequences], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True)
class TokenPairs:
    """Sources, each with one or more accepted targets."""

    sources: tuple[Tokens, ...]
    targets: tuple[tuple[Tokens, ...], ...]

    @cached_property
    def rows(self) -> list[tuple[int, Tokens]]:
        """(number of the source, one of its targets): every accepted target is something to learn."""
        return [(number, target) for number, accepted in enumerate(self.targets) for target in accepted]

    @cached_property
    def row_lengths(self) -> NDArray[np.int64]:
        """By target first: decoding step by step costs more than encoding."""
        return np.array([256 * len(target) + len(self.sources[number]) for number, target in self.rows], dtype=np.int64)

    @property
    def longest_target(self) -> int:
        return max(len(target) for _, target in self.rows)

    def some(self, count: int) -> TokenPairs:
        """At most `count` sources, at equal distances: the data may be sorted."""
        rows = spread(len(self), count)
        return TokenPairs(tuple(self.sources[row] for row in rows), tuple(self.targets[row] for row in rows))

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class TokenStream:
    """One long text, and how many characters its tokens stand for."""

    ids: NDArray[np.int64]
    characters: int

    def first(self, count: int) -> TokenStream:
        if len(self.ids) <= count:
            return self
        return TokenStream(self.ids[:count], round(self.characters * count / len(self.ids)))

    def __len__(self) -> int:
        return len(self.ids)


def longest(sequences: Sequence[Tokens]) -> int:
    return max((len(sequence) for sequence in sequences), default=0)
