"""Who makes a tensor and who reads it: what a rule needs to follow a pattern through a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from .graph import graphs_of
from .tensors import array_of, is_elsewhere


@dataclass(frozen=True)
class Wiring:
    """Nodes of all graphs of a model together: ONNX forbids an inner graph to reuse a name of an outer one."""

    nodes: tuple[onnx.NodeProto, ...]
    makers: dict[str, onnx.NodeProto]
    readers: dict[str, list[onnx.NodeProto]]
    constants: dict[str, onnx.TensorProto]  # initializers, and values of Constant nodes
    derived: frozenset[str]  # tensors computed from constants alone
    inputs: frozenset[str]
    outputs: frozenset[str]  # of the main graph and of inner graphs

    @classmethod
    def of(cls, model: onnx.ModelProto) -> Wiring:
        graphs = list(graphs_of(model))
        nodes = tuple(node for graph in graphs for node in graph.node)
        readers: dict[str, list[onnx.NodeProto]] = {}
        for node in nodes:
            for name in dict.fromkeys(node.input):
                readers.setdefault(name, []).append(node)
        constants = {tensor.name: tensor for graph in graphs for tensor in graph.initializer}
        constants |= {
            node.output[0]: attribute.t
            for node in nodes
            if node.op_type == "Constant"
            for attribute in node.attribute
            if attribute.name == "value"
        }
        return cls(
            nodes,
            {name: node for node in nodes for name in node.output if name},
            readers,
            constants,
            frozenset(_derived(nodes, constants)),
            frozenset(value.name for value in model.graph.input) - set(constants),
            frozenset(value.name for graph in graphs for value in graph.output),
        )

    def maker(self, name: str) -> onnx.NodeProto | None:
        return self.makers.get(name)

    def read_by(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The nodes that read any output of `node`."""
        return [reader for name in node.output for reader in self.readers.get(name, ())]

    def value(self, name: str) -> NDArray[Any] | None:
        """The value of a constant, or None. Weights that were not loaded have none."""
        tensor = self.constants.get(name)
        return None if tensor is None or is_elsewhere(tensor) else array_of(tensor)

    def is_fixed(self, name: str) -> bool:
        """Whether it does not depend on an input."""
        return name in self.constants or name in self.derived

    def is_scalar(self, name: str, value: float, tolerance: float = 1e-3) -> bool:
        """Whether it is a constant of one element near `value`."""
        tensor = self.constants.get(name)
        array = self.value(name) if tensor is not None and prod(tensor.dims) == 1 else None
        return array is not None and abs(float(array.reshape(-1)[0]) - value) <= tolerance * abs(value)

    def upstream(self, name: str, through: Iterable[str], steps: int = 8) -> Iterator[onnx.NodeProto]:
        """The nodes above `name` that are reached through operators of `through` alone; each once, nearest first."""
        allowed, seen, level = set(through), set(), [name]
        for _ in range(steps):
            above = []
            for item in level:
                node = self.makers.get(item)
                if node is None or id(node) in seen:
                    continue
                seen.add(id(node))
                yield node
                if node.op_type in allowed:
                    above += list(node.input)
            level = above

    def downstream(self, node: onnx.NodeProto, through: Iterable[str], steps: int = 8) -> Iterator[onnx.NodeProto]:
        """The nodes below `node` that are reached through operators of `through` alone; each once, nearest first."""
        allowed, seen, level = set(through), set(), [node]
        for _ in range(steps):
            below = []
            for item in level:
                for reader in self.read_by(item):
                    if id(reader) not in seen:
                        seen.add(id(reader))
                        yield reader
                        if reader.op_type in allowed:
                            below.append(reader)
            level = below


def label(node: onnx.NodeProto) -> str:
    return node.name or node.op_type


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    return next((onnx.helper.get_attribute_value(item) for item in node.attribute if item.name == name), default)


def operator(node: onnx.NodeProto) -> str:
    """Its name, with the domain if that is not the standard one."""
    return f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def same_value(wiring: Wiring, one: str, other: str) -> bool:
    """Whether two tensors are the same tensor, or constants of equal value."""
    if one == other:
        return True
    first, second = wiring.value(one), wiring.value(other)
    return first is not None and second is not None and first.dtype == second.dtype and bool(np.array_equal(first, second))


_RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}


def _derived(nodes: Iterable[onnx.NodeProto], constants: dict[str, onnx.TensorProto]) -> set[str]:
    fixed: set[str] = set(constants)
    for node in nodes:
        named = [name for name in node.input if name]
        if node.op_type == "Constant" or (named and node.op_type not in _RANDOM and all(name in fixed for name in named)):
            fixed.update(node.output)
    return fixed - set(constants)
