"""Alignment: how much attention each generated token pays to each token of the source, and what that says of a translation.

    coverage = Σ_source log min(Σ_target attention, 1)              (Wu et al., 2016)

is 0 where every token of the source got the attention of one token of the text at least, and falls with what was left out.
The graph that gives attention is in bundles made by `edgekit export … --attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..session import Session
from ..state import TOKENS, initial_state

ATTENTION = "attention"  # the graph's output
LEAST_ATTENTION = 1e-6  # what a token of the source counts as having got at least: no logarithm is infinite

Array = NDArray[Any]
Align = Callable[[Sequence[Sequence[int]]], list[NDArray[np.float32]]]
"""Takes generated texts of one source and gives the weights (tokens, source tokens) of each."""


def aligner(session: Session, encode: Callable[[], Mapping[str, Array]], prompt: Sequence[int], source: int) -> Align:
    """Attention of texts that follow `prompt` in the decoder, on a source of `source` tokens, which `encode` reads anew."""

    def align(texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        fed = [[*prompt, *tokens[:-1]] for tokens in texts]
        first = len(prompt) - 1  # what the last token of the prompt looks at chooses the first token of the text
        found = attention_of(session, encode(), fed)
        return [weights[first : first + len(tokens), :source] for weights, tokens in zip(found, texts, strict=True)]

    return align


def attention_of(session: Session, memory: Mapping[str, Array], fed: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """The weights (tokens, source) of every token that is fed, for texts of the one source that `memory` is of."""
    if isinstance(_shape(session)[0], int):  # a graph that takes one row
        return [_attention(session, memory, np.array([tokens], np.int64))[0] for tokens in fed]
    batch = np.zeros((len(fed), max(map(len, fed))), np.int64)  # what stands behind a text changes nothing before it
    for row, tokens in zip(batch, fed, strict=True):
        row[: len(tokens)] = tokens
    weights = _attention(session, memory, batch)
    return [of_row[: len(tokens)] for of_row, tokens in zip(weights, fed, strict=True)]


def coverage(weights: Array) -> float:
    """Of attention (tokens, source tokens)."""
    received = weights.sum(axis=0, dtype=np.float64)
    return float(np.log(np.clip(received, LEAST_ATTENTION, 1.0)).sum())


def _attention(session: Session, memory: Mapping[str, Array], tokens: Array) -> NDArray[np.float32]:
    """tokens (texts, time) → weights (texts, time, source)."""
    signature = session.signature
    batch_axes = {state.input: state.batch_axis for state in signature.states}
    given = {name: np.repeat(array, len(tokens), axis=batch_axes.get(name, 0)) for name, array in memory.items()}
    state = initial_state(signature, len(tokens), given=given)
    fixed = {spec.name: given[spec.name] for spec in signature.inputs if spec.name != TOKENS and spec.name not in state}
    pieces = np.split(tokens, tokens.shape[1], axis=1) if isinstance(_shape(session)[1], int) else [tokens]
    weights = []
    for piece in pieces:
        outputs = session.run({TOKENS: piece, **fixed, **state})
        state = {item.input: outputs[item.output] for item in signature.states}
        weights.append(outputs[ATTENTION])
    return np.concatenate(weights, axis=1).astype(np.float32, copy=False)


def _shape(session: Session) -> tuple[int | str, ...]:
    return next(spec.shape for spec in session.signature.inputs if spec.name == TOKENS)
