"""Speculation by looking up: where the last tokens occurred before, what followed then is guessed to follow now.

Several guesses are verified in one call of the decoder, which costs little more than one token where reading the weights takes
the time. The answer is that of plain decoding. A call on several tokens rounds differently from one on a single token, so
a guess counts only where the likeliest token leads by more than the error that logits may have; a closer one is decided by a
plain step. Where guesses cost more time than they save, they end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .decoder import Decoder
from .numeric import log_softmax, top
from .rows import Rows
from .search import Array, Moves, Request, Search, edited

MOST_GUESSES = 8
_LONGEST, _SHORTEST = 3, 2  # tokens that must have occurred before
_TRIALS = 4  # calls with guesses before they are judged


class Speculator:
    """The guesses for one greedy generation."""

    def __init__(self, decoder: Decoder, request: Request, search: Search) -> None:
        self.decoder = decoder
        self.request = request
        self.search = search
        self.margin = 2 * decoder.noise
        self.pays = True
        self._seen: dict[tuple[int, ...], int] = {}  # n-gram → where what followed it last begins
        self._indexed = 0
        self._plain, self._guessed = _Pace(), _Pace()

    @staticmethod
    def works_with(decoder: Decoder) -> bool:
        """Guesses that fail are taken back, which a hidden state cannot; and they go in together."""
        return decoder.can_rewind and decoder.at_once is None

    def advance(self, rows: Rows, token: int, take: Callable[[Array], Moves]) -> Array | None:
        """Feed `token` and guesses; logits (1, vocabulary) after the last token that `take` chose, None when it has ended."""
        begun = time.perf_counter()
        guesses = self.guesses(rows) if self.pays else []
        if not guesses:
            logits: Array = rows.advance(np.array([[token]]))[:, 0]
            self._plain.add(1, time.perf_counter() - begun)
            return logits
        before = int(rows.lengths[0])
        fed = [token, *guesses]
        logits = rows.advance(np.array([fed]), range(len(fed)))[0]  # (fed, vocabulary)
        verdict = self._judge_guesses(logits, guesses, take)
        self._guessed.add(1 + verdict.right, time.perf_counter() - begun)
        self.pays = not self._costs_more()
        if verdict.ended:
            return None
        if verdict.close:  # the last token that is certain once more, alone, decides
            rows.truncate(before + verdict.right)
            following = fed[verdict.right]
        elif verdict.instead is not None:
            rows.truncate(before + verdict.right + 1)
            following = verdict.instead
        else:
            return logits[-1:]
        return rows.advance(np.array([[following]]))[:, 0]

    def _judge_guesses(self, logits: Array, guesses: Sequence[int], take: Callable[[Array], Moves]) -> Verdict:
        for place, guess in enumerate(guesses):
            row = logits[place : place + 1]
            if self._lead(row) <= self.margin:
                return Verdict(place, close=True)
            moves = take(row)
            if not moves.tokens:
                return Verdict(place, ended=True)
            if moves.tokens[0] != guess:
                return Verdict(place, instead=moves.tokens[0])
        return Verdict(len(guesses), close=self._lead(logits[-1:]) <= self.margin)

    def _lead(self, row: Array) -> float:
        """By how much the likeliest token leads."""
        scores = log_softmax(row.copy())
        edited(self.request, scores, [self.search.stable()])
        values, _ = top(scores, min(2, scores.shape[1]))
        return float(values[0, 0] - values[0, -1]) if values.shape[1] > 1 and np.isfinite(values[0, 0]) else 0.0

    def guesses(self, rows: Rows) -> list[int]:
        """What followed the last tokens when they occurred before; none if they did not."""
        text = [*self.request.prompt, *self.search.stable()]
        self._index(text)
        free = rows.capacity - int(rows.lengths[0]) - 1
        left = self.request.room - len(self.search.stable())
        for size in range(_LONGEST, _SHORTEST - 1, -1):
            found = self._seen.get(tuple(text[-size:])) if len(text) > size else None
            if found is not None:
                return text[found : found + min(MOST_GUESSES, free, left)]
        return []

    def _index(self, text: Sequence[int]) -> None:
        """Remember every n-gram but the last ones, which the text ends with."""
        for end in range(max(self._indexed, _SHORTEST), len(text)):
            for size in range(_SHORTEST, _LONGEST + 1):
                if end >= size:
                    self._seen[tuple(text[end - size : end])] = end
        self._indexed = len(text)

    def _costs_more(self) -> bool:
        """Whether a token has taken longer with guesses than without."""
        enough = self._guessed.calls >= _TRIALS and self._plain.calls >= 1
        return enough and self._guessed.seconds_a_token > self._plain.seconds_a_token


@dataclass(frozen=True)
class Verdict:
    """How many guesses were right, and what comes after them."""

    right: int
    ended: bool = False
    close: bool = False  # too close to be decided by a call on several tokens
    instead: int | None = None  # what was chosen where a guess was wrong


class _Pace:
    def __init__(self) -> None:
        self.calls, self._tokens, self._seconds = 0, 0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.calls, self._tokens, self._seconds = self.calls + 1, self._tokens + tokens, self._seconds + seconds

    @property
    def seconds_a_token(self) -> float:
        return self._seconds / self._tokens
