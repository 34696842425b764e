"""What the activations of a graph are like, streamed over its samples: one batch is in memory at a time.

A first pass finds the extremes of each tensor, a second one, where it is asked for, counts its values in bins of equal width
between them. Of a tensor only these are kept. Only the tensors that are asked for become outputs of the graph, and where all of
them would take too much memory at once, they are looked at in groups, each of which is a pass of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from runtime.errors import DataError, FeedError
from runtime.signature import TensorSpec, bind_sizes

from .graph import signature_of
from .tensors import array_of, is_mapped

BINS = 4096
_AT_ONCE = 256 << 20  # bytes of a batch's activations
_LARGE = 1 << 16  # bytes of a weight
_QUIET_SECONDS = 10.0  # between two lines of progress
_IN_A_PIECE = 1 << 20  # values that are counted at once

Array = NDArray[Any]
Feeds = Mapping[str, Array]
Samples = Callable[[], Iterable[Feeds]]  # the batches, again from the start at every call
Axes = Mapping[str, Collection[int]]  # tensor → the axes whose places are told apart


@dataclass(frozen=True)
class Activations:
    """What one tensor was like. `highest`: of each axis that was asked for, the largest value at each of its places."""

    low: float
    high: float
    values: int
    samples: int
    axes: int  # how many it has
    highest: Mapping[int, Array] = field(default_factory=dict)
    counts: NDArray[np.int64] | None = None  # in BINS equal bins from low to high
    zeros: int = 0  # values that are exactly zero, as half of them are after a ReLU; known with `counts`


class Statistics:
    """The activations of one graph, gathered when they are asked for, and remembered for who asks again."""

    def __init__(self) -> None:
        self._known: dict[str, Activations] = {}

    def of(
        self,
        model: onnx.ModelProto,
        axes: Axes,
        samples: Samples,
        *,
        counted: bool = False,
        progress: Callable[[str], None] = lambda line: None,
    ) -> dict[str, Activations]:
        """Of each tensor of `axes`; with `counted` values are counted in bins, too. `samples` are the same at every call."""
        new = {name: self._with_known(name, wanted) for name, wanted in axes.items() if not self._has(name, wanted)}
        if new:
            self._known |= _extremes(model, new, samples, progress)
        uncounted = {name: self._known[name] for name in axes if self._known[name].counts is None}
        if counted and uncounted:
            self._known |= _counted(model, uncounted, samples, progress)
        return {name: self._known[name] for name in axes}

    def _has(self, name: str, axes: Collection[int]) -> bool:
        return name in self._known and set(axes) <= self._known[name].highest.keys()

    def _with_known(self, name: str, axes: Collection[int]) -> set[int]:
        return {*axes, *(self._known[name].highest if name in self._known else ())}


def _extremes(model: onnx.ModelProto, axes: Axes, samples: Samples, progress: Callable[[str], None]) -> dict[str, Activations]:
    known: dict[str, Activations] = {}

    def look(name: str, values: Array, rows: int) -> None:
        highest = {axis: values.max(axis=tuple(set(range(values.ndim)) - {axis % values.ndim})) for axis in axes[name]}
        seen = Activations(float(values.min()), float(values.max()), values.size, rows, values.ndim, highest)
        before = known.get(name)
        if before is not None:
            seen = Activations(
                min(before.low, seen.low),
                max(before.high, seen.high),
                before.values + seen.values,
                before.samples + seen.samples,
                seen.axes,
                {axis: np.maximum(before.highest[axis], now) for axis, now in highest.items()},
            )
        known[name] = seen

    _stream(model, list(axes), samples, look, progress, "ranges")
    if unseen := [name for name in axes if name not in known]:
        raise DataError(f"the calibration data never gives {unseen[0]!r} a value; pass --data with samples that are not empty")
    return known


def _counted(
    model: onnx.ModelProto, known: Mapping[str, Activations], samples: Samples, progress: Callable[[str], None]
) -> dict[str, Activations]:
    counts = {name: np.zeros(BINS, np.int64) for name in known}
    zeros = dict.fromkeys(known, 0)

    def look(name: str, values: Array, rows: int) -> None:
        counts[name] += histogram(values, known[name].low, known[name].high)
        zeros[name] += values.size - int(np.count_nonzero(values))

    _stream(model, list(known), samples, look, progress, "distributions")
    return {name: replace(item, counts=counts[name], zeros=zeros[name]) for name, item in known.items()}


def histogram(values: Array, low: float, high: float) -> NDArray[np.int64]:
    """Counts in BINS equal bins from low to high, the last of which has its upper end; what lies outside is in the end bins."""
    counts = np.zeros(BINS, np.int64)
    flat, scale = values.reshape(-1), BINS / (high - low) if high > low else 0.0
    for start in range(0, flat.size, _IN_A_PIECE):
        places = ((flat[start : start + _IN_A_PIECE] - np.float32(low)) * np.float32(scale)).astype(np.int32)
        counts += np.bincount(np.clip(places, 0, BINS - 1, out=places), minlength=BINS)
    return counts


def _stream(
    model: onnx.ModelProto,
    names: Sequence[str],
    samples: Samples,
    look: Callable[[str, Array, int], None],
    progress: Callable[[str], None],
    what: str,
) -> None:
    """`look` at each tensor of every batch: name, values, and how many samples the batch has."""
    signature = signature_of(model, observed_outputs=True).inputs
    first = next(iter(_checked(samples(), signature)), None)
    if first is None:
        raise DataError("there is no calibration data; pass --data with at least one sample")
    groups = _groups(model, names, first)
    told = time.monotonic()
    for place, group in enumerate(groups):
        computed = [name for name in group if name not in first]
        session = session_for(model, computed) if computed else None
        done = 0
        for number, feeds in enumerate(_checked(samples(), signature), 1):
            found = dict(feeds) | ({} if session is None else _run(session, computed, feeds, number))
            rows = _rows(feeds)
            done += rows
            for name in group:
                if found[name].size:
                    _refuse_non_finite(name, found[name], number)
                    look(name, found[name], rows)
            if time.monotonic() - told > _QUIET_SECONDS:
                told = time.monotonic()
                part = f", part {place + 1} of {len(groups)}" if len(groups) > 1 else ""
                progress(f"calibrating: {what} of {len(group)} tensors{part}, {done} samples so far")


def _checked(batches: Iterable[Feeds], inputs: Sequence[TensorSpec]) -> Iterator[Feeds]:
    """The batches, each refused in one line if it does not fit the graph."""
    for number, feeds in enumerate(batches, 1):
        for spec in inputs:
            if spec.name not in feeds:
                raise DataError(f"calibration batch {number} lacks the input {spec}; pass --data with all inputs of the graph")
            try:
                bind_sizes(spec, feeds[spec.name], {})
            except FeedError as error:
                raise DataError(f"calibration batch {number} does not fit the graph: {error}") from None
            if feeds[spec.name].dtype.kind == "f":
                _refuse_non_finite(spec.name, feeds[spec.name], number)
        yield {spec.name: feeds[spec.name] for spec in inputs}


def _refuse_non_finite(name: str, values: Array, number: int) -> None:
    if not np.isfinite(values).all():
        raise DataError(f"calibration sample batch {number} gives NaN or infinite values in {name!r}; look at the data")


def _rows(feeds: Feeds) -> int:
    return next((len(array) for array in feeds.values() if array.ndim), 1)


def _groups(model: onnx.ModelProto, names: Sequence[str], feeds: Feeds) -> list[list[str]]:
    """The tensors, as many at a time as there is room for by their sizes in one batch; in the graph's order."""
    computed = [name for name in names if name not in feeds]
    sizes = _sizes(model, computed, feeds) if computed else {}
    place = {name: at for at, name in enumerate(name for node in model.graph.node for name in node.output)}
    groups: list[list[str]] = [[]]
    room = _AT_ONCE
    for name in sorted(names, key=lambda name: place.get(name, -1)):
        size = sizes.get(name, 0)
        if groups[-1] and size > room:
            groups.append([])
            room = _AT_ONCE
        groups[-1].append(name)
        room -= size
    return groups


def _sizes(model: onnx.ModelProto, names: Sequence[str], feeds: Feeds) -> dict[str, int]:
    """Bytes of each tensor in this batch, told by the graph itself: not one of them leaves it."""
    counts = [f"{name}.size" for name in names]
    nodes = [helper.make_node("Size", [name], [count]) for name, count in zip(names, counts, strict=True)]
    found = _run(session_for(model, counts, nodes), counts, feeds, 1)
    return {name: 4 * int(found[count]) for name, count in zip(names, counts, strict=True)}


def _run(session: ort.InferenceSession, names: Sequence[str], feeds: Feeds, number: int) -> dict[str, Array]:
    taken = {item.name for item in session.get_inputs()}
    try:
        values = session.run(names, {name: array for name, array in feeds.items() if name in taken})
    except Exception as error:  # onnxruntime raises its own C++ exceptions, all children of Exception
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"the graph cannot be run on calibration batch {number}; look at the data: {reason}") from error
    return dict(zip(names, values, strict=True))


def session_for(model: onnx.ModelProto, names: Sequence[str], more: Sequence[onnx.NodeProto] = ()) -> ort.InferenceSession:
    """A session that computes these tensors, perhaps by `more` nodes, and nothing that they do not need.

    Large weights are handed over where they are: as part of a serialized model they would be in memory four times.
    """
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    nodes = _needed([*model.graph.node, *more], names)
    part.graph.name = "part"
    part.graph.node.extend(nodes)
    part.graph.input.extend(model.graph.input)
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)  # onnxruntime infers the types
    read = {name for node in nodes for name in _read_by(node)}
    large: dict[str, ort.OrtValue] = {}
    for tensor in model.graph.initializer:
        if tensor.name in read and (is_mapped(tensor) or len(tensor.raw_data) >= _LARGE):
            large[tensor.name] = ort.OrtValue.ortvalue_from_numpy(array_of(tensor))
            part.graph.initializer.append(_elsewhere(tensor))
        elif tensor.name in read:
            part.graph.initializer.append(tensor)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False  # it would keep the room of the largest batch for good
    options.add_external_initializers(list(large), list(large.values()))
    session = ort.InferenceSession(part.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.weights = large  # it reads them where they are
    return session


def _elsewhere(tensor: onnx.TensorProto) -> onnx.TensorProto:
    place = onnx.StringStringEntryProto(key="location", value="given")
    return onnx.TensorProto(
        name=tensor.name,
        data_type=tensor.data_type,
        dims=tensor.dims,
        data_location=onnx.TensorProto.EXTERNAL,
        external_data=[place],
    )


def _needed(nodes: Sequence[onnx.NodeProto], names: Sequence[str]) -> list[onnx.NodeProto]:
    wanted, kept = set(names), []
    for node in reversed(nodes):
        if wanted & set(node.output):
            kept.append(node)
            wanted.update(_read_by(node))
    return kept[::-1]


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """What it reads, and what the graphs inside it (If, Loop) read of the graph around them."""
    yield from node.input
    for attribute in node.attribute:
        for inner in (attribute.g, *attribute.graphs):
            for nested in inner.node:
                yield from _read_by(nested)
            yield from (value.name for value in inner.output)
