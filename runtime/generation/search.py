"""Searches: what is done with the scores of one request's rows. `Independent` is greedy decoding and sampling.

A search has `width` rows. `take` gets their scores for the next token and answers which of the rows go on, each with which
token; rows may be dropped or repeated. When none goes on the search is done and has its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import GenerationError
from .alignment import Align, coverage
from .filters import Filter
from .numeric import log_softmax, top
from .options import Generation, Options
from .ranking import Ranking
from .sampling import draw, restrict

Array = NDArray[Any]
Alternatives = tuple[tuple[int, float], ...]
_SPLIT = 3  # bytes of a character that was cut in two, at the beginning of a tail


class Moves(NamedTuple):
    """The rows that go on: each from which of the search's rows, and with which token."""

    parents: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Request:
    """One request in token numbers. Generated tokens begin with `prefix`, which is fed like the prompt."""

    options: Options
    prompt: tuple[int, ...]  # of the decoder
    prefix: tuple[int, ...]
    room: int  # most tokens to generate, prefix included
    eos: int | None
    filters: tuple[Filter, ...]
    decode: Callable[[Iterable[int]], str]
    source: tuple[int, ...] | None = None
    pad: int | None = None  # never generated: a decoder passes over it
    align: Align | None = None  # where attention is asked for, or ranks

    @cached_property
    def ending(self) -> tuple[int, ...]:
        return (*(() if self.eos is None else (self.eos,)), *map(int, self.options.stop_tokens))

    def banned(self, generated: int) -> tuple[int, ...]:
        """Tokens that cannot follow so many generated ones: padding, and the end before its time."""
        early, late = self._bans
        return early if generated < self.options.min_new_tokens else late

    @cached_property
    def _bans(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        padding = () if self.pad is None else (self.pad,)
        return tuple(dict.fromkeys((*padding, *self.ending))), padding

    @property
    def length(self) -> int:
        """Tokens that the decoder is fed before it is asked for one."""
        return len(self.prompt) + len(self.prefix)


@dataclass(slots=True)  # not frozen: that takes four times as long to make, and one is made for every token
class Hypothesis:
    """A text in the making. `total` is the sum of the scores, `logprobs` are the network's own.

    `attention` (tokens, source tokens) and `coverage` are known of finished texts, where they were asked for.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0
    alternatives: tuple[Alternatives, ...] = ()
    finish: str | None = None
    attention: Array | None = field(default=None, compare=False)
    coverage: float = 0.0

    def normalised(self, options: Options) -> float:
        score = self.total / max(1, len(self.tokens)) ** options.length_penalty
        return float(score + options.coverage_penalty * self.coverage)


class Search(Protocol):
    request: Request
    width: int

    def take(self, logits: Array) -> Moves: ...

    def results(self) -> list[Generation]: ...

    def stable(self) -> tuple[int, ...]:
        """The tokens that can no longer change."""
        ...


def finish_of(request: Request, tokens: Sequence[int]) -> str | None:
    """Why a text ends with its last token, or None."""
    last = tokens[-1]
    if last == request.eos:
        return "eos"
    if last in request.options.stop_tokens:
        return "stop"
    if request.options.stop and stop_in(request, tokens):
        return "stop"
    return "length" if len(tokens) >= request.room else None


def stop_in(request: Request, tokens: Sequence[int]) -> bool:
    """Whether the last tokens complete a stop text."""
    longest = max(len(stop) for stop in request.options.stop) + _SPLIT
    size = longest
    tail = request.decode(tokens[-size:])
    while len(tail) < longest and size < len(tokens):  # of special tokens, which give no text, or several bytes a character
        size *= 2
        tail = request.decode(tokens[-size:])
    return any(stop in tail for stop in request.options.stop)


def generation_of(request: Request, hypothesis: Hypothesis) -> Generation:
    """The result: without the ending token, and with the text cut at a stop text."""
    tokens = hypothesis.tokens
    ended = hypothesis.finish in ("eos", "stop") and tokens[-1] in request.ending
    kept = len(tokens) - ended
    text = request.decode(tokens[:kept])
    if hypothesis.finish == "stop" and not ended:
        text = text[: min(place for stop in request.options.stop if (place := text.find(stop)) >= 0)]
    return Generation(
        text,
        tuple(tokens[:kept]),
        hypothesis.normalised(request.options),
        hypothesis.logprobs[:kept],
        hypothesis.finish or "length",
        hypothesis.alternatives[:kept],
        None if hypothesis.attention is None else hypothesis.attention[:kept],
    )


def generations_of(request: Request, hypotheses: Sequence[Hypothesis]) -> list[Generation]:
    """The results, with attention if the request asks for it."""
    if request.options.attention and any(hypothesis.attention is None for hypothesis in hypotheses):
        hypotheses = aligned(request, hypotheses)
    elif not request.options.attention:
        hypotheses = [replace(hypothesis, attention=None) for hypothesis in hypotheses]
    return [generation_of(request, hypothesis) for hypothesis in hypotheses]


def aligned(request: Request, hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The same with their attention and coverage."""
    assert request.align is not None
    weights = request.align([hypothesis.tokens for hypothesis in hypotheses])
    pairs = zip(hypotheses, weights, strict=True)
    return [replace(hypothesis, attention=found, coverage=coverage(found)) for hypothesis, found in pairs]


def edited(request: Request, scores: Array, texts: Sequence[Sequence[int]]) -> None:
    """Apply the request's bans and filters to log-probabilities (rows, vocabulary), in place."""
    scores[:, request.banned(len(texts[0]))] = -np.inf
    start = len(request.prompt)
    for row, tokens in zip(scores, texts, strict=True):
        everything = [*request.prompt, *tokens]
        for apply in request.filters:
            apply(row, everything, start)


def no_token_left(request: Request, tokens: Sequence[int]) -> GenerationError:
    so_far = request.decode(tokens)
    return GenerationError(
        f"after {len(tokens)} tokens ({so_far[-40:]!r}) no token is allowed any more; relax constraint, bad_words, "
        "no_repeat_ngram or min_new_tokens"
    )


def likeliest(scores: Array, count: int) -> list[Alternatives]:
    """For each row the likeliest tokens with their log-probabilities."""
    values, ids = top(scores, min(count, scores.shape[-1]))
    return [tuple(zip(map(int, i), map(float, v), strict=True)) for v, i in zip(values, ids, strict=True)]


@dataclass
class Independent:
    """Greedy decoding, or sampling of `n_best` texts: rows that do not know of each other."""

    request: Request
    forced: Hypothesis = field(default_factory=Hypothesis)  # the prefix, with its log-probabilities
    width: int = 1

    def __post_init__(self) -> None:
        options = self.request.options
        self._live: list[tuple[int, Hypothesis]] = [(number, self.forced) for number in range(options.n_best)]
        self._done: dict[int, Hypothesis] = {}
        drawn = options.n_best if options.temperature else 0
        self._random = [np.random.default_rng(_seed_of(options, number)) for number in range(drawn)]

    @property
    def is_plain(self) -> bool:
        """Whether only the likeliest token matters."""
        options = self.request.options
        return not (options.temperature or self.request.filters or options.alternatives)

    @property
    def banned(self) -> tuple[int, ...]:
        """Of the next token."""
        return self.request.banned(len(self._live[0][1].tokens))

    def take(self, logits: Array) -> Moves:
        options = self.request.options
        scores = log_softmax(logits)
        if len(scores) < len(self._live):  # after the prompt, which all texts share
            scores = np.repeat(scores, len(self._live), axis=0)
        alternatives = likeliest(scores, options.alternatives) if options.alternatives else [()] * len(scores)
        own = scores.copy()
        edited(self.request, scores, [hypothesis.tokens for _, hypothesis in self._live])
        chosen = []
        for row, (number, hypothesis) in zip(scores, self._live, strict=True):
            best = int(row.argmax())
            if not np.isfinite(row[best]):
                raise no_token_left(self.request, hypothesis.tokens)
            if options.temperature:
                restrict(row, options)
                best = draw(row, float(self._random[number].random()))
            chosen.append(best)
        totals = own[np.arange(len(chosen)), chosen]
        return self.accept(chosen, [float(value) for value in totals], alternatives)

    def accept(self, chosen: list[int], logprobs: list[float], alternatives: Sequence[Alternatives] = ()) -> Moves:
        """Go on with the chosen tokens."""
        live, parents, tokens = [], [], []
        shared = self.width == 1
        for row, ((number, hypothesis), token, logprob) in enumerate(zip(self._live, chosen, logprobs, strict=True)):
            longer = Hypothesis(
                (*hypothesis.tokens, token),
                (*hypothesis.logprobs, logprob),
                hypothesis.total + logprob,
                (*hypothesis.alternatives, alternatives[row])
                if alternatives and alternatives[row]
                else hypothesis.alternatives,
            )
            if finish := finish_of(self.request, longer.tokens):
                self._done[number] = replace(longer, finish=finish)
            else:
                live.append((number, longer))
                parents.append(0 if shared else row)
                tokens.append(token)
        self._live = live
        self.width = len(live)
        return Moves(parents, tokens)

    def follow(self, never: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> int | None:
        """Go on, in the only row, with the first of the likeliest tokens that may follow; None when the text ends with it."""
        place = 0
        while tokens[place] in never:
            place += 1
        before, token, logprob = self._live[0][1], tokens[place], logprobs[place]
        text = Hypothesis((*before.tokens, token), (*before.logprobs, logprob), before.total + logprob)
        if finish := finish_of(self.request, text.tokens):
            text.finish = finish
            self._live, self._done, self.width = [], {0: text}, 0
            return None
        self._live[0] = (0, text)
        return token

    def results(self) -> list[Generation]:
        return generations_of(self.request, [self._done[number] for number in sorted(self._done)])

    def stable(self) -> tuple[int, ...]:
        first = self._done.get(0) or next((hypothesis for number, hypothesis in self._live if number == 0), Hypothesis())
        return first.tokens


def take_plain(searches: Sequence[Independent], logits: Array, ranking: Ranking) -> list[int | None]:
    """What `take` answers for plain searches of one row each, for all of them at once: a token, or None for one that ended."""
    banned = [search.banned for search in searches]
    logprobs, tokens = ranking.best(logits, 2 + max(map(len, banned)))  # of one onnxruntime takes twice as long as of two
    return [
        search.follow(never, numbers, scores)
        for search, never, numbers, scores in zip(searches, banned, tokens.tolist(), logprobs.tolist(), strict=True)
    ]


def _seed_of(options: Options, number: int) -> list[int] | None:
    return None if options.seed is None else [options.seed, number]
