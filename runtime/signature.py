"""The contract between a graph and its host: what goes in, what comes out, and what is carried from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import FeedError

Dim = int | str
"""A fixed size, the name of one, or a sum of such ("past + time"). Equal names are equal sizes within one run."""

_FLOATS = ("float16", "float32", "float64", "bfloat16")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*_FLOATS, *_INTEGERS, "bool")


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise FeedError(f"tensor {self.name!r} has dtype {self.dtype!r}; a graph may have: {', '.join(DTYPES)}")

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorSpec:
        return cls(data["name"], data["dtype"], tuple(data["shape"]))


@dataclass(frozen=True)
class StateSpec:
    """Something a decoder carries: `output` of one step is `input` of the next.

    A KV cache has a `length_axis`; an RNN's hidden state has none. Beam search reorders both along `batch_axis`.
    `initial` is the value that fills a state before the first step, unless an encoder has an output of the state's name, which
    then is that value. A cache without `filled` starts empty and grows with every step. One with it is allocated once, as long
    as it may ever get, and updated in place (input and output may be one and the same memory); `filled` names the output that
    tells how much of each row is in use, and what lies beyond is unspecified.
    """

    input: str
    output: str
    batch_axis: int
    length_axis: int | None = None
    initial: float = 0.0
    filled: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "input": self.input,
            "output": self.output,
            "batch_axis": self.batch_axis,
            "length_axis": self.length_axis,
            "initial": self.initial,
            "filled": self.filled,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StateSpec:
        return cls(**data)


@dataclass(frozen=True)
class GraphSignature:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    states: tuple[StateSpec, ...] = ()

    def __post_init__(self) -> None:
        inputs, outputs = {spec.name for spec in self.inputs}, {spec.name for spec in self.outputs}
        for state in self.states:
            if state.input not in inputs or not {state.output, state.filled or state.output} <= outputs:
                raise FeedError(f"state {state.input!r} → {state.output!r} names a tensor the graph does not have")

    @property
    def dynamic_axes(self) -> tuple[str, ...]:
        """The named sizes of the inputs, in order of appearance."""
        return tuple(dict.fromkeys(dim for spec in self.inputs for dim in spec.shape if isinstance(dim, str)))

    def check_feeds(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, int]:
        """Raise FeedError unless `feeds` fits; return the size each name got, e.g. {"batch": 4}."""
        expected = {spec.name: spec for spec in self.inputs}
        if missing := [name for name in expected if name not in feeds]:
            raise FeedError(f"input {missing[0]!r} is missing; the graph takes {_listed(self.inputs)}")
        if extra := [name for name in feeds if name not in expected]:
            raise FeedError(f"there is no input named {extra[0]!r}; the graph takes {_listed(self.inputs)}")
        sizes: dict[str, int] = {}
        for name, spec in expected.items():
            bind_sizes(spec, feeds[name], sizes)
        return sizes

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
            "states": [state.to_json() for state in self.states],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GraphSignature:
        return cls(
            tuple(TensorSpec.from_json(spec) for spec in data["inputs"]),
            tuple(TensorSpec.from_json(spec) for spec in data["outputs"]),
            tuple(StateSpec.from_json(state) for state in data["states"]),
        )


def bind_sizes(spec: TensorSpec, array: NDArray[Any], sizes: dict[str, int]) -> None:
    """Raise FeedError unless `array` fits `spec`; add the named sizes it fixes to `sizes`."""
    if not isinstance(array, np.ndarray):
        raise FeedError(f"{spec.name!r} is a {type(array).__name__}, expected a numpy array; wrap it in np.asarray(…)")
    if str(array.dtype) != spec.dtype:
        raise FeedError(
            f"{spec.name!r} has dtype {array.dtype} but {spec.dtype} is expected; "
            f"convert it with .astype(np.{'bool_' if spec.dtype == 'bool' else spec.dtype})"
        )
    if array.ndim != len(spec.shape):
        raise FeedError(f"{spec.name!r} has shape {array.shape} but {spec} is expected, which has {len(spec.shape)} axes")
    for axis, (size, dim) in enumerate(zip(array.shape, spec.shape, strict=True)):
        if isinstance(dim, str) and " + " in dim and all(term.isdigit() or term in sizes for term in dim.split(" + ")):
            expected = sum(int(term) if term.isdigit() else sizes[term] for term in dim.split(" + "))
            if size != expected:
                raise FeedError(f"axis {axis} of {spec.name!r} is {size} but must be {dim}, which is {expected} in this run")
        elif isinstance(dim, str):
            known = sizes.setdefault(dim, size)
            if known != size:
                raise FeedError(f"axis {axis} of {spec.name!r} is {size}, but {dim!r} is already {known} in this run")
        elif size != dim:
            raise FeedError(f"axis {axis} of {spec.name!r} is {size} but must be {dim} ({spec})")


def _listed(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(map(str, specs))
