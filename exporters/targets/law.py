"""The law of generation inside the graph: it gives the texts of the loop outside it.

Prompts of several lengths, alone and in ragged batches, are generated both ways. Texts must be the same. One that differs is
excused only if the search had a decision to make that was closer than the noise: ten times the largest difference of a
log-probability between texts that are the same, alone or in batches, and never more than the error that the bundle allows its
logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bundle import DECODER, Tolerance
from runtime.generation.options import Generation, Options
from runtime.generation.wrapped import ROOM
from runtime.model import Model
from runtime.state import LOGITS
from runtime.tokens import TokenInput

from ..margin import is_tie
from .decisions import withstands

_LENGTHS: tuple[tuple[int, ...], ...] = ((1,), (9,), (2, 7, 4), (5, 5, 5), (3, 12, 1, 6, 8))  # of the prompts of each trial
_ROOMS = (3, 16)
_FIRST_WORD = 4  # tokens below are special
_MARGIN = 10.0
_ROUNDING = 2e-5  # of the largest log-probability: as in margin.py
_EPSILON = float(np.finfo(np.float32).eps)
_EXACT = "tokens must be equal; texts that are ties within the error of the log-probabilities are not among the goldens"

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Text:
    """One prompt, with what follows it: by the loop outside the graph, and by the graph."""

    prompt: list[int]
    alone: bool  # or in a batch
    room: int
    expected: list[Generation]
    actual: list[Generation]

    @cached_property
    def agrees(self) -> bool:
        return _told(self.expected) == _told(self.actual)

    @property
    def error(self) -> float:
        """The largest difference of a score or log-probability, of texts that agree."""
        pairs = zip(self.expected, self.actual, strict=True)
        return max(float(np.abs(np.subtract(_numbers(one), _numbers(other))).max()) for one, other in pairs)


@dataclass(frozen=True)
class Comparison:
    host: Model
    beams: int
    trials: list[list[Text]]
    _withstood: dict[int, float] = field(default_factory=dict)

    @property
    def texts(self) -> list[Text]:
        return [text for trial in self.trials for text in trial]

    @cached_property
    def error(self) -> float:
        return max((text.error for text in self.texts if text.agrees), default=0.0)

    @cached_property
    def allowed(self) -> float | None:
        """The error that a log-probability may have by the bundle's own tolerance; None if it has none."""
        tolerance = self.host.bundle.manifest.tolerance.get(DECODER, {}).get(LOGITS)
        return None if tolerance is None else 2 * tolerance.allowed + 10 * _EPSILON * self._largest

    def noise(self, *, alone: bool) -> float:
        """Rows that are together, and padded, are added up in another order: those that are alone may differ by less."""
        errors = [text.error for text in self.texts if text.agrees and text.alone == alone]
        measured = max(_MARGIN * max(errors, default=0.0), _ROUNDING * self._largest)
        return measured if self.allowed is None else min(measured, self.allowed)

    @cached_property
    def ties(self) -> list[Text]:
        noise = {alone: self.noise(alone=alone) for alone in (True, False)}
        return [text for text in self.texts if not text.agrees and is_tie(2 * self.withstands(text), noise[text.alone])]

    @cached_property
    def problem(self) -> str | None:
        """Why the law does not hold, if it does not."""
        wrong = [text for text in self.texts if not text.agrees and text not in self.ties]
        if wrong:
            text = min(wrong, key=lambda item: len(item.prompt) + item.room)
            return (
                f"the graph gives other texts than the loop outside it for {len(wrong)} of {len(self.texts)} prompts; the "
                f"shortest is {text.prompt}, which is followed by {_shown(text.expected)} and not by {_shown(text.actual)}: no "
                f"tie, its closest decision withstands an error of {self.withstands(text):.1e}, and the noise is "
                f"{self.noise(alone=text.alone):.1e}; this is a bug of the wrapper, please report it"
            )
        if len(self.ties) == len(self.texts):
            return (
                f"nothing is proved, because all {len(self.texts)} texts differ by ties within a noise of "
                f"{self.noise(alone=False):.1e}; wrap a network with trained weights"
            )
        if self.allowed is not None and self.error > self.allowed:
            return (
                f"log-probabilities differ from those of the loop outside the graph by {self.error:.1e}, and the bundle allows "
                f"{self.allowed:.1e}"
            )
        return None

    def withstands(self, text: Text) -> float:
        if id(text) not in self._withstood:
            options = Options(max_new_tokens=text.room, beams=self.beams, n_best=self.beams)
            self._withstood[id(text)] = withstands(self.host._generator, text.prompt, options)
        return self._withstood[id(text)]

    def goldens(self, count: int) -> tuple[list[tuple[Arrays, Arrays]], float]:
        """Inputs and expected outputs of a few trials, without the texts that are ties, and the error that those withstand:
        what the bundle allows if there are such texts, else what was measured."""
        order = [self.trials[-1], self.trials[0], *self.trials[1:-1]]  # a ragged batch, then a single prompt
        alone = [trial for trial in order if trial[0].alone]
        levels = [] if self.allowed is None else [(self.allowed, order)]
        levels += [(self.noise(alone=False), order), (self.noise(alone=True), alone)]
        for least, trials in levels:
            clear = ([text for text in trial if text.agrees and self.withstands(text) > least] for trial in trials)
            if found := [self._golden(texts) for texts in islice(filter(None, clear), count)]:
                return found, least
        return [], least

    def _golden(self, texts: Sequence[Text]) -> tuple[Arrays, Arrays]:
        prompts, pad = _prompts(self.host), self.host.bundle.manifest.generation or {}
        same_length = len({len(text.prompt) for text in texts}) == 1
        if prompts.pad is None and not same_length:
            texts = [text for text in texts if len(text.prompt) == len(texts[0].prompt)]
        batch = prompts.padded([text.prompt for text in texts], max(len(text.prompt) for text in texts))
        name = "source" if self.host._generator.requests.source else "prompt"
        fill = next((pad[key] for key in ("pad", "eos") if pad.get(key) is not None), 0)
        inputs: Arrays = {name: batch, ROOM: np.array(texts[0].room, np.int64)}
        return inputs, expected_outputs([text.expected for text in texts], self.beams, pad.get("eos"), fill)

    @cached_property
    def _largest(self) -> float:
        return max((abs(value) for text in self.texts for item in text.expected for value in _numbers(item)), default=1.0)


def compare(host: Model, wrapped: Model, beams: int) -> Comparison:
    """Generate with both models."""
    random = np.random.default_rng(0)
    options: dict[str, Any] = {"beams": beams, "n_best": beams}
    trials = []
    for lengths, room in _sizes(host):
        prompts = [_draw(host, length, random) for length in lengths]
        expected, actual = (model.generate(prompts, max_new_tokens=room, **options) for model in (host, wrapped))
        triples = zip(prompts, expected, actual, strict=True)
        trials.append([Text(prompt, len(prompts) == 1, room, _listed(one), _listed(other)) for prompt, one, other in triples])
    return Comparison(host, beams, trials)


def tolerances(found: Comparison, withstood: float) -> dict[str, Tolerance]:
    """Of the graph's outputs."""
    if found.allowed is None:
        allowed = found.noise(alone=False)
        derived = f"{_MARGIN:g} x the largest difference from the loop outside the graph when it was made"
    else:
        allowed = found.allowed
        derived = (
            "twice that of the decoder's logits (its own error and that of the sum) and ten roundings of the largest value"
        )
    exact = Tolerance(0.0, 0.0, f"{_EXACT}; the goldens withstand {withstood:.1e}")
    number = Tolerance(allowed, found.error, derived)
    return {"tokens": exact, "lengths": exact, "score": number, "logprobs": number}


def expected_outputs(answers: Sequence[Sequence[Generation]], beams: int, eos: int | None, fill: int) -> Arrays:
    """What the graph must give for these answers."""
    whole = [[_whole(item, eos) for item in found] for found in answers]
    longest = max(len(tokens) for found in whole for tokens, _, _ in found)
    shape = (len(answers), beams)
    tokens, logprobs = np.full((*shape, longest), fill, np.int64), np.zeros((*shape, longest), np.float32)
    lengths, score = np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32)
    for row, found in enumerate(whole):
        for rank, (numbers, values, total) in enumerate(found):
            tokens[row, rank, : len(numbers)], logprobs[row, rank, : len(values)] = numbers, values
            lengths[row, rank], score[row, rank] = len(numbers), total
    outputs: Arrays = {"tokens": tokens, "lengths": lengths, "score": score, "logprobs": logprobs}
    return outputs if beams > 1 else {name: array[:, 0] for name, array in outputs.items()}


def _whole(item: Generation, eos: int | None) -> tuple[list[int], list[float], float]:
    """Tokens and log-probabilities with the <eos> that ended the text, which `score` counts; and the score."""
    tokens, logprobs = list(item.tokens), list(item.token_logprobs)
    if item.finish == "eos" and eos is not None:
        length = (len(tokens) + 1) ** Options().length_penalty
        tokens, logprobs = [*tokens, eos], [*logprobs, item.score * length - sum(logprobs)]
    return tokens, logprobs, item.score


def _sizes(host: Model) -> list[tuple[tuple[int, ...], int]]:
    """(lengths of the prompts, room) of every trial, of which those that do not fit are made to."""
    most = host._generator.decoder.longest
    if (capacity := host._generator.decoder.fixed_capacity) is not None:
        most = min(most or capacity, capacity)
    sizes: list[tuple[tuple[int, ...], int]] = []
    for lengths in _LENGTHS:
        for room in _ROOMS:
            if most is not None:
                room = max(1, min(room, most // 2))
                lengths = tuple(max(1, min(length, most - room - 2)) for length in lengths)
            sizes.append((lengths, room))
    return sizes


def _draw(host: Model, length: int, random: np.random.Generator) -> list[int]:
    """A prompt of words."""
    prompts = _prompts(host)
    about = host.bundle.manifest.generation or {}
    special = {about.get(name) for name in ("bos", "eos", "pad")}
    vocabulary = prompts.vocabulary or _source_vocabulary(host)
    words = [token for token in range(min(_FIRST_WORD, vocabulary - 1), vocabulary) if token not in special] or [0]
    return [*(int(token) for token in random.choice(words, length)), *prompts.after]


def _source_vocabulary(host: Model) -> int:
    """Of an encoder that comes without a tokenizer: as far as its goldens go."""
    seen = [int(array.max()) for _, inputs, _ in host.bundle.goldens() for name, array in inputs.items() if name == "source"]
    return max(seen, default=1) + 1


def _prompts(host: Model) -> TokenInput:
    return host._generator.requests.prompts


def _listed(found: Any) -> list[Generation]:
    return list(found) if isinstance(found, list) else [found]


def _told(found: Sequence[Generation]) -> list[tuple[Any, ...]]:
    return [(item.tokens, item.finish, item.text) for item in found]


def _numbers(item: Generation) -> list[float]:
    return [item.score, *item.token_logprobs]


def _shown(found: Sequence[Generation]) -> str:
    first = found[0] if found else None
    return "nothing" if first is None else f"{list(first.tokens)} ({first.finish}, score {first.score:.4f})"
