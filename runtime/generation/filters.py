"""What a text may be: filters edit the log-probabilities of the next token, the same for every strategy.

A filter sees one row: `scores` (vocabulary,), which it changes in place (-inf: banned), `tokens` (the prompt and what was
generated so far) and `start`, the place of the first generated one. It remembers nothing, so that the rows of a batch and
the beams of a search share it. Penalties come first, then bans: what is banned stays banned. Padding and an end before its
time, which nearly every request bans, are no filters: see `Request.banned`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index

import numpy as np
from numpy.typing import NDArray

from ..errors import GenerationError, OptionError
from ..text import UNK
from .options import Constraint, Options

Scores = NDArray[np.float32]
Ids = NDArray[np.int64]
Filter = Callable[[Scores, Sequence[int], int], None]
Encode = Callable[[str], Sequence[int]]


def filters_for(options: Options, *, ending: Sequence[int], encode: Encode, vocabulary: int) -> tuple[Filter, ...]:
    """The filters that `options` ask for; none of them for none. `ending` are <eos> and the stop tokens."""
    for token in ending:
        _check_token(token, vocabulary, "stop_tokens")
    filters: list[Filter] = []
    if options.repetition_penalty != 1:
        filters.append(RepetitionPenalty(options.repetition_penalty))
    if options.presence_penalty or options.frequency_penalty:
        filters.append(OccurrencePenalty(options.presence_penalty, options.frequency_penalty))
    if options.no_repeat_ngram:
        filters.append(NoRepeatNgram(options.no_repeat_ngram))
    if words := _bad_words(options.bad_words, encode, vocabulary):
        filters.append(BadWords(words))
    if options.constraint is not None:
        filters.append(Allowed(options.constraint))
    return tuple(filters)


@dataclass(frozen=True)
class RepetitionPenalty:
    """Multiplies the log-probability of every token that occurred, prompt included (Keskar et al., "CTRL", 2019)."""

    penalty: float

    def __call__(self, scores: Scores, tokens: Sequence[int], start: int) -> None:
        occurred = _array(tokens)
        scores[occurred] *= self.penalty  # reads all before it writes any: a token that occurred twice is multiplied once


@dataclass(frozen=True)
class OccurrencePenalty:
    """Subtracts `presence` from every generated token, and `frequency` for each time it was generated."""

    presence: float
    frequency: float

    def __call__(self, scores: Scores, tokens: Sequence[int], start: int) -> None:
        generated, counts = np.unique(_array(tokens[start:]), return_counts=True)
        scores[generated] -= self.presence + self.frequency * counts


@dataclass(frozen=True)
class NoRepeatNgram:
    """Bans what would complete a run of `size` tokens that occurred before, prompt included."""

    size: int

    def __call__(self, scores: Scores, tokens: Sequence[int], start: int) -> None:
        text = _array(tokens)
        runs = len(text) - self.size + 1  # that are complete
        if runs <= 0:
            return
        same = np.ones(runs, np.bool_)
        for place in range(self.size - 1):
            same &= text[place : place + runs] == text[runs + place]  # the last size - 1 tokens begin at `runs`
        scores[text[self.size - 1 :][same]] = -np.inf


class BadWords:
    """Bans a word of one token always, and the last token of a longer one where the tokens before it match."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        words = sorted(set(map(tuple, words)))
        self._always = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._after: dict[int, list[tuple[list[int], int]]] = {}  # last token but one → (tokens before the last, last)
        for *before, last in words:
            if before:
                self._after.setdefault(before[-1], []).append((before, last))

    def __call__(self, scores: Scores, tokens: Sequence[int], start: int) -> None:
        scores[self._always] = -np.inf
        if len(tokens) == 0:
            return
        for before, last in self._after.get(tokens[-1], ()):
            if len(before) == 1 or list(tokens[-len(before) :]) == before:
                scores[last] = -np.inf


@dataclass(frozen=True)
class Allowed:
    """Bans everything but what the constraint allows after the generated tokens."""

    constraint: Constraint

    def __call__(self, scores: Scores, tokens: Sequence[int], start: int) -> None:
        generated = tokens[start:]
        allowed = self.constraint(generated.tolist() if isinstance(generated, np.ndarray) else generated)
        if allowed is None:
            return
        ids = _allowed_ids(allowed, len(scores))
        kept = scores[ids]
        scores.fill(-np.inf)
        scores[ids] = kept


def _allowed_ids(allowed: Iterable[int], vocabulary: int) -> Ids:
    try:
        ids = allowed if isinstance(allowed, np.ndarray) else np.array(list(allowed))
    except (TypeError, ValueError):  # not iterable; of ragged sequences
        raise GenerationError(f"the constraint gave {allowed!r}, expected token numbers, or None for any token") from None
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise GenerationError(
            f"the constraint gave {ids.dtype} values such as {ids.tolist()[0]!r}, expected whole token numbers"
        )
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    if outside.size:
        raise GenerationError(
            f"the constraint allowed token {outside[0]}, but the vocabulary has 0 to {vocabulary - 1}; allow only those"
        )
    return ids.astype(np.int64)


def _bad_words(words: Sequence[str | Sequence[int]], encode: Encode, vocabulary: int) -> list[tuple[int, ...]]:
    """The token sequences to ban: a text's own, and where they differ those it has with a space before it."""
    found = []
    for word in words:
        if not isinstance(word, str):
            found.append(tuple(_check_token(token, vocabulary, "bad_words") for token in word))
            continue
        alone, inside = tuple(encode(word)), tuple(encode(" " + word))
        if not alone:
            raise OptionError(f"bad_words holds {word!r}, which the tokenizer makes no tokens of; leave it out")
        if UNK in alone:
            continue  # what the vocabulary cannot spell cannot occur, and other unknown words stay allowed
        found.append(alone)
        if inside[-len(alone) :] != alone:  # else what is banned alone is banned after the space too
            found.append(inside)
    return found


def _check_token(token: int, vocabulary: int, option: str) -> int:
    try:
        number = index(token)
    except TypeError:
        raise OptionError(f"{option} holds {token!r}, expected a token number from 0 to {vocabulary - 1}") from None
    if not 0 <= number < vocabulary:
        raise OptionError(f"{option} holds token {number}, but the vocabulary has 0 to {vocabulary - 1}; leave it out")
    return number


def _array(tokens: Sequence[int]) -> Ids:
    return np.asarray(tokens, np.int64)
