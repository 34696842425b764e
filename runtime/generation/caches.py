"""Caches in place, on the host or on a device. A cache's input and output are bound to the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ..signature import StateSpec
from .decoder import Decoder

Array = NDArray[Any]


class Piece(NamedTuple):
    """Slots start … end of some rows, which are to come from others."""

    targets: list[int]
    parents: list[int]
    start: int
    end: int


class Caches(Protocol):
    stays: bool  # whether a binding of them holds until the number of rows changes

    def bound(self, count: int) -> dict[str, Any]:
        """The first `count` rows of every cache, by the name of its input."""
        ...

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Give target rows what their parents had before anything was copied."""
        ...

    def take(self, other: Any, start: int, end: int, used: int) -> None:
        """The first rows and `used` slots of `other`, which is of the same kind, as rows start … end."""
        ...


def caches_for(decoder: Decoder, room: int, capacity: int) -> Caches:
    on_host = decoder.session.memory[0] == "cpu"
    return HostCaches(decoder, room, capacity) if on_host else DeviceCaches(decoder, capacity)


class HostCaches:
    """In one block for every shape there is, (caches, rows, …, capacity, …), so that copying rows is one operation."""

    stays = True

    def __init__(self, decoder: Decoder, room: int, capacity: int) -> None:
        self._blocks: list[tuple[Array, list[StateSpec]]] = []
        groups: dict[Any, list[StateSpec]] = {}
        for state in decoder.in_place:
            assert state.batch_axis == 0, "a cache in place has its rows first"
            kind = (decoder.sizes(state, room, capacity), decoder.spec(state.input).dtype, state.length_axis)
            groups.setdefault(kind, []).append(state)
        for (sizes, dtype, _), states in groups.items():
            self._blocks.append((np.zeros((len(states), *sizes), dtype), states))

    def bound(self, count: int) -> dict[str, Any]:
        return {state.input: value_of(block[at, :count]) for block, states in self._blocks for at, state in enumerate(states)}

    def copy(self, pieces: Sequence[Piece]) -> None:
        for block, states in self._blocks:
            copied = []
            for piece in pieces:
                slots: Any = _slots(states[0], piece.start, piece.end)
                copied.append((slots, block[(slice(None), piece.parents, *slots)]))
            for piece, (slots, values) in zip(pieces, copied, strict=True):
                block[(slice(None), piece.targets, *slots)] = values

    def take(self, other: HostCaches, start: int, end: int, used: int) -> None:
        for (block, states), (theirs, _) in zip(self._blocks, other._blocks, strict=True):
            slots = _slots(states[0], 0, used)
            block[(slice(None), slice(start, end), *slots)] = theirs[(slice(None), slice(0, end - start), *slots)]


class DeviceCaches:
    """On a device, where only whole tensors can be bound: they have as many rows as are in use.

    Rows are chosen on the host and sent back: single texts never leave the device, beams do where they change places. Other
    inputs reach a device when they are bound, not when the graph runs, so that a binding is good for one run.
    """

    stays = False

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        self._decoder, self._capacity = decoder, capacity
        self._values = {state.input: self._sent(self._empty(state, 1)) for state in decoder.in_place}

    def bound(self, count: int) -> dict[str, Any]:
        for state in self._decoder.in_place:
            value = self._values[state.input]
            if value.shape()[0] != count:
                grown = self._empty(state, count)
                before = value.numpy()[:count]
                grown[: len(before)] = before
                self._values[state.input] = self._sent(grown)
        return dict(self._values)

    def copy(self, pieces: Sequence[Piece]) -> None:
        rows = 1 + max(target for piece in pieces for target in piece.targets)
        for state in self._decoder.in_place:
            before = self._values[state.input].numpy()
            array = self._empty(state, max(len(before), rows))
            array[: len(before)] = before
            for piece in pieces:
                slots: Any = _slots(state, piece.start, piece.end)
                array[(piece.targets, *slots)] = before[(piece.parents, *slots)]
            self._values[state.input] = self._sent(array)

    def take(self, other: DeviceCaches, start: int, end: int, used: int) -> None:
        for state in self._decoder.in_place:
            before = self._values[state.input].numpy()
            array = self._empty(state, max(len(before), end))
            shared = min(before.shape[state.length_axis or 0], self._capacity)
            array[(slice(0, len(before)), *_slots(state, 0, shared))] = before[(slice(None), *_slots(state, 0, shared))]
            slots = _slots(state, 0, used)
            theirs = other._values[state.input].numpy()
            array[(slice(start, end), *slots)] = theirs[(slice(0, end - start), *slots)]
            self._values[state.input] = self._sent(array)

    def _empty(self, state: StateSpec, rows: int) -> Array:
        return np.zeros(self._decoder.sizes(state, rows, self._capacity), self._decoder.spec(state.input).dtype)

    def _sent(self, array: Array) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(array, *self._decoder.session.memory)


def _slots(state: StateSpec, start: int, end: int) -> tuple[slice, ...]:
    """An index of the axes behind the rows that picks slots start … end."""
    assert state.length_axis is not None
    return (*(slice(None) for _ in range(state.length_axis - 1)), slice(start, end))


def value_of(array: Array) -> Any:
    """`array` as onnxruntime takes it, without a copy."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def numpy_of(value: Any) -> Array:
    array: Array = value.numpy()
    return array
