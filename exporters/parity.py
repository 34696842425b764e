"""Shape-fuzz parity: the graph against its reference on fresh inputs, at sizes the exporter never saw.

Only fresh sizes reveal a baked-in shape, so every dynamic axis is varied alone over 1, 2, the example's neighbours and
larger ones. The tolerance is derived, not guessed: PyTorch's own float32 rounding error, measured against the same network
in float64 on the same inputs, times MARGIN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.bundle import Tolerance
from runtime.errors import FeedError, ParityRefused
from runtime.session import Session
from runtime.signature import GraphSignature, bind_sizes
from runtime.state import specified
from runtime.verify import OutputComparison, compare, max_error

from .double import in_float64
from .exportable import GraphSource

MARGIN = 10.0  # another summation order gives errors of the same size as PyTorch's own; ten times that is a different answer
_LARGEST_SHARE = 0.01  # of an output's size; a tolerance above that would accept a wrong answer
EPSILON = float(np.finfo(np.float32).eps)

Arrays = dict[str, NDArray[Any]]
Reference = Callable[[Arrays], Arrays]


@dataclass(frozen=True)
class Case:
    """One fuzzed size, e.g. {"batch": 7}, and how each output compared."""

    sizes: Mapping[str, int]
    inputs: Arrays
    expected: Arrays
    comparisons: tuple[OutputComparison, ...]

    def __bool__(self) -> bool:
        return all(self.comparisons)

    def __str__(self) -> str:
        return ", ".join(f"{axis}={size}" for axis, size in self.sizes.items()) or "example sizes"


def fuzz_sizes(example: int, *, thorough: bool = False) -> list[int]:
    """At least five sizes other than the example's: 1, 2, its neighbours, a larger and a large one."""
    large = 4 * example + 5 if example <= 64 else 2 * example + 3
    candidates = [1, 2, example - 1, example + 1, 2 * example + 1, large]
    if thorough:
        candidates += [*range(3, 10), 3 * example, 2 * large + 1]
    sizes = [size for size in dict.fromkeys(candidates) if size >= 1 and size != example]
    while len(sizes) < 5:
        sizes.append(max(sizes) + 2)
    return sizes


def fuzz_cases(axes: Mapping[str, int], *, thorough: bool = False) -> list[dict[str, int]]:
    """Every axis varied alone with the others at the example's size; with several axes also cases where all differ."""
    cases = [dict(axes) | {axis: size} for axis, example in axes.items() for size in fuzz_sizes(example, thorough=thorough)]
    if len(axes) > 1:
        cases.append({axis: example + 2 + index for index, (axis, example) in enumerate(axes.items())})
        cases.append(dict.fromkeys(axes, 1))
    return cases or [{}, {}, {}]  # fixed sizes: other values alone


def fresh_inputs(
    signature: GraphSignature,
    examples: Mapping[str, NDArray[Any]],
    sizes: Mapping[str, int],
    seed: int,
    *,
    beyond: bool = False,
) -> Arrays:
    """New values like the examples': integers and booleans drawn from theirs, floats drawn and jittered.

    An example of one value only (a mask of ones) would prove nothing of that input: `beyond` draws its neighbours too, which
    the original may refuse.
    """
    random = np.random.default_rng(seed)
    inputs: Arrays = {}
    for spec in signature.inputs:
        example = np.asarray(examples[spec.name])
        shape = [sizes.get(dim, example.shape[axis]) if isinstance(dim, str) else dim for axis, dim in enumerate(spec.shape)]
        drawn = example
        for axis, size in enumerate(shape):
            if example.shape[axis] != size or isinstance(spec.shape[axis], str):
                drawn = np.take(drawn, random.integers(0, max(1, example.shape[axis]), size), axis=axis)
        if example.dtype.kind == "f":
            deviation = float(example.std()) or 1.0
            drawn = drawn + 0.5 * deviation * random.standard_normal(drawn.shape)
        elif example.size and drawn.size:
            values = example.ravel()
            if beyond and (values == values[0]).all():
                values = (
                    np.array([False, True]) if example.dtype.kind == "b" else values[0] + np.array([0, 1, 2], example.dtype)
                )
            drawn = random.choice(values, size=drawn.shape)
        inputs[spec.name] = np.array(drawn, dtype=spec.dtype, order="C")  # unlike ascontiguousarray, keeps a scalar a scalar
    return inputs


def torch_reference(graph: GraphSource) -> Reference:
    """The graph in PyTorch as a function of numpy arrays."""
    return partial(_answer, graph)


def precise_reference(graph: GraphSource) -> Reference:
    """… in float64."""

    def run(inputs: Arrays) -> Arrays:
        with in_float64(graph.module):
            return _answer(
                graph, {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in inputs.items()}
            )

    return run


def _answer(graph: GraphSource, inputs: Arrays) -> Arrays:
    tensors = {name: torch.from_numpy(array.copy()) for name, array in inputs.items()}
    outputs = {name: tensor.detach().numpy() for name, tensor in graph.call(tensors).items()}
    return specified(graph.states, outputs)


def remembering(reference: Reference) -> Reference:
    """`reference`, computed once for the same inputs object: it is asked for again at every stage of a proof."""
    known: dict[int, tuple[Arrays, Arrays]] = {}

    def run(inputs: Arrays) -> Arrays:
        if id(inputs) not in known:
            known[id(inputs)] = (inputs, reference(inputs))
        return known[id(inputs)][1]

    return run


def derive_tolerance(
    reference: Reference,
    precise: Reference | None,
    cases: list[Arrays],
    *,
    again: Reference | None = None,
    how: str = "PyTorch float32 against float64 of the same network",
) -> dict[str, Tolerance]:
    """For each output: MARGIN times the float32 error of the reference itself, measured on `cases` against `precise`.

    `again` computes the reference anew, where `reference` remembers; two runs must agree.
    """
    noise: dict[str, float] = {}
    scale: dict[str, float] = {}
    exact_outputs: set[str] = set()
    for inputs in cases[:1]:
        refuse_random(reference(inputs), (again or reference)(inputs))
    for inputs in cases:
        single = reference(inputs)
        try:
            if precise is None:
                raise TypeError
            exact = precise(inputs)
        except Exception:  # a network with float32 written into it cannot run in float64: disturb its inputs instead
            how = "the answer to inputs disturbed by one float32 rounding step"
            exact = reference({name: nudged(array, EPSILON) for name, array in inputs.items()})
        for name, values in single.items():
            if np.isnan(values).any():
                raise ParityRefused(f"output {name!r} has NaN values in the original itself, so nothing can be compared")
            comparable = values.shape == exact[name].shape  # how many boxes are found may itself depend on rounding
            noise[name] = max(noise.get(name, 0.0), max_error(values, exact[name]) if comparable else 0.0)
            finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
            scale[name] = max(scale.get(name, 0.0), float(np.max(np.abs(finite.astype(np.float64)), initial=0.0)))
            if values.dtype.kind != "f":
                exact_outputs.add(name)
    tolerances = {}
    for name, measured in noise.items():
        if name in exact_outputs:
            tolerances[name] = Tolerance(0.0, 0.0, "whole numbers and booleans must be equal")
            continue
        if MARGIN * measured > _LARGEST_SHARE * scale[name]:
            raise ParityRefused(
                f"output {name!r} changes by {measured:.2e} with rounding alone ({how}), and its values reach only "
                f"{scale[name]:.2e}: nothing can be proved of it; look for a division by almost zero"
            )
        floor = EPSILON * scale[name]
        text = f"{MARGIN:g} x the larger of {measured:.2e} ({how}) and {floor:.2e} (one float32 rounding of the largest value)"
        tolerances[name] = Tolerance(MARGIN * max(measured, floor), measured, text)
    return tolerances


def compare_cases(
    session: Session, reference: Reference, tolerances: Mapping[str, Tolerance], inputs: list[tuple[dict[str, int], Arrays]]
) -> list[Case]:
    """Run the graph on every case. A case the graph cannot run, or whose declared shapes are untrue, is a failed one."""
    cases = []
    for sizes, feeds in inputs:
        expected = reference(feeds)
        label = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        try:
            actual = specified(session.signature.states, session.run(feeds))
            bound = session.signature.check_feeds(feeds)
            for spec in session.signature.outputs:
                bind_sizes(spec, actual[spec.name], bound)
        except FeedError as error:
            allowed = {name: tolerance.allowed for name, tolerance in tolerances.items()}
            failed = tuple(
                OutputComparison(label, name, tuple(expected[name].shape), float("inf"), allowed[name], str(error))
                for name in expected
            )
            cases.append(Case(sizes, feeds, expected, failed))
            continue
        comparisons = tuple(compare(label, name, actual[name], expected[name], tolerances[name].allowed) for name in expected)
        cases.append(Case(sizes, feeds, expected, comparisons))
    return cases


def refuse_random(first: Arrays, second: Arrays) -> None:
    for name, values in first.items():
        if not np.array_equal(values, second[name], equal_nan=values.dtype.kind == "f"):
            raise ParityRefused(
                f"output {name!r} differs between two runs on the same inputs, so nothing can be proved of it; "
                "remove the randomness (dropout that stays on in eval mode, torch.rand, RandomNormal)"
            )


def nudged(array: NDArray[Any], step: float) -> NDArray[Any]:
    """The array with each float moved up or down by `step` of its size."""
    if array.dtype.kind != "f":
        return array
    random = np.random.default_rng(0)
    return np.asarray(array * (1 + step * random.choice([-1.0, 1.0], size=array.shape)), dtype=array.dtype)
