"""The laws of decoding, checked on the exported graphs against live PyTorch.

However a text is fed to a decoder, the logits are those of the whole network on the whole text: in one piece or token by token,
in any pieces, alone or in a batch, padded or not, and after rows of the state have been reordered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.bundle import DECODER, ENCODER
from runtime.errors import EdgekitError, ParityRefused
from runtime.session import Session
from runtime.signature import GraphSignature
from runtime.state import TOKENS, initial_state, reorder, step
from runtime.verify import max_error

from .double import in_float64
from .exportable import Generator
from .margin import token_margin
from .parity import EPSILON, MARGIN

_BATCH, _TIME, _SOURCE = 3, 7, 6
_SPARE = 3  # slots a cache in place has beyond the text
Array = NDArray[Any]


@dataclass(frozen=True)
class LawResult:
    law: str
    error: float  # largest difference of a logit
    allowed: float
    problem: str | None = None
    skipped: str | None = None  # why nothing could be compared

    def __bool__(self) -> bool:
        return self.problem is None


@dataclass(frozen=True)
class Text:
    """What is decoded, and PyTorch's logits for it."""

    tokens: Array  # (batch, time), no padding
    source: Array | None
    logits: Array  # (batch, time, vocabulary)
    allowed: float

    def rows(self, rows: list[int]) -> Text:
        source = None if self.source is None else self.source[rows]
        return Text(self.tokens[rows], source, self.logits[rows], self.allowed)


class Sizes:
    """What the graphs leave open, and what they fix."""

    def __init__(self, signatures: Mapping[str, GraphSignature]) -> None:
        self._signatures = signatures
        rows, time = next(spec.shape for spec in signatures[DECODER].inputs if spec.name == TOKENS)
        self.rows = rows if isinstance(rows, int) else None  # None: any number
        self.tokens_at_once = time if isinstance(time, int) and time > 1 else 1

    @property
    def source(self) -> int:
        size = self._signatures[ENCODER].inputs[0].shape[1]
        return size if isinstance(size, int) else _SOURCE

    def capacity(self, tokens: int) -> int:
        """Slots of a cache in place for a text: what the graph fixes, or some more than the text."""
        signature = self._signatures[DECODER]
        for state in signature.states:
            spec = next(spec for spec in signature.inputs if spec.name == state.input)
            if state.filled and state.length_axis is not None and isinstance(size := spec.shape[state.length_axis], int):
                return size
        return tokens + _SPARE


class Host:
    """Runs the graphs as an application would."""

    def __init__(self, sessions: Mapping[str, Session], pad: int) -> None:
        self.sessions = sessions
        self.pad = pad
        self.signature = sessions[DECODER].signature
        self.sizes = Sizes({name: session.signature for name, session in sessions.items()})

    def start(self, text: Text, tokens: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """The memory of the source, and the state before the first token."""
        memory = {} if text.source is None else self.sessions[ENCODER].run({"source": text.source})
        return memory, initial_state(self.signature, len(text.tokens), capacity=self.sizes.capacity(tokens), given=memory)

    def feed(self, text: Text, pieces: list[Array]) -> Array:
        """Logits of the pieces, one after the other, side by side."""
        memory, state = self.start(text, sum(piece.shape[1] for piece in pieces))
        logits = []
        for piece in pieces:
            part, state = step(self.sessions[DECODER], piece, state, memory)
            logits.append(part)
        return np.concatenate(logits, axis=1)


def texts_for(about: Generator, signatures: Mapping[str, GraphSignature], *, thorough: bool = False) -> tuple[Text, ...]:
    """What the laws are checked on: one text, or several with `thorough`.

    To be made before sessions are opened: beside theirs, memory may not hold a network of gigabytes in float64.
    """
    sizes = [(_BATCH, _TIME)] + ([(1, 1), (2, 2), (5, 33), (4, 12)] if thorough else [])
    return tuple(_text(about, Sizes(signatures), batch, time, seed) for seed, (batch, time) in enumerate(sizes))


def check_laws(
    about: Generator, sessions: Mapping[str, Session], texts: Sequence[Text], *, allowed: float | None = None
) -> tuple[LawResult, ...]:
    """Every law on every text. `allowed` is for graphs that are less exact than float32."""
    host = Host(sessions, about.pad)
    results: dict[str, LawResult] = {}
    for text in texts:
        text = text if allowed is None else replace(text, allowed=allowed)
        for law, check in _LAWS.items():
            reason = _not_applicable(law, about, host.sizes)
            result = LawResult(law, 0.0, text.allowed, skipped=reason) if reason else _result(law, check(host, text), text)
            known = results.get(law)
            if known is None or known.skipped or (known and (not result or result.error > known.error)):
                results[law] = result
    return tuple(results.values())


def _not_applicable(law: str, about: Generator, sizes: Sizes) -> str | None:
    if law == _PADDING and about.pad < 0:
        return "the vocabulary has no padding"
    if law == _PADDING and sizes.tokens_at_once > 1:
        return f"the graph takes {sizes.tokens_at_once} tokens at a time"
    if law in _ON_ROWS and sizes.rows is not None:
        return f"the graph takes {sizes.rows} rows"
    return None


def refuse_broken_laws(name: str, results: tuple[LawResult, ...]) -> None:
    broken = [result for result in results if not result]
    if broken:
        listed = "; ".join(f"{result.law}: {result.problem}" for result in broken)
        raise ParityRefused(f"{name} was not written: its decoder breaks a law of decoding. {listed}")


def _text(about: Generator, sizes: Sizes, batch: int, time: int, seed: int) -> Text:
    random = np.random.default_rng(seed)
    batch = sizes.rows or batch
    longest = min(about.longest or time * sizes.tokens_at_once, sizes.capacity(time * sizes.tokens_at_once))
    time = max(1, min(time, longest // sizes.tokens_at_once)) * sizes.tokens_at_once
    tokens = random.choice(_words(about.vocabulary, about.pad), (batch, time))
    source = None
    if about.source_vocabulary is not None:
        source = random.choice(_words(about.source_vocabulary, about.pad), (batch, sizes.source))
        if about.pad >= 0:
            source[1:, max(1, sizes.source - 2) :] = about.pad  # one source is longer than the others
    arguments = torch.from_numpy(tokens), None if source is None else torch.from_numpy(source)
    logits = about.logits(*arguments).numpy()
    with in_float64(about.network):
        exact = about.logits(*arguments).numpy()
    if not np.isfinite(logits).all():
        raise ParityRefused("the network's own logits are not finite numbers, so nothing can be proved of its decoding")
    scale = float(np.abs(logits).max())
    return Text(tokens, source, logits, MARGIN * max(max_error(logits, exact), EPSILON * scale))


def _words(vocabulary: int, pad: int) -> Array:
    """Every token but the padding."""
    words = np.array([token for token in range(vocabulary) if token != pad])
    if not words.size:
        raise ParityRefused(f"a vocabulary of {vocabulary} has nothing but padding, so nothing can be proved of its decoding")
    return words


def _result(law: str, compared: Iterator[tuple[str, Array, Array]], text: Text) -> LawResult:
    worst, problem, count = 0.0, None, 0
    try:
        for what, actual, expected in compared:
            count += 1
            error = max_error(actual, expected) if actual.shape == expected.shape else float("inf")
            error = float("inf") if np.isnan(actual).any() else error
            if error > text.allowed and problem is None:
                tokens = token_margin(expected, actual, text.allowed) or "no likeliest token changes"
                problem = f"{what} differs by {error:.2e} (allowed {text.allowed:.2e}; {tokens})"
            worst = max(worst, error)
    except EdgekitError as failure:
        worst, problem = float("inf"), str(failure)
    skipped = None if count or problem else f"a text of {text.tokens.shape[1]} tokens, all that fits, cannot show it"
    return LawResult(law, worst, text.allowed, problem, skipped)


# Each law yields (what, the graph's logits, PyTorch's logits).
Compared = Iterator[tuple[str, Array, Array]]


def _prefill_is_steps(host: Host, text: Text) -> Compared:
    yield "the text in one piece", host.feed(text, [text.tokens]), text.logits
    steps = text.tokens.shape[1] // host.sizes.tokens_at_once
    yield "the text step by step", host.feed(text, np.split(text.tokens, steps, axis=1)), text.logits


def _chunked_is_whole(host: Host, text: Text) -> Compared:
    unit = host.sizes.tokens_at_once
    time = text.tokens.shape[1] // unit
    for cut in sorted({1, time // 2, time - 1} - {0, time}):
        yield f"the text cut after {cut * unit}", host.feed(text, np.split(text.tokens, [cut * unit], axis=1)), text.logits
    if host.sizes.rows not in (None, 1):
        return
    for row in range(min(2, len(text.tokens))):
        alone = text.rows([row])
        pieces = np.split(alone.tokens, [max(1, time // 3) * unit, max(1, 2 * time // 3) * unit], axis=1)
        yield f"row {row} in three pieces", host.feed(alone, [piece for piece in pieces if piece.shape[1]]), alone.logits


def _row_is_alone(host: Host, text: Text) -> Compared:
    for row in range(len(text.tokens)):
        alone = text.rows([row])
        yield f"row {row} alone", host.feed(alone, [alone.tokens]), alone.logits


def _padding_changes_nothing(host: Host, text: Text) -> Compared:
    """Row i begins with i tokens less than row 0 and is padded, on the left or on the right; then all go on by one token."""
    batch, time = text.tokens.shape
    if time < 2:
        return
    taken = np.array([max(1, time - 1 - row) for row in range(batch)])
    for left in (True, False):
        places = [slice(time - 1 - count, time - 1) if left else slice(0, count) for count in taken]
        prompt = np.full((batch, time - 1), host.pad, text.tokens.dtype)
        for row, place in enumerate(places):
            prompt[row, place] = text.tokens[row, : taken[row]]
        following = text.tokens[np.arange(batch), taken][:, None]
        logits = host.feed(text, [prompt, following])
        side = "left" if left else "right"
        for row, place in enumerate(places):
            yield f"row {row} padded on the {side}", logits[row, place], text.logits[row, : taken[row]]
            yield f"row {row}, a step after padding on the {side}", logits[row, -1], text.logits[row, taken[row]]


def _reordering_is_recomputing(host: Host, text: Text) -> Compared:
    batch, time = text.tokens.shape
    if time < 2 * host.sizes.tokens_at_once:
        return
    order = [batch - 1, *([0] * (batch - 1))]
    memory, state = host.start(text, time)
    last = time - host.sizes.tokens_at_once
    _, state = step(host.sessions[DECODER], text.tokens[:, :last], state, memory)
    state = reorder(host.signature, state, order)
    memory = {name: array[order] for name, array in memory.items() if name not in state}  # memories are batch first
    logits, _ = step(host.sessions[DECODER], text.tokens[order, last:], state, memory)
    yield f"rows reordered to {order}", logits, text.logits[order, last:]


_PADDING = "padding changes nothing"
_ON_ROWS = ("row = alone",)
_LAWS: dict[str, Callable[[Host, Text], Compared]] = {
    "prefill = steps": _prefill_is_steps,
    "chunked = whole": _chunked_is_whole,
    "row = alone": _row_is_alone,
    _PADDING: _padding_changes_nothing,
    "reorder = recompute": _reordering_is_recomputing,
}
