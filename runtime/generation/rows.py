"""Rows: sequences that are decoded together, with their state.

Caches in place are allocated once (caches.py); other states (hidden ones, caches that grow) are what the last call gave. Beam
search reorders rows at every step, and beams descend from common ancestors: `select` copies only the slots in which a row
differs from the one it goes on from.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..session import Session
from ..signature import StateSpec
from ..state import LOGITS, TOKENS, WANTED
from .caches import Piece, caches_for, numpy_of, value_of
from .decoder import Decoder, source_axis

Array = NDArray[Any]
_calls = itertools.count(1)  # numbers the calls of a process: what two rows got from the same call is the same
_ROW_BITS = 16
_COPIED_WHOLE = 1 << 16  # bytes of caches: to find out which slots differ takes longer than to copy so many


@dataclass
class Step:
    """A binding for single tokens."""

    binding: Any
    outputs: list[str]  # in the binding's order
    before: dict[str, Any] | None = None  # hidden states that it reads, by name; None: they are bound for every call
    after: dict[str, Any] = field(default_factory=dict)  # … and writes
    memory: dict[str, Any] | None = None  # that is bound


class Rows:
    """At most `room` rows of at most `capacity` tokens; `count` of them are in use, each `lengths[row]` tokens long."""

    def __init__(self, decoder: Decoder, *, room: int, capacity: int) -> None:
        self.decoder = decoder
        self.count = 0
        self.capacity = decoder.fixed_capacity or capacity
        self._allocate(room)
        self._carried: dict[str, Any] = {}
        self._memory: dict[str, Array] = {}  # of every source
        self._sources: list[int] = []  # row → its place in the memory
        self._bound_memory: dict[str, Any] = {}

    def _allocate(self, room: int) -> None:
        decoder = self.decoder
        self.room = room
        self.lengths = np.zeros(room, np.int32)
        self._numbers = np.arange(room)
        self._history = np.zeros((room, self.capacity), np.int64)  # which call and row wrote each slot
        self._caches = caches_for(decoder, room, self.capacity)
        self._tokens = np.zeros((room, 1), np.int64)
        self._logits = np.empty((room, 1, decoder.vocabulary), np.float32)
        self._steps: dict[Any, tuple[Step, ...]] = {}  # kept while nothing they bind moves
        self._row_logits: dict[int, Array] = {}  # that they write: rows → (rows, vocabulary)

    @property
    def held_bytes(self) -> int:
        """Of caches and logits, whether rows are in use or not."""
        return self.decoder.cache_bytes(self.room, self.capacity) + self._logits.nbytes

    # Starting

    def start(self, count: int, memory: Mapping[str, Array] | None = None) -> None:
        """Begin with `count` empty rows; `memory` is what the encoder gave for them."""
        assert self.count == 0
        self.count = count
        self.lengths[:] = 0
        self._carried = {}  # never changed in place: it may be that of a binding
        for state in self.decoder.carried:
            spec = self.decoder.spec(state.input)
            if memory and state.input in memory:
                array = np.ascontiguousarray(memory[state.input])
            else:
                shape = [dim if isinstance(dim, int) else 0 for dim in spec.shape]
                shape[state.batch_axis] = count
                array = np.full(shape, state.initial, spec.dtype)
            self._carried[state.input] = value_of(array)
        self._memory = {spec.name: memory[spec.name] for spec in self.decoder.memory} if memory else {}
        self._sources = list(range(count))
        self._bind_memory()

    def join(self, other: Rows) -> None:
        """Take over the rows of `other` behind one's own."""
        if not self.count:
            self._carried, self._memory = dict(other._carried), dict(other._memory)
            self._sources = list(other._sources)
        else:
            self._carried = {
                state.input: value_of(
                    _side_by_side(numpy_of(self._carried[state.input]), numpy_of(other._carried[state.input]), state)
                )
                for state in self.decoder.carried
            }
            first = next((len(array) for array in self._memory.values()), 0)
            for spec in self.decoder.memory:
                axis = source_axis(spec)
                ours, theirs = self._memory[spec.name], other._memory[spec.name]
                longest = 0 if axis is None else max(ours.shape[axis], theirs.shape[axis])
                ours, theirs = padded(ours, axis, longest), padded(theirs, axis, longest)
                self._memory[spec.name] = np.concatenate((ours, theirs))
            self._sources += [first + source for source in other._sources]
        start, end = self.count, self.count + other.count
        used = int(other.lengths[: other.count].max(initial=0))
        self.lengths[start:end] = other.lengths[: other.count]
        self._history[start:end, :used] = other._history[: other.count, :used]
        self._caches.take(other._caches, start, end, used)
        self.count = end
        self._bind_memory()

    def reserve(self, room: int, capacity: int) -> None:
        """Have space for so many rows and tokens; what is there is kept."""
        if room <= self.room and capacity <= self.capacity:
            return
        before = self.room, self.lengths, self._history, self._caches
        self.capacity = max(capacity, self.capacity)
        self._allocate(max(room, before[0]))
        used = int(before[1][: self.count].max(initial=0))
        self.lengths[: self.count] = before[1][: self.count]
        self._history[: self.count, :used] = before[2][: self.count, :used]
        self._caches.take(before[3], 0, self.count, used)

    # Going on

    def read(self, tokens: Array, wanted: Sequence[int] | None = None) -> Array:
        """As `advance`, of tokens that are given and not chosen."""
        return self.advance(tokens, wanted, self.decoder.reader)

    def step(self, tokens: list[int]) -> Array:
        """As `advance`, of one token a row: logits (rows, vocabulary)."""
        if not self._caches.stays:
            return self.advance(np.array(tokens, np.int64)[:, None])[:, 0]
        self._check_room(1)
        self._tokens[: self.count, 0] = tokens
        return self._step(self.decoder.session)

    def advance(self, tokens: Array, wanted: Sequence[int] | None = None, form: Session | None = None) -> Array:
        """Feed tokens (rows, time); logits (rows, kept, vocabulary) of the wanted positions, or of the last one.

        The logits are valid, and may be written to, until the next call.
        """
        form = form or self.decoder.session
        time = tokens.shape[1]
        pieces = self._pieces(time)
        if pieces is None:
            return self._call(tokens, wanted or (time - 1,), form)
        kept = [position % time for position in (wanted or (time - 1,))]
        logits = []
        for start, end in pieces:
            inside = [position - start for position in kept if start <= position < end]
            part = self._call(tokens[:, start:end], inside or [0], form)
            if inside:
                logits.append(part.copy())
        return np.concatenate(logits, axis=1)

    def _check_room(self, time: int) -> None:
        used = int(self.lengths[0]) if self.count == 1 else int(self.lengths[: self.count].max())
        assert used + time <= self.capacity, f"{used + time} tokens in rows of {self.capacity}"

    def _pieces(self, time: int) -> list[tuple[int, int]] | None:
        """How tokens must be cut: a graph may take one at a time, and long prompts go in pieces."""
        size = self.decoder.at_once or (PIECE if self.count == 1 else time)
        if time <= size:
            return None
        return [(start, min(start + size, time)) for start in range(0, time, size)]

    def _call(self, tokens: Array, wanted: Sequence[int], session: Session) -> Array:
        if self.decoder.one_row and self.count > 1:
            raise AssertionError("rows of a graph that takes one are decoded one after the other")
        time = tokens.shape[1]
        self._check_room(time)
        if time == 1 and self._caches.stays:
            self._tokens[: self.count] = tokens
            return self._step(session)[:, None]
        logits = np.empty((self.count, len(wanted), self.decoder.vocabulary), np.float32)
        binding, outputs = self._bind(session, np.ascontiguousarray(tokens), wanted, logits)
        for name, value in self._bound_memory.items():
            binding.bind_ortvalue_input(name, value)
        self._run(session, binding, outputs)
        self._after(time)
        return logits

    def _step(self, session: Session) -> Array:
        """Feed `_tokens`, one a row, with bindings that are kept. The logits are one and the same array for as many rows."""
        steps = self._steps.get((session, self.count))
        if steps is None:
            steps = self._steps[session, self.count] = self._bind_steps(session)
        step = next((step for step in steps if step.before is self._carried), steps[0])
        if step.memory is not self._bound_memory:
            step.memory = self._bound_memory
            for name, value in step.memory.items():
                step.binding.bind_ortvalue_input(name, value)
        if step.before is None:
            self._run(session, step.binding, step.outputs)
        else:
            if step.before is not self._carried:  # rows were chosen, or have just begun
                for name, value in self._carried.items():
                    numpy_of(step.before[name])[...] = numpy_of(value)
            session.run_bound(step.binding)
            self._carried = step.after
        self._after(1)
        return self._row_logits[self.count]

    def _bind_steps(self, session: Session) -> tuple[Step, ...]:
        """A binding for single tokens; of hidden states, which never change their shape, two, that go back and forth."""
        decoder = self.decoder
        self._row_logits[self.count] = self._logits[: self.count, 0]
        hidden = bool(decoder.carried) and all(state.length_axis is None for state in decoder.carried)
        made = [self._bind(session, self._tokens[: self.count], (0,), self._logits[: self.count]) for _ in range(1 + hidden)]
        if not hidden:
            return (Step(*made[0]),)
        places: list[dict[str, Any]] = [{}, {}]
        for state in decoder.carried:
            for place in places:
                shape = decoder.sizes(state, self.count, 0)
                place[state.input] = value_of(np.empty(shape, decoder.spec(state.input).dtype))
        for (binding, _), before, after in zip(made, places, reversed(places), strict=True):
            for state in decoder.carried:
                binding.bind_ortvalue_input(state.input, before[state.input])
                binding.bind_ortvalue_output(state.output, after[state.input])
        return tuple(Step(*one, before, after) for one, before, after in zip(made, places, reversed(places), strict=True))

    def _run(self, session: Session, binding: Any, outputs: list[str]) -> None:
        for state in self.decoder.carried:
            binding.bind_ortvalue_input(state.input, self._carried[state.input])
            binding.bind_output(state.output, *session.memory)  # anew: what the last call gave must not be written over
        session.run_bound(binding)
        if self.decoder.carried:
            values = dict(zip(outputs, binding.get_outputs(), strict=True))
            self._carried = {state.input: values[state.output] for state in self.decoder.carried}

    def _bind(self, session: Session, tokens: Array, wanted: Sequence[int], logits: Array) -> tuple[Any, list[str]]:
        """A binding of everything but memory and carried states, and the names of its outputs in order."""
        decoder = self.decoder
        binding = session.binding()
        inputs = {TOKENS: value_of(tokens)}
        if decoder.takes_wanted:
            inputs[WANTED] = value_of(np.asarray(wanted, np.int64))
        caches = self._caches.bound(self.count)
        inputs |= caches
        outputs: dict[str, Any] = {LOGITS: value_of(logits)}
        if decoder.length is not None:
            inputs[decoder.length.input] = value_of(self.lengths[: self.count])
            outputs[decoder.length.output] = value_of(np.empty(self.count, np.int32))
        outputs |= {state.output: caches[state.input] for state in decoder.in_place}
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        return binding, [*outputs, *(state.output for state in decoder.carried)]

    def _after(self, time: int) -> None:
        if not self.decoder.in_place:  # nothing is ever copied slot by slot
            self.lengths[: self.count] += time
            return
        number = next(_calls) << _ROW_BITS
        if self.count == 1:  # small arrays cost more than numbers
            length = int(self.lengths[0])
            self._history[0, length : length + time] = number
            self.lengths[0] = length + time
            return
        rows, before = self._numbers[: self.count], self.lengths[: self.count]
        slots = before[:, None] + np.arange(time)
        self._history[rows[:, None], slots] = (number + rows)[:, None]
        before += time

    # Choosing rows

    def select(self, parents: list[int]) -> None:
        """Row i goes on from what was row parents[i]; there may be more or fewer rows than before."""
        count = len(parents)
        if count == self.count and parents == list(range(count)):
            return
        if not count:
            self.count, self._carried, self._memory, self._sources = 0, {}, {}, []
            return
        self.reserve(count, self.capacity)
        changed = [row for row, parent in enumerate(parents) if parent != row]
        if changed and self.decoder.in_place:
            self._copy(changed, [parents[row] for row in changed])
        elif changed:
            self.lengths[changed] = self.lengths[[parents[row] for row in changed]]
        if self.decoder.carried:
            self._carry(parents)
        sources = [self._sources[parent] for parent in parents]
        self.count = count
        if sources != self._sources:
            self._sources = sources
            self._bind_memory()

    def _carry(self, parents: list[int]) -> None:
        """Choose rows of the states that every call gives anew; where those are bound, into the place the next call reads."""
        steps = self._steps.get((self.decoder.session, len(parents)), ())
        free = next((step.before for step in steps if step.after is self._carried and step.before is not None), None)
        chosen = {}
        for state in self.decoder.carried:
            array = numpy_of(self._carried[state.input])
            if free is None:
                chosen[state.input] = value_of(np.take(array, parents, axis=state.batch_axis))
            else:
                np.take(
                    array, parents, axis=state.batch_axis, out=numpy_of(free[state.input]), mode="clip"
                )  # or it is buffered
        self._carried = free or chosen

    def _copy(self, targets: list[int], parents: list[int]) -> None:
        end = int(self.lengths[parents].max())
        written = self._history[parents, :end]
        if self.decoder.cache_bytes(len(targets), end) <= _COPIED_WHOLE:
            self._caches.copy([Piece(targets, parents, 0, end)])
        elif pieces := _differing(targets, parents, written != self._history[targets, :end]):
            self._caches.copy(pieces)
        self._history[targets, :end] = written
        self.lengths[targets] = self.lengths[parents]

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of the only row."""
        assert self.count == 1
        assert self.decoder.can_rewind
        self._carried = {
            state.input: value_of(np.take(numpy_of(self._carried[state.input]), np.arange(length), axis=state.length_axis))
            for state in self.decoder.carried
        }
        self.lengths[0] = length

    def _bind_memory(self) -> None:
        """The memory of every row, side by side, as the graph takes it; sources that no row has any more are forgotten."""
        used = sorted(set(self._sources))
        if any(len(array) > len(used) for array in self._memory.values()):
            self._memory = {name: array[used] for name, array in self._memory.items()}
            self._sources = [used.index(source) for source in self._sources]
        rows = self._sources
        place = self.decoder.session.place  # once for all steps: a device would get it anew with each of them
        self._bound_memory = {
            name: place(array if rows == list(range(len(array))) else np.ascontiguousarray(array[rows]))
            for name, array in self._memory.items()
        }


def _differing(targets: list[int], parents: list[int], differs: Array) -> list[Piece]:
    """What must be copied, where `differs` (targets, slots) says so: rows that need about as many slots are one piece."""
    end = differs.shape[1]
    starts = np.where(differs.any(axis=1), differs.argmax(axis=1), end)
    pieces = []
    for size in {int(end - start).bit_length() for start in starts} - {0}:
        places = [place for place, start in enumerate(starts) if int(end - start).bit_length() == size]
        rows, sources = [targets[place] for place in places], [parents[place] for place in places]
        pieces.append(Piece(rows, sources, int(starts[places].min()), end))
    return pieces


PIECE = 256  # tokens of a long prompt in one call: attention within it looks at what causality forbids, too


def padded(array: Array, axis: int | None, length: int, *, front: bool = False) -> Array:
    """`array` with zeros up to `length` along an axis; as it is where there is no such axis."""
    if axis is None or not (missing := length - array.shape[axis]):
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (missing, 0) if front else (0, missing)
    return np.pad(array, widths)


def _side_by_side(ours: Array, theirs: Array, state: StateSpec) -> Array:
    """Rows of both; of a cache that grows the shorter gets padding in front, which its record hides."""
    if state.length_axis is not None:
        longest = max(ours.shape[state.length_axis], theirs.shape[state.length_axis])
        ours, theirs = (padded(array, state.length_axis, longest, front=True) for array in (ours, theirs))
    return np.concatenate((ours, theirs), axis=state.batch_axis)
