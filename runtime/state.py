"""What a decoder carries from step to step. A KV cache and an RNN's hidden state are one idea: `StateSpec`.

state = initial_state(signature, batch=2, capacity=64, given=encoder_outputs)
logits, state = step(session, tokens, state)              # tokens (batch, time), any number of new ones
state = reorder(signature, state, rows=[1, 1])            # both rows go on from what was the second
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import FeedError
from .feeds import example_feeds
from .session import Session
from .signature import GraphSignature, StateSpec, TensorSpec

TOKENS, SOURCE, WANTED, LOGITS = "tokens", "source", "wanted", "logits"  # `wanted`: the positions whose logits are computed

Arrays = dict[str, NDArray[Any]]


def initial_state(
    signature: GraphSignature,
    batch: int,
    *,
    capacity: int = 0,
    given: Mapping[str, NDArray[Any]] | None = None,
) -> Arrays:
    """The state before the first token. `given` are an encoder's outputs; `capacity` is the size of caches that do not grow."""
    specs = {spec.name: spec for spec in signature.inputs}
    arrays: Arrays = {}
    for state in signature.states:
        spec = specs[state.input]
        if given and state.input in given:
            arrays[state.input] = given[state.input]
            continue
        shape = [dim if isinstance(dim, int) else 0 for dim in spec.shape]
        shape[state.batch_axis] = batch
        if state.length_axis is not None and state.filled:
            shape[state.length_axis] = capacity
        arrays[state.input] = np.full(shape, state.initial, dtype=spec.dtype)
    return arrays


def step(
    session: Session, tokens: NDArray[Any], state: Arrays, memory: Mapping[str, NDArray[Any]] | None = None
) -> tuple[NDArray[Any], Arrays]:
    """Logits (batch, time, vocabulary) of the tokens that follow `state`, and the state after them.

    `memory` are the encoder's outputs that the decoder reads at every step. A graph that takes one token at a time is run as
    often as needed; one with a cache in place continues several rows by several tokens one row after the other, since
    onnxruntime's kernel does not take them together.
    """
    signature = session.signature
    bound = _memory_of(signature, state, memory or {})
    takes = _spec(signature, TOKENS).shape[1]
    if isinstance(takes, int) and tokens.shape[1] != takes:
        if tokens.shape[1] % takes:
            raise FeedError(
                f"the graph takes {takes} tokens at a time, and {tokens.shape[1]} cannot be divided into such pieces"
            )
        pieces = np.split(tokens, tokens.shape[1] // takes, axis=1)
        return _one_after_the_other(session, pieces, state, bound)
    if tokens.shape[0] > 1 and tokens.shape[1] > 1 and _has_past_in_place(signature, state):
        if isinstance(_spec(signature, TOKENS).shape[0], int):  # rows cannot be taken apart: token by token, then
            return _one_after_the_other(session, np.split(tokens, tokens.shape[1], axis=1), state, bound)
        return _row_by_row(session, tokens, state, bound)
    if WANTED in {spec.name for spec in signature.inputs}:
        bound = {WANTED: np.arange(tokens.shape[1]), **bound}
    outputs = session.run({TOKENS: tokens, **state, **bound})
    return outputs[LOGITS], {item.input: outputs[item.output] for item in signature.states}


def reorder(signature: GraphSignature, state: Arrays, rows: Sequence[int] | NDArray[Any]) -> Arrays:
    """The state in which row i goes on from what was row `rows[i]`."""
    return {item.input: np.take(state[item.input], rows, axis=item.batch_axis) for item in signature.states}


def step_feeds(signature: GraphSignature, batch: int, past: int) -> Arrays:
    """Feeds for one more token after `past` ones, with plain values: what a decoder's step is timed on."""
    time = _spec(signature, TOKENS).shape[1]
    new = time if isinstance(time, int) else 1
    sizes = {"batch": batch, "time": new, "kept": 1, "past": past, "capacity": past + new, "source": max(1, past)}
    feeds = example_feeds(signature, {axis: sizes.get(axis, 1) for axis in signature.dynamic_axes})
    lengths = {state.filled for state in signature.states}
    for spec in signature.inputs:
        state = next((state for state in signature.states if state.input == spec.name), None)
        if spec.dtype == "bool":
            feeds[spec.name][...] = True
        elif state is not None and state.output in lengths:
            if (room := _capacity(signature, feeds)) < past + new:
                raise FeedError(f"a cache of {room} has no room for {new} more after {past} tokens; take a shorter past")
            feeds[spec.name][...] = past
        elif spec.name == TOKENS:
            feeds[spec.name][...] = 1  # not padding
        elif spec.name == WANTED:
            feeds[spec.name][...] = new - 1
    return feeds


def _spec(signature: GraphSignature, name: str) -> TensorSpec:
    return next(spec for spec in signature.inputs if spec.name == name)


def _capacity(signature: GraphSignature, feeds: Arrays) -> int:
    return int(min(feeds[s.input].shape[s.length_axis] for s in signature.states if s.filled and s.length_axis is not None))


def specified(states: Sequence[StateSpec], outputs: Arrays) -> Arrays:
    """`outputs` with zeros in what lies beyond the filled part of a cache in place, where a kernel may leave anything."""
    cleaned = dict(outputs)
    for state in states:
        if state.filled and state.length_axis is not None and state.output in outputs:
            cleaned[state.output] = _cut(outputs[state.output], outputs[state.filled], state)
    return cleaned


def _cut(cache: NDArray[Any], filled: NDArray[Any], state: StateSpec) -> NDArray[Any]:
    assert state.length_axis is not None
    along = [1] * cache.ndim
    along[state.length_axis] = cache.shape[state.length_axis]
    rows = [1] * cache.ndim
    rows[state.batch_axis] = cache.shape[state.batch_axis]
    used = np.arange(cache.shape[state.length_axis]).reshape(along) < filled.reshape(rows)
    return np.where(used, cache, np.zeros((), cache.dtype))


def _memory_of(signature: GraphSignature, state: Arrays, memory: Mapping[str, NDArray[Any]]) -> Arrays:
    wanted = [spec.name for spec in signature.inputs if spec.name not in (TOKENS, WANTED) and spec.name not in state]
    if missing := [name for name in wanted if name not in memory]:
        raise FeedError(
            f"the decoder needs {missing[0]!r}, which the encoder gives; run the encoder first and pass its outputs"
        )
    return {name: memory[name] for name in wanted}


def _has_past_in_place(signature: GraphSignature, state: Arrays) -> bool:
    return any(
        item.filled and other.output == item.filled and bool(state[other.input].any())
        for item in signature.states
        for other in signature.states
    )


def _one_after_the_other(
    session: Session, pieces: Sequence[NDArray[Any]], state: Arrays, memory: Arrays
) -> tuple[NDArray[Any], Arrays]:
    logits = []
    for piece in pieces:
        part, state = step(session, piece, state, memory)
        logits.append(part)
    return np.concatenate(logits, axis=1), state


def _row_by_row(session: Session, tokens: NDArray[Any], state: Arrays, memory: Arrays) -> tuple[NDArray[Any], Arrays]:
    signature = session.signature
    results = [
        step(
            session,
            tokens[row : row + 1],
            reorder(signature, state, [row]),
            {name: array[row : row + 1] for name, array in memory.items()},
        )
        for row in range(len(tokens))
    ]
    joined = {
        item.input: np.concatenate([after[item.input] for _, after in results], axis=item.batch_axis)
        for item in signature.states
    }
    return np.concatenate([logits for logits, _ in results]), joined
