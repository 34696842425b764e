"""What a changed graph is tried on: the goldens of its bundle, and the original graph's answers at other sizes.

Goldens prove the numbers; but they have few sizes, and a change can be right at those alone (an axis baked in, a mask that
happens to broadcast). So every axis is moved too, and there the graph as it was is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from runtime.bundle import Bundle
from runtime.errors import EdgekitError
from runtime.signature import GraphSignature
from runtime.state import WANTED, specified
from runtime.verify import OutputComparison, compare

from .parity import Arrays, fresh_inputs
from .weights import open_model

Sizes = Mapping[str, int]
_LONG = (64, 32, 16)  # tokens of a long text, the longest that the graph takes


@dataclass(frozen=True)
class Trial:
    """One set of inputs with the answers to expect."""

    label: str
    sizes: Sizes
    inputs: Arrays
    expected: Arrays


@dataclass(frozen=True)
class Trials:
    signature: GraphSignature
    allowed: Mapping[str, float]  # output → largest error
    goldens: tuple[Trial, ...]
    others: tuple[Trial, ...]

    @property
    def all(self) -> tuple[Trial, ...]:
        return (*self.goldens, *self.others)

    def judge(self, model: onnx.ModelProto) -> tuple[float, OutputComparison | None, Trial | None]:
        """The largest error, and the first comparison that fails with the trial it failed on. Raises what a session raises."""
        session = open_model(model, self.signature)
        worst = 0.0
        for trial in self.all:
            actual = specified(self.signature.states, session.run(trial.inputs))
            for output, reference in trial.expected.items():
                comparison = compare(trial.label, output, actual[output], reference, self.allowed[output])
                worst = max(worst, comparison.error)
                if not comparison:
                    return worst, comparison, trial
        return worst, None, None


def trials_of(bundle: Bundle, name: str, model: onnx.ModelProto) -> Trials:
    signature = bundle.manifest.graphs[name].signature
    goldens = tuple(
        Trial(entry.file, signature.check_feeds(inputs), inputs, expected)
        for entry, inputs, expected in bundle.goldens()
        if entry.graph == name
    )
    allowed = {output: tolerance.allowed for output, tolerance in bundle.manifest.tolerance[name].items()}
    return Trials(signature, allowed, goldens, _at_other_sizes(signature, allowed, goldens, model))


def _at_other_sizes(
    signature: GraphSignature, allowed: Mapping[str, float], goldens: tuple[Trial, ...], model: onnx.ModelProto
) -> tuple[Trial, ...]:
    if not goldens:
        return ()
    if any(state.filled for state in signature.states):
        return _rows_and_room(signature, allowed, goldens, model)
    example = max(goldens, key=lambda trial: sum(array.size for array in trial.inputs.values()))
    session = open_model(model, signature)
    trials = []
    for seed, sizes in enumerate(_other_sizes(signature, example.sizes)):
        label = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        try:
            inputs = fresh_inputs(signature, example.inputs, sizes, seed)
            expected = session.run(inputs)
        except (EdgekitError, IndexError):  # the original does not run at these sizes, which proves nothing
            continue
        if all(np.isfinite(array).all() for array in expected.values()):
            trials.append(Trial(label, sizes, inputs, {output: expected[output] for output in allowed}))
    return tuple(trials)


def _rows_and_room(
    signature: GraphSignature, allowed: Mapping[str, float], goldens: tuple[Trial, ...], model: onnx.ModelProto
) -> tuple[Trial, ...]:
    """Of a cache in place, whose counters random numbers would contradict: each golden's last row alone, and more room."""
    session = open_model(model, signature)
    trials = []
    for golden in goldens:
        alone, roomier = dict(golden.inputs), dict(golden.inputs)
        for spec in signature.inputs:
            array = golden.inputs[spec.name]
            if "batch" in spec.shape:
                alone[spec.name] = np.take(array, [array.shape[spec.shape.index("batch")] - 1], axis=spec.shape.index("batch"))
            if "capacity" in spec.shape:
                more = [(0, 3 if dim == "capacity" else 0) for dim in spec.shape]
                roomier[spec.name] = np.pad(array, more)
        for label, inputs in (("one row", alone), ("more room", roomier)):
            sizes = signature.check_feeds(inputs)
            if sizes != golden.sizes:
                expected = specified(signature.states, session.run(inputs))
                trials.append(Trial(f"{golden.label}, {label}", sizes, inputs, {name: expected[name] for name in allowed}))
    return tuple(trials)


def _other_sizes(signature: GraphSignature, sizes: Sizes) -> list[dict[str, int]]:
    """Every axis alone at 1 (and 0, if a state may be empty there) and at one more; then all of them at once."""
    empty = length_axes(signature)
    cases = []
    for axis, size in sizes.items():
        for other in [0] * (axis in empty) + [1, size + 1]:
            cases.append(dict(sizes) | {axis: other})
    if len(sizes) > 1:
        cases.append({axis: size + 1 + index for index, (axis, size) in enumerate(sizes.items())})
    return [case for case in cases if case != dict(sizes)]


def length_axes(signature: GraphSignature) -> set[str]:
    """The names of the axes along which states grow."""
    shapes: dict[str, Any] = {spec.name: spec.shape for spec in signature.inputs}
    return {str(shapes[state.input][state.length_axis]) for state in signature.states if state.length_axis is not None}


def workload_of(trials: Trials, model: onnx.ModelProto) -> list[tuple[Sizes, Arrays]]:
    """What to time a graph on: its smallest and its largest golden; for texts also one long row, since goldens are short and a
    kernel that wins there may lose on a page; and for a graph with states one step of one row."""
    by_bytes = sorted(trials.goldens, key=lambda trial: sum(array.nbytes for array in trial.inputs.values()))
    chosen = by_bytes if len(by_bytes) < 2 else [by_bytes[0], by_bytes[-1]]
    workload: list[tuple[Sizes, Arrays]] = [(trial.sizes, trial.inputs) for trial in chosen]
    longest = max(trials.goldens, key=lambda trial: sum(trial.sizes.values()), default=None)
    if longest is None:
        return workload
    session = open_model(model, trials.signature)
    for sizes in _long_rows(trials.signature, longest.sizes):
        try:
            inputs = fresh_inputs(trials.signature, longest.inputs, sizes, seed=0)
            session.run(inputs)
        except (EdgekitError, IndexError):  # longer than the network's positions
            continue
        workload.append((sizes, inputs))
        break
    if trials.signature.states:
        workload.append(_step(trials.signature, longest))
    return workload


def _long_rows(signature: GraphSignature, sizes: Sizes) -> list[dict[str, int]]:
    """One row of as many tokens as the graph takes of these numbers; none for a graph that does not read tokens."""
    counted = any(state.filled for state in signature.states)  # random numbers would contradict the counters
    if signature.inputs[0].dtype != "int64" or not _new_axes(signature) or counted:
        return []
    batch = _batch_axes(signature)
    return [{axis: 1 if axis in batch else length for axis in sizes} for length in _LONG if length > max(sizes.values())]


def _step(signature: GraphSignature, trial: Trial) -> tuple[Sizes, Arrays]:
    """The first row and the first new token of a golden, after all of its past, and the logits of that token."""
    one = _batch_axes(signature) | _new_axes(signature)
    sizes = {axis: 1 if axis in one else size for axis, size in trial.sizes.items()}
    inputs = {}
    for spec in signature.inputs:
        cut = tuple(slice(0, 1) if dim in one else slice(None) for dim in spec.shape)
        inputs[spec.name] = np.array(trial.inputs[spec.name][cut], order="C")
        if spec.name == WANTED:
            inputs[spec.name][...] = 0  # there is no other token left
    return sizes, inputs


def _batch_axes(signature: GraphSignature) -> set[str]:
    return {str(spec.shape[0]) for spec in signature.inputs if spec.shape}


def _new_axes(signature: GraphSignature) -> set[str]:
    """The axes along which the first input, which is what is new in every call, can grow."""
    named = {dim for dim in signature.inputs[0].shape if isinstance(dim, str)}
    return named - _batch_axes(signature) - length_axes(signature)
