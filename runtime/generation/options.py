"""What may be asked of a generation, and what comes back. Options refuse contradictions once, when they are made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError, UnknownName

Constraint = Callable[[Sequence[int]], Iterable[int] | None]
"""Takes the tokens generated so far and gives those that may follow (<eos> too where the text may end), or None: any."""

EARLY_STOPPING = ("bound", "count", "never")


@dataclass(frozen=True)
class Options:
    """Of one request. Penalties, bans and constraints act on log-probabilities, in the same way for every strategy.

    The strategy follows from two of them: `beams` > 1 is beam search, `temperature` > 0 draws instead of taking the likeliest;
    both together draw the candidates of a beam search.
    """

    max_new_tokens: int | None = None  # None: as many as fit, at most 256
    min_new_tokens: int = 0  # <eos> and stop tokens are banned before
    # strategy
    beams: int = 1
    temperature: float = 0.0  # 0: always the likeliest
    top_k: int | None = None  # draw among the k likeliest
    top_p: float | None = None  # … among the likeliest that together have this probability
    min_p: float | None = None  # … among those with at least this share of the likeliest's probability
    seed: int | None = None  # None: another text each time
    # beam search
    n_best: int = 1
    length_penalty: float = 1.0  # score = sum of log-probabilities / length ** length_penalty
    # ranks down what leaves parts of the source without attention: score += coverage_penalty · Σ_source log min(Σ_target
    # attention, 1); for bundles of encoder–decoders made by edgekit export --attention
    coverage_penalty: float = 0.0
    early_stopping: str = "bound"  # "bound": when no beam looks better; "count": at beams × patience texts; "never": when sure
    patience: float = 1.0
    groups: int = 1  # of beams that avoid each other's tokens …
    diversity: float = 0.0  # … by this penalty
    # what the text may be
    prefix: str | Sequence[int] = ""  # the text begins with this
    repetition_penalty: float = 1.0  # multiplies the log-probability of every token that occurred, prompt included
    presence_penalty: float = 0.0  # subtracted once from every generated token
    frequency_penalty: float = 0.0  # … for each time it was generated
    no_repeat_ngram: int = 0  # no n-gram of this size occurs twice, prompt included
    bad_words: Sequence[str | Sequence[int]] = ()  # texts or token sequences that must not occur
    stop: Sequence[str] = ()  # texts that end the generation and are cut off
    stop_tokens: Sequence[int] = ()  # tokens that end it, beside the bundle's <eos>
    constraint: Constraint | None = None
    # what comes back
    alternatives: int = 0  # the likeliest tokens at every step with their log-probabilities
    attention: bool = False  # the weights of every generated token on the source's; needs edgekit export --attention
    speculate: bool = False  # verify guesses from the text so far; never changes the answer

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_numbers()
        self._check_strategy()
        if any(not text for text in self.stop):
            raise OptionError("stop holds an empty text, which every text ends with; leave it out")
        if any(len(word) == 0 for word in self.bad_words):
            raise OptionError("bad_words holds an empty word, which every text contains; leave it out")

    def _check_kinds(self) -> None:
        for name, value in (("bad_words", self.bad_words), ("stop", self.stop), ("stop_tokens", self.stop_tokens)):
            if isinstance(value, str):
                raise OptionError(f"{name} is the text {value!r}, expected a list; write {name}=[{value!r}]")
            if not isinstance(value, Collection):
                raise OptionError(f"{name} is {value!r}, expected a list; leave it out for none")
        wrong: list[Any]
        if wrong := [item for item in self.stop if not isinstance(item, str)]:
            raise OptionError(f"stop holds {wrong[0]!r}, expected texts; use stop_tokens for token numbers")
        if wrong := [item for item in self.stop_tokens if not isinstance(item, int | np.integer)]:
            raise OptionError(f"stop_tokens holds {wrong[0]!r}, expected token numbers; use stop for texts")
        if wrong := [item for item in self.bad_words if not isinstance(item, Collection)]:
            raise OptionError(f"bad_words holds {wrong[0]!r}, expected texts or lists of token numbers; write [{wrong[0]!r}]")
        if not isinstance(self.prefix, Collection):
            raise OptionError(f"prefix is {self.prefix!r}, expected a text or token numbers; leave it out for none")
        if self.constraint is not None and not callable(self.constraint):
            raise OptionError(
                f"constraint is {self.constraint!r}, expected a function of the generated tokens; use e.g. a Trie"
            )

    def _check_numbers(self) -> None:
        at_least = {
            "max_new_tokens": 1, "min_new_tokens": 0, "beams": 1, "n_best": 1, "groups": 1, "no_repeat_ngram": 0,
            "alternatives": 0, "top_k": 1,
        }  # fmt: skip
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is None and name in ("max_new_tokens", "top_k"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise OptionError(f"{name} is {value!r}, expected a whole number of {least} or more")
        above: dict[str, tuple[float, bool, float]] = {  # name → (limit, whether the limit itself is allowed, highest)
            "temperature": (0.0, True, np.inf), "top_p": (0.0, False, 1.0), "min_p": (0.0, True, 1.0),
            "patience": (0.0, False, np.inf),
            "repetition_penalty": (0.0, False, np.inf), "coverage_penalty": (0.0, True, np.inf),
            "diversity": (0.0, True, np.inf),
            "length_penalty": (-np.inf, False, np.inf), "presence_penalty": (-np.inf, False, np.inf),
            "frequency_penalty": (-np.inf, False, np.inf),
        }  # fmt: skip
        for name, (limit, inclusive, highest) in above.items():
            value = getattr(self, name)
            if value is None and name in ("top_p", "min_p"):
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float | np.floating | np.integer)
                or not np.isfinite(value)
            ):
                raise OptionError(f"{name} is {value!r}, expected a finite number")
            if value < limit or (value == limit and not inclusive) or value > highest:
                bounds = f"{'from' if inclusive else 'above'} {limit:g}" + ("" if np.isinf(highest) else f" to {highest:g}")
                raise OptionError(f"{name} is {value!r}, expected a number {bounds}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise OptionError(f"seed is {self.seed!r}, expected a whole number of 0 or more")

    def _check_strategy(self) -> None:
        if self.early_stopping not in EARLY_STOPPING:
            raise UnknownName.of("early_stopping rule", str(self.early_stopping), EARLY_STOPPING)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise OptionError(
                f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}; lower it"
            )
        if self.temperature == 0:
            for name in ("top_k", "top_p", "min_p", "seed"):
                if getattr(self, name) is not None:
                    raise OptionError(f"{name} is for drawing, and temperature=0 always takes the likeliest; set temperature=1")
        if self.beams == 1:
            if (
                self.patience != 1
                or self.early_stopping != "bound"
                or self.groups != 1
                or self.diversity
                or self.coverage_penalty
            ):
                raise OptionError("patience, early_stopping, groups, diversity and coverage_penalty are for beams=2 or more")
            if self.n_best > 1 and self.temperature == 0:
                raise OptionError(f"n_best={self.n_best} needs beams={self.n_best} or more, or a temperature to draw with")
        elif self.n_best > self.beams:
            raise OptionError(f"n_best={self.n_best} is more than beams={self.beams} can give; raise beams or lower n_best")
        if self.beams % self.groups:
            raise OptionError(f"beams={self.beams} cannot be divided into groups={self.groups}; choose a divisor")
        if self.diversity and self.groups == 1:
            raise OptionError("diversity is between groups of beams; set groups=2 or more, or diversity=0")
        if self.patience != 1 and self.early_stopping != "count":
            raise OptionError('patience says how many texts to wait for; set early_stopping="count" with it')
        if self.speculate and (self.beams > 1 or self.temperature):
            raise OptionError("speculate verifies guesses against the likeliest token; it needs beams=1 and temperature=0")

    @classmethod
    def of(cls, **given: Any) -> Options:
        """Options by name; an unknown name is an error that says the closest one."""
        known = [item.name for item in fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownName.of("generation option", name, known)
        return cls(**given)


@dataclass(frozen=True)
class Generation:
    """One generated text. `finish` is "eos", "stop" (a stop token or text) or "length".

    `score` is the sum of the log-probabilities, with the penalties that ranked it, divided by length ** length_penalty, with
    the coverage term of beam.py; `token_logprobs` are the network's own, of each of `tokens`. `tokens` end before <eos> or the
    stop; what `score` counts includes it.
    """

    text: str
    tokens: tuple[int, ...]
    score: float
    token_logprobs: tuple[float, ...]
    finish: str
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()  # for each token, the likeliest with their log-probabilities
    attention: NDArray[np.float32] | None = None  # (tokens, source tokens)
