"""The log-probability of a text: under a language model, or of a target given its source.

    log p(y) = Σ_t log softmax(logits_t)[y_t],   logits_t from y before t (and the source)

A language model here has learnt streams of text that nothing marks the beginning of: its first token is given, not scored. The
target of an encoder–decoder begins after <bos> and ends with <eos>, which is scored too; where the bundle does not know them
(it has no tokenizer), the first token given is the one to start from.

A decoder may come in a second form, for many rows. Texts are read with it, as prompts are: all their tokens go in at once. So
`score` equals what `generate` said of a text where the model was loaded with many_rows=True; otherwise single tokens are
generated in the other form, and the two differ within the quantization's error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bundle import DECODER, ENCODER, GENERATOR, MANY, Bundle
from .errors import FeedError, OptionError
from .generation.wrapped import inside_one_graph
from .session import Session
from .state import LOGITS, SOURCE, TOKENS, Arrays, initial_state, step
from .tokens import TokenInput, Tokens, token_input

_LOGITS_AT_ONCE = 1 << 24  # values; 64 MB of float32


@dataclass(frozen=True)
class Score:
    """Natural logarithms. `tokens` are those that were scored: <eos> among them where a text ends with it."""

    total: float
    tokens: tuple[int, ...]
    token_logprobs: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(-self.total / len(self.tokens))


@dataclass(frozen=True)
class Scorer:
    """`encoder` and `source` are for encoder–decoders. Targets are without `bos` and `eos`, which are put around them."""

    decoder: Session
    target: TokenInput
    encoder: Session | None = None
    source: TokenInput | None = None
    bos: int | None = None
    eos: int | None = None

    def score(self, texts: Any, source: Any) -> tuple[list[Score], bool]:
        """The scores, and whether there was one text that was not in a list."""
        targets, one = self.target.read(texts, unread=0 if self.source is not None else 1)
        if self.source is None:
            if source is not None:
                raise OptionError("source is for encoder–decoders, and this is a language model; leave it out")
            return self._scores(targets, None), one
        if source is None:
            raise OptionError("this network gives a text for a source; pass source=… to score a text given it")
        sources, single = self.source.read(source)
        if len(sources) != len(targets) and not single:
            raise FeedError(f"there are {len(targets)} texts but {len(sources)} sources; give one for each, or one for all")
        return self._scores(targets, sources * len(targets) if single else sources), one

    def _scores(self, targets: Sequence[Tokens], sources: Sequence[Tokens] | None) -> list[Score]:
        rows = [self._whole(place, tokens) for place, tokens in enumerate(targets)]
        fed = [row[:-1] for row in rows]
        found: dict[int, NDArray[Any]] = {}
        limit = max(1, _LOGITS_AT_ONCE // self._vocabulary())
        for places, tokens in self._batches(fed, limit):
            given = self._encoded([sources[place] for place in places]) if sources is not None else {}
            wanted = np.zeros(tokens.shape, np.int64)  # what fills the batch up is scored too, and left out
            for at, place in enumerate(places):
                wanted[at, : len(fed[place])] = rows[place][1:]
            logprobs = self._logprobs(tokens, wanted, given, limit)
            found |= {place: logprobs[at, : len(fed[place])] for at, place in enumerate(places)}
        return [
            Score(float(found[place].sum()), tuple(row[1:]), tuple(found[place].tolist())) for place, row in enumerate(rows)
        ]

    def _whole(self, place: int, tokens: Tokens) -> Tokens:
        """From the token to start from to the last one that is scored."""
        row = [*([] if self.bos is None else [self.bos]), *tokens, *([] if self.eos is None else [self.eos])]
        if self.target.pad is not None and self.target.pad in tokens:
            raise FeedError(
                f"text {place} has the token {self.target.pad}, which is padding and has no probability; leave it out"
            )
        if len(row) < 2:
            raise FeedError(f"text {place} has one token, which nothing comes before; expected two or more")
        self.target.check_length(len(row) - 1, f"text {place}")
        return row

    def _batches(self, fed: Sequence[Tokens], limit: int) -> Iterator[tuple[list[int], NDArray[Any]]]:
        if self.source is None or self.source.pad is not None:
            return self.target.batches(fed, limit)
        # Sources that cannot be padded are encoded one by one: rows of equal targets may have sources of any length.
        return (([place], self.target.padded([row], len(row))) for place, row in enumerate(fed))

    def _encoded(self, sources: Sequence[Tokens]) -> Arrays:
        assert self.encoder is not None
        assert self.source is not None
        time = self.source.spec.shape[1]
        batch = self.source.padded(sources, time if isinstance(time, int) else max(map(len, sources)))
        return self.encoder.run({self.source.spec.name: batch})

    def _logprobs(self, tokens: NDArray[Any], wanted: NDArray[Any], given: Arrays, limit: int) -> NDArray[Any]:
        """log p of `wanted` (batch, time), each after `tokens` up to its place; a long row in pieces."""
        batch, time = tokens.shape
        takes = next(spec for spec in self.decoder.signature.inputs if spec.name == TOKENS).shape[1]
        unit = takes if isinstance(takes, int) else 1
        padded = -(-time // unit) * unit
        if padded > time:
            if self.target.pad is None:
                raise FeedError(f"the graph takes {unit} tokens at a time, and {time} cannot be divided so without padding")
            tokens = np.pad(tokens, ((0, 0), (0, padded - time)), constant_values=self.target.pad)
        state = initial_state(self.decoder.signature, batch, capacity=capacity_of(self.decoder, padded), given=given)
        piece = padded if batch * padded <= limit else max(unit, limit // batch // unit * unit)
        parts = []
        for start in range(0, padded, piece):
            logits, state = step(self.decoder, tokens[:, start : start + piece], state, given)
            parts.append(_picked(logits, wanted[:, start : start + piece]))
        return np.concatenate(parts, axis=1)

    def _vocabulary(self) -> int:
        size = next(spec for spec in self.decoder.signature.outputs if spec.name == LOGITS).shape[-1]
        return size if isinstance(size, int) else 1


def scorer_of(bundle: Bundle, sessions: Mapping[str, Session]) -> Scorer:
    if GENERATOR in sessions:
        raise inside_one_graph(bundle.manifest.name)
    target = token_input(bundle, DECODER, TOKENS) if DECODER in sessions else None
    source = token_input(bundle, ENCODER, SOURCE) if ENCODER in sessions else None
    if target is None or (ENCODER in sessions) != (source is not None):
        raise OptionError(f"this bundle's graphs ({', '.join(sessions)}) are not those of a decoder on tokens; use run")
    if LOGITS not in [spec.name for spec in sessions[DECODER].signature.outputs]:
        raise OptionError(f"the decoder has no output {LOGITS!r}, which a probability is made of; optimize it without --head")
    marks = (bundle.manifest.generation or {}) if source is not None else {}  # language models read streams without marks
    decoder = sessions.get(MANY, sessions[DECODER])
    return Scorer(decoder, target, sessions.get(ENCODER), source, marks.get("bos"), marks.get("eos"))


def capacity_of(decoder: Session, wanted: int) -> int:
    """How long caches in place are made: as long as wanted, unless the graph has a size of its own."""
    specs = {spec.name: spec for spec in decoder.signature.inputs}
    for state in decoder.signature.states:
        if state.filled and state.length_axis is not None:
            size = specs[state.input].shape[state.length_axis]
            if isinstance(size, int):
                if wanted > size:
                    raise FeedError(f"the text has {wanted} tokens, and this network's cache has room for {size}; shorten it")
                return size
    return wanted


def _picked(logits: NDArray[Any], wanted: NDArray[Any]) -> NDArray[Any]:
    """The log-probabilities of `wanted` (batch, time), summed up in float64 over logits (batch, time, vocabulary)."""
    wanted = wanted[:, : logits.shape[1]]
    logits = logits[:, : wanted.shape[1]].astype(np.float32, copy=False)
    highest = logits.max(axis=-1, keepdims=True)
    total = np.exp(logits - highest).sum(axis=-1, dtype=np.float64)  # (batch, time)
    chosen = np.take_along_axis(logits, wanted[:, :, None], axis=-1)[:, :, 0].astype(np.float64)
    result: NDArray[Any] = chosen - highest[:, :, 0] - np.log(total)
    return result
