"""Decoder: what the loop must know of a bundle's decoder graph. It holds nothing that changes: all threads share it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import GenerationError
from ..session import Session
from ..signature import StateSpec, TensorSpec
from ..state import LOGITS, SOURCE, TOKENS, WANTED


@dataclass(frozen=True)
class Decoder:
    """A graph tokens, wanted, memory.*, past.* → logits, present.*.

    `reader` is the form of the graph that prompts are read with, where that is another one. Which form is run depends on
    nothing else: a row's text is the same alone and in a batch. `longest` is the number of positions, None for no limit.
    """

    session: Session
    longest: int | None = None
    reader: Session | None = None
    noise: float = 0.0  # the error a logit may have

    def __post_init__(self) -> None:
        rows = self._specs[TOKENS].shape[0]
        if isinstance(rows, int) and rows != 1:
            raise GenerationError(f"the decoder takes {rows} rows at a time; export without --fix batch to generate with it")

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.session.signature.inputs}

    def spec(self, name: str) -> TensorSpec:
        return self._specs[name]

    @cached_property
    def vocabulary(self) -> int:
        logits = next((spec for spec in self.session.signature.outputs if spec.name == LOGITS), None)
        if logits is None or not isinstance(logits.shape[-1], int):
            raise GenerationError(
                "the decoder has no output 'logits' of a known vocabulary; optimize without --head to generate"
            )
        return logits.shape[-1]

    @cached_property
    def one_row(self) -> bool:
        """Whether the graph takes a single row at a time."""
        return self._specs[TOKENS].shape[0] == 1

    @cached_property
    def at_once(self) -> int | None:
        """How many tokens the graph takes in one call; None: any number."""
        time = self._specs[TOKENS].shape[1]
        return time if isinstance(time, int) else None

    @cached_property
    def takes_wanted(self) -> bool:
        return WANTED in self._specs

    @cached_property
    def in_place(self) -> tuple[StateSpec, ...]:
        return tuple(state for state in self.session.signature.states if state.filled and state.length_axis is not None)

    @cached_property
    def length(self) -> StateSpec | None:
        """The state that says how much of each row of a cache in place is in use."""
        filled = {state.filled for state in self.in_place}
        return next((state for state in self.session.signature.states if state.output in filled), None)

    @cached_property
    def carried(self) -> tuple[StateSpec, ...]:
        """States that every call gives anew: hidden states, and caches that grow."""
        fixed = {state.input for state in (*self.in_place, *((self.length,) if self.length else ()))}
        return tuple(state for state in self.session.signature.states if state.input not in fixed)

    @cached_property
    def memory(self) -> tuple[TensorSpec, ...]:
        """What the encoder gives and every call takes unchanged."""
        states = {state.input for state in self.session.signature.states}
        return tuple(spec for spec in self._specs.values() if spec.name not in (TOKENS, WANTED) and spec.name not in states)

    @cached_property
    def can_rewind(self) -> bool:
        """Whether an earlier point can be returned to: a hidden state does not say what it was."""
        return all(state.length_axis is not None for state in self.carried)

    @cached_property
    def fixed_capacity(self) -> int | None:
        sizes = {self._specs[state.input].shape[state.length_axis or 0] for state in self.in_place}
        return next((size for size in sizes if isinstance(size, int)), None)

    def capacity(self, tokens: int) -> int:
        """Slots for a text of so many tokens; a clear refusal where they do not fit."""
        most = min(limit for limit in (self.longest, self.fixed_capacity, tokens) if limit is not None)
        if tokens > most:
            what = f"the network has {most} positions" if most == self.longest else f"the graph's cache has {most} slots"
            raise GenerationError(f"{tokens} tokens do not fit: {what}; shorten the prompt or lower max_new_tokens")
        return self.fixed_capacity or tokens

    def sizes(self, state: StateSpec, rows: int, tokens: int) -> tuple[int, ...]:
        """The shape of a state of so many rows of so many tokens."""
        known = {state.batch_axis: rows, state.length_axis: tokens}
        dims = enumerate(self._specs[state.input].shape)
        return tuple(known[axis] if axis in known else dim if isinstance(dim, int) else 1 for axis, dim in dims)

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Memory that the states of so many rows of so many tokens take, with the record of what wrote each slot."""
        of_row, of_token = self._row_bytes
        return rows * (of_row + tokens * of_token)

    @cached_property
    def _row_bytes(self) -> tuple[int, int]:
        """Of a row without any token, and of each of its tokens."""
        counts = [0, np.dtype(np.int64).itemsize]
        for state in self.session.signature.states:
            size = math.prod(self.sizes(state, 1, 1)) * np.dtype(self._specs[state.input].dtype).itemsize
            counts[state.length_axis is not None] += size
        return counts[0], counts[1]


def source_axis(spec: TensorSpec) -> int | None:
    """The axis of an encoder's output that is as long as the source."""
    return spec.shape.index(SOURCE) if SOURCE in spec.shape else None
