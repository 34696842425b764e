"""Values that someone's graph takes, found by reading it and trying.

Zeros are nearly always valid and prove little: an embedding answers with its first row, a sample rate of zero takes the other
branch. The graph tells more: the size of the table that an input indexes, the number it is compared with. Each such pool of
values is tried on the original, and kept if the answer is finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from runtime.errors import EdgekitError
from runtime.feeds import SHORT, Pool, example_feeds
from runtime.signature import GraphSignature, TensorSpec

from .graph import graphs_of
from .parity import Reference

# Operators whose output holds the values of these inputs of theirs, in some order or shape. None: of all of them.
_HANDS_ON: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("Identity", "Cast", "CastLike", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Tile"), (0,)),
    **dict.fromkeys(("Transpose", "Slice", "Split", "Gather", "Clip", "Pad", "DequantizeLinear"), (0,)),
    **dict.fromkeys(("Concat", "Max", "Min"), None),
    "Where": (1, 2),
}
# Operators that look up rows: which input holds the indices, and which the table.
_LOOKUPS = {
    "Gather": (1, 0),
    "GatherElements": (1, 0),
    "GatherBlockQuantized": (1, 0),
    "EmbedLayerNormalization": (0, 2),
}
_COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Sub", "Mod")
_ONES: Pool = (1,)
_FLAGS: Pool = (0, 1)
_POSITIVE: Pool = tuple(np.linspace(0.05, 1.0, 39))  # for a root, a logarithm, a division
_FEWEST_TRIALS = 2


def likely_pools(model: onnx.ModelProto, signature: GraphSignature) -> dict[str, list[Pool]]:
    """For each input the pools to try, the most telling first. An input with an empty list stays as it is."""
    facts = _Facts(model, signature)
    return {spec.name: _pools(spec, facts) for spec in signature.inputs}


def choose_pools(
    signature: GraphSignature,
    sizes: Mapping[str, int],
    likely: Mapping[str, list[Pool]],
    reference: Reference,
    start: Mapping[str, Pool],
) -> dict[str, Pool]:
    """One input after the other: the first of its pools with which the original gives finite answers."""
    chosen = dict(start)
    for spec in signature.inputs:
        options = likely[spec.name]
        if spec.dtype.startswith("float") and not _graph_says(options) and _is_well(signature, sizes, chosen, reference):
            continue  # plain values do; positive ones are for where they do not
        for pool in options:
            if _is_well(signature, sizes, chosen | {spec.name: pool}, reference):
                chosen[spec.name] = pool
                break
    return chosen


def _graph_says(options: list[Pool]) -> bool:
    """Whether the graph said something of an input, beyond the pools that are tried on any."""
    return any(pool is not _POSITIVE for pool in options)


def _pools(spec: TensorSpec, facts: _Facts) -> list[Pool]:
    if spec.dtype == "bool":
        return [_FLAGS, _ONES]
    pools: list[Pool] = []
    if limit := facts.limits.get(spec.name):
        pools.append(range(limit))
    told = facts.constants.get(spec.name, set())
    if spec.dtype.startswith("float"):
        return [*pools, _POSITIVE]
    if told:
        fitting = sorted(value for value in told if np.iinfo(spec.dtype).min <= value <= np.iinfo(spec.dtype).max)
        pools += [tuple(dict.fromkeys((*fitting, 0))), tuple(fitting)] if fitting else []
    if spec.dtype in ("uint8", "int8") and not pools:  # pixels or quantized values: all of them are meant
        pools.append(range(np.iinfo(spec.dtype).min, np.iinfo(spec.dtype).max + 1))
    return [*pools, _FLAGS, _ONES]


def _is_well(signature: GraphSignature, sizes: Mapping[str, int], pools: Mapping[str, Pool], reference: Reference) -> bool:
    turns = max((len(pool) for pool in pools.values() if len(pool) <= SHORT), default=1)
    for seed in range(max(_FEWEST_TRIALS, turns)):  # a single value takes those of a short pool in turn
        try:
            outputs = reference(example_feeds(signature, sizes, seed, pools))
        except EdgekitError:
            return False
        if any(values.dtype.kind == "f" and np.isnan(values).any() for values in outputs.values()):
            return False
    return True


class _Facts:
    """What the graph says about the values of its inputs: `limits` of indices, and `constants` they meet."""

    def __init__(self, model: onnx.ModelProto, signature: GraphSignature) -> None:
        self.limits: dict[str, int] = {}
        self.constants: dict[str, set[int]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._numbers: dict[str, float] = {}
        self._origin = {spec.name: {spec.name} for spec in signature.inputs}
        for graph in graphs_of(model):
            for tensor in graph.initializer:
                self._learn_tensor(tensor.name, tensor)
        for graph in graphs_of(model):  # outer graphs first: what a branch reads from outside is known by then
            for node in graph.node:
                self._learn(node)

    def _learn_tensor(self, name: str, tensor: onnx.TensorProto) -> None:
        self._shapes[name] = tuple(tensor.dims)
        if int(np.prod(tensor.dims)) == 1 and tensor.data_type != onnx.TensorProto.STRING:
            self._learn_number(name, numpy_helper.to_array(tensor))

    def _learn_number(self, name: str, array: NDArray[Any]) -> None:
        if array.size == 1 and np.isfinite(value := float(array.astype(np.float64).ravel()[0])):
            self._numbers[name] = value

    def _learn(self, node: onnx.NodeProto) -> None:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Constant" and "value" in attributes:
            self._learn_tensor(node.output[0], attributes["value"].t)
        elif node.op_type == "Constant" and ("value_int" in attributes or "value_float" in attributes):
            value = attributes["value_int"].i if "value_int" in attributes else attributes["value_float"].f
            self._learn_number(node.output[0], np.asarray(value))
        if node.op_type in _LOOKUPS:
            indices, table = _LOOKUPS[node.op_type]
            axis = attributes["axis"].i if "axis" in attributes else 0
            if len(node.input) > max(indices, table) and (shape := self._shapes.get(node.input[table])):
                self._limit(node.input[indices], shape[axis] if -len(shape) <= axis < len(shape) else 0)
        if node.op_type == "OneHot" and len(node.input) > 1:
            self._limit(node.input[0], int(self._numbers.get(node.input[1], 0)))
        if node.op_type in _COMPARISONS and len(node.input) == 2:
            self._meet(*node.input)
            self._meet(*reversed(node.input))
        self._hand_on(node)

    def _limit(self, indices: str, size: int) -> None:
        for name in self._origin.get(indices, ()):
            if size > 1:
                self.limits[name] = min(size, self.limits.get(name, size))

    def _meet(self, value: str, constant: str) -> None:
        if (number := self._numbers.get(constant)) is not None and number == int(number):
            for name in self._origin.get(value, ()):
                self.constants.setdefault(name, set()).add(int(number))

    def _hand_on(self, node: onnx.NodeProto) -> None:
        if node.op_type not in _HANDS_ON:
            return
        places = _HANDS_ON[node.op_type]
        sources = [name for place, name in enumerate(node.input) if places is None or place in places]
        origin = set().union(*(self._origin.get(name, set()) for name in sources))
        for output in node.output:
            if origin:
                self._origin[output] = origin
            if len(sources) == 1 and sources[0] in self._numbers:
                self._numbers[output] = self._numbers[sources[0]]
            if node.op_type in ("Identity", "Cast", "DequantizeLinear") and sources[0] in self._shapes:
                self._shapes[output] = self._shapes[sources[0]]
