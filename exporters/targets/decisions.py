"""How sure the answers of a search are: the error of log-probabilities that every decision on the way would withstand.

Greedy decoding decides which token leads. A beam search decides which candidates go on, which of those that end are kept,
whether it is settled, and in which order the texts come. A decision between two sums of n log-probabilities that are `margin`
apart withstands an error of margin / 2n in each of them. An answer that withstands less than the error there may be is a tie
within noise: another order of the same additions may give another answer, and neither is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.generation.beam import BeamSearch
from runtime.generation.generate import TextGenerator
from runtime.generation.numeric import log_softmax
from runtime.generation.options import Options
from runtime.generation.rows import Rows
from runtime.generation.search import Independent, Request

Array = NDArray[Any]


def withstands(generator: TextGenerator, prompt: Sequence[int], options: Options) -> float:
    """The largest error under which the answer to this prompt stays what it is."""
    request = generator.requests.request(prompt, options)
    if options.beams > 1:
        search = BeamSearch(request)
        watch = _Beams(request)
        found = [watch.step(logits, search) for logits in _logits(generator, request, search)]
        return min([*found, *watch.order()])
    greedy = Independent(request)
    return min(_lead(logits, request) for logits in _logits(generator, request, greedy))


def _logits(generator: TextGenerator, request: Request, search: BeamSearch | Independent) -> Iterator[Array]:
    """What the search is shown before each of its moves. The search has moved when the next is asked for."""
    decoder = generator.decoder
    rows = Rows(decoder, room=request.options.beams, capacity=decoder.capacity(len(request.prompt) + request.room))
    rows.start(1, None if request.source is None else generator.requests.encode([request.source]))
    logits = rows.read(np.array([request.prompt], np.int64))[:, -1].copy()
    while True:
        moves = search.take(logits.copy())
        yield logits
        if not moves.tokens:
            return
        rows.select(moves.parents)
        logits = rows.step(moves.tokens).copy()


def _possible(logits: Array, request: Request) -> Array:
    scores = log_softmax(logits.copy()).astype(np.float64)
    scores[:, list(request.banned(0))] = -np.inf
    return scores


def _lead(logits: Array, request: Request) -> float:
    best = np.sort(_possible(logits, request)[0])[::-1]
    return float(best[0] - best[1]) / 2 if len(best) > 1 and np.isfinite(best[1]) else np.inf


@dataclass
class _Beams:
    request: Request
    totals: Array = field(default_factory=lambda: np.zeros(1))
    ended: list[float] = field(default_factory=list)  # scores of all texts that could be kept
    length: int = 0

    def step(self, logits: Array, search: BeamSearch) -> float:
        """What the move that `search` has just made on these logits withstands."""
        self.length += 1
        size = self.request.options.beams
        scores = _possible(logits, self.request) + self.totals[:, None]
        order = np.argsort(-scores, axis=None, kind="stable")
        order = order[np.isfinite(scores.ravel()[order])]
        keys, tokens = scores.ravel()[order], order % scores.shape[1]
        ends = np.full(len(keys), self.length >= self.request.room) | np.isin(tokens, self.request.ending)
        margins = []
        if len(keys) > size and ends[size - 1 : size + 1].any():  # whether one that ends is among the first
            margins.append((keys[size - 1] - keys[size]) / (2 * self.length))
        going = keys[~ends]
        if len(going) > size:
            margins.append((going[size - 1] - going[size]) / (2 * self.length))
        self.ended += [float(key) / self.length for key in keys[:size][ends[:size]]]
        group = search.groups[0]
        if len(group.finished) == size and len(going):
            margins.append(abs(going[0] / self.length - group.finished[-1].normalised(group.options)) / 2)
        if not group.done:
            self.totals = np.array(search.totals)
        return float(min(margins, default=np.inf))

    def order(self) -> list[float]:
        """What the order of the texts withstands, and that no other is among them."""
        best = sorted(self.ended, reverse=True)[: self.request.options.beams + 1]
        return [(one - other) / 2 for one, other in pairwise(best)]
