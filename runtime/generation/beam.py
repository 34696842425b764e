"""Beam search: the `beams` best texts so far are continued together.

    score = Σ log-probabilities / length ** length_penalty          (Wu et al., 2016, without the constant)
          + coverage_penalty · Σ_source log min(Σ_target attention, 1)

The second part, from the same paper, is added when the search is over: it ranks the texts that finished, of which the best
`beams` by the first part are kept. Attention is counted over all tokens, the ending one too; see alignment.py.

Candidates are the best continuations of all beams; one that ends, if it is among the first `beams`, becomes a finished text,
the others go on. Groups of beams take turns, and a group pays `diversity` for every token that earlier groups took at this step
(Vijayakumar et al., "Diverse beam search", 2018). With a temperature, candidates are drawn without replacement by adding
Gumbel noise to the scores (Kool et al., "Stochastic beams and where to find them", 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from .numeric import log_softmax, top
from .options import Generation, Options
from .ranking import Ranking
from .sampling import restrict
from .search import (
    Alternatives,
    Array,
    Hypothesis,
    Moves,
    Request,
    aligned,
    edited,
    finish_of,
    generations_of,
    likeliest,
    no_token_left,
)


class Candidate(NamedTuple):
    row: int  # of the search, that it continues
    token: int
    score: float  # of the token, with everything that ranks it
    logprob: float  # the network's own
    alternatives: Alternatives = ()


@dataclass
class Group:
    """Beams that compete with each other. `live` are (row, text)."""

    options: Options
    size: int
    live: list[tuple[int, Hypothesis]]
    finished: list[Hypothesis] = field(default_factory=list)
    ended: int = 0  # texts that finished, the ones that were not good enough to keep included
    done: bool = False

    def continue_with(self, candidates: Iterable[tuple[Hypothesis, Candidate]], request: Request) -> list[tuple[int, int]]:
        """Take the candidates, best first; the (row, token) that the beams go on with."""
        moves: list[tuple[int, int]] = []
        live: list[Hypothesis] = []
        for rank, (before, candidate) in enumerate(candidates):
            if len(live) == self.size:
                break
            longer = Hypothesis(
                (*before.tokens, candidate.token),
                (*before.logprobs, candidate.logprob),
                before.total + candidate.score,
                (*before.alternatives, candidate.alternatives) if candidate.alternatives else before.alternatives,
            )
            finish = finish_of(request, longer.tokens)
            if finish is None:
                live.append(longer)
                moves.append((candidate.row, candidate.token))
            elif rank < self.size:
                self._keep(replace(longer, finish=finish))
        if not live and not self.finished:
            raise no_token_left(request, self.live[0][1].tokens if self.live else ())
        self.live = [(0, hypothesis) for hypothesis in live]  # rows are numbered when all groups have moved
        self.done = not live or self._is_settled(live[0], request)
        return [] if self.done else moves

    def _keep(self, hypothesis: Hypothesis) -> None:
        self.ended += 1
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda item: -item.normalised(self.options))
        del self.finished[self.size :]

    def _is_settled(self, best: Hypothesis, request: Request) -> bool:
        """Whether going on cannot, or is not expected to, give a better text."""
        if self.options.early_stopping == "count":
            return self.ended >= math.ceil(self.size * self.options.patience)
        if len(self.finished) < self.size:
            return False
        length = len(best.tokens)
        if self.options.early_stopping == "never" and self.options.length_penalty > 0:
            length = request.room  # a negative total shrinks most when the text gets as long as it may
        return bool(best.total / length**self.options.length_penalty <= self.finished[-1].normalised(self.options))


class BeamSearch:
    def __init__(self, request: Request, forced: Hypothesis | None = None) -> None:
        options = request.options
        self.request = request
        self.width = 1
        size = options.beams // options.groups
        self.groups = [Group(options, size, [(0, forced or Hypothesis())]) for _ in range(options.groups)]
        seed = None if options.seed is None else [options.seed, 0]
        self._random = np.random.default_rng(seed) if options.temperature else None
        # enough that `size` go on though every ending token comes first
        self.candidates = max(2, 1 + len(request.ending)) * size

    @property
    def is_plain(self) -> bool:
        """Whether `take_plain_beams` may take its place."""
        options = self.request.options
        return not (self.request.filters or options.temperature or options.alternatives or options.groups > 1)

    @property
    def banned(self) -> tuple[int, ...]:
        """Of the next token; all beams are equally long."""
        length = next(len(hypothesis.tokens) for group in self.groups if not group.done for _, hypothesis in group.live)
        return self.request.banned(length)

    def take(self, logits: Array) -> Moves:
        options = self.request.options
        scores = log_softmax(logits)
        live = [(row, hypothesis) for group in self.groups if not group.done for row, hypothesis in group.live]
        live = sorted(live, key=lambda item: item[0])  # as the rows of the logits are
        if self.width == 1:  # after the prompt, which all groups share
            live = live[:1]
        alternatives = likeliest(scores, options.alternatives) if options.alternatives else [()] * len(scores)
        own = scores.copy()
        edited(self.request, scores, [hypothesis.tokens for _, hypothesis in live])
        if options.temperature:
            for row in scores:
                restrict(row, options)
        taken: dict[int, int] = {}  # token → how many beams of earlier groups took it
        moves: list[list[tuple[int, int]]] = []
        for group in self.groups:
            if group.done:
                moves.append([])
                continue
            candidates = self._candidates(group, scores, own, alternatives, taken)
            moves.append(group.continue_with(candidates, self.request))
            for _, token in moves[-1]:
                taken[token] = taken.get(token, 0) + 1
        return self._moves(moves)

    def _candidates(
        self, group: Group, scores: Array, own: Array, alternatives: Sequence[Alternatives], taken: dict[int, int]
    ) -> list[tuple[Hypothesis, Candidate]]:
        rows = [row for row, _ in group.live]
        ranked = scores[rows]
        for token, count in taken.items():
            ranked[:, token] -= self.request.options.diversity * count
        totals = np.array([hypothesis.total for _, hypothesis in group.live])
        noise = self._random.gumbel(size=ranked.shape).astype(np.float32) if self._random else np.float32(0)
        values, ids = top(ranked + noise, min(self.candidates, ranked.shape[1]))
        keys = values.astype(np.float64) + totals[:, None]
        found = []
        for place in np.argsort(-keys, axis=None, kind="stable")[: self.candidates].tolist():
            beam, rank = divmod(place, keys.shape[1])
            row, hypothesis = group.live[beam]
            token = int(ids[beam, rank])
            score = float(ranked[beam, token])
            if score == -math.inf:
                continue
            found.append((hypothesis, Candidate(row, token, score, float(own[row, token]), alternatives[row])))
        return found

    @property
    def totals(self) -> list[float]:
        """Of the only group's beams, in the order of their rows."""
        self.groups[0].live.sort(key=lambda item: item[0])
        return [hypothesis.total for _, hypothesis in self.groups[0].live]

    def accept(self, order: Sequence[int], logprobs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> Moves:
        """What `take` answers, given the likeliest tokens of every row and the order of them all: row · count + rank."""
        (group,) = self.groups
        return self._moves([group.continue_with(self._ordered(order, logprobs, tokens), self.request)])

    def _ordered(
        self, order: Sequence[int], logprobs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Hypothesis, Candidate]]:
        live, never, count = self.groups[0].live, self.banned, len(tokens[0])
        for place in order:
            beam, rank = divmod(place, count)
            token, logprob = tokens[beam][rank], logprobs[beam][rank]
            if token not in never and logprob != -math.inf:
                yield live[beam][1], Candidate(live[beam][0], token, logprob, logprob)

    def _moves(self, moves: list[list[tuple[int, int]]]) -> Moves:
        flat = [move for taken in moves for move in taken]
        rows = places_of([row for row, _ in flat])
        numbers = iter(rows)
        for group in self.groups:
            if not group.done:
                group.live = [(next(numbers), hypothesis) for _, hypothesis in group.live]
        self.width = len(rows)
        ordered = sorted(zip(rows, flat, strict=True))
        return Moves([parent for _, (parent, _) in ordered], [token for _, (_, token) in ordered])

    def finished(self) -> list[Hypothesis]:
        """The finished texts, the best first."""
        options = self.request.options
        found = [hypothesis for group in self.groups for hypothesis in group.finished]
        if options.coverage_penalty:
            found = aligned(self.request, found)
        return sorted(found, key=lambda item: -item.normalised(options))

    def results(self) -> list[Generation]:
        return generations_of(self.request, self.finished()[: self.request.options.n_best])

    def stable(self) -> tuple[int, ...]:
        texts = [hypothesis.tokens for group in self.groups if not group.done for _, hypothesis in group.live]
        texts += [hypothesis.tokens for group in self.groups for hypothesis in group.finished]
        return common_beginning(texts)


def take_plain_beams(searches: Sequence[BeamSearch], logits: Array, ranking: Ranking) -> list[Moves]:
    """What `take` answers for plain searches, whose rows lie one after the other, for all of them at once."""
    logprobs, tokens = ranking.best(logits, max(search.candidates + len(search.banned) for search in searches))
    keys = -(logprobs + np.array([total for search in searches for total in search.totals])[:, None])  # in float64
    widths = [search.width for search in searches]
    if len(set(widths)) == 1:
        orders = keys.reshape(len(searches), -1).argsort(axis=1, kind="stable").tolist()
    else:
        orders = [part.argsort(axis=None, kind="stable").tolist() for part in np.split(keys, np.cumsum(widths)[:-1])]
    all_logprobs, all_tokens = logprobs.tolist(), tokens.tolist()
    moves, start = [], 0
    for search, width, order in zip(searches, widths, orders, strict=True):
        rows = slice(start, start + width)
        start += width
        moves.append(search.accept(order, all_logprobs[rows], all_tokens[rows]))
    return moves


def places_of(parents: Sequence[int]) -> list[int]:
    """The row each beam goes to: that of its parent, where no other child of it is, so that little must be copied."""
    places, taken = [-1] * len(parents), set()
    for beam, parent in enumerate(parents):
        if parent < len(parents) and parent not in taken:
            places[beam] = parent
            taken.add(parent)
    free = (row for row in range(len(parents)) if row not in taken)
    return [next(free) if place < 0 else place for place in places]


def common_beginning(texts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    if not texts:
        return ()
    low, high = min(texts), max(texts)
    length = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:length]
