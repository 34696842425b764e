"""Which node holds a size that should vary. Not a rule: the frozen-axes rule asks it.

The graph is run at a size that works and at one that does not, with every tensor in view. Where a Reshape or a Slice cannot
run at the second size, it is the holder. Where another node fails (an Add of two lengths), or where wrong shapes come out, the
holder is above: the first node whose result kept the old size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from numpy.typing import NDArray

from ..finding import Graph
from ..observe import Observation, Seen, observe
from ..wiring import label

# operator → the input that holds a shape, a length or indices
_HOLDERS = {
    "Reshape": 1,
    "Expand": 1,
    "ConstantOfShape": 0,
    "Tile": 1,
    "Range": 1,
    "Slice": 2,
    "Gather": 1,
    "Resize": 3,
    "Split": 1,
}


def find_culprit(
    graph: Graph, works: Mapping[str, NDArray[Any]], fails: Mapping[str, NDArray[Any]], size: int, outputs: tuple[str, ...]
) -> str:
    """The node that holds `size`, with what it holds, e.g. "flatten to [2, 4]"; "" if none can be told.

    `works` and `fails` are feeds at `size` and at another; `outputs` are those with a wrong shape, if it ran.
    """
    before, after = observe(graph.model, works), observe(graph.model, fails)
    if not before.tensors:
        return ""
    nodes = graph.model.graph.node
    if after.failed is not None:
        failed = nodes[after.failed]
        if failed.op_type in _HOLDERS and (held := _held(graph, failed, before)):
            return _named(failed, held)
        above = _above(graph, list(failed.input))
    else:
        failed, above = None, _above(graph, list(outputs))
    for node in nodes:
        if node.output and id(node) in above and node.op_type in _HOLDERS and _kept(node, size, before, after):
            return _named(node, _held(graph, node, before))
    return _fixed_input(graph, failed, size) if failed is not None else ""


def constants_held(graph: Graph) -> list[int]:
    """The sizes above 1 that Reshape and Expand nodes hold as constants: guesses at the size a graph was exported with."""
    found = {
        int(size)
        for node in graph.model.graph.node
        if node.op_type in ("Reshape", "Expand") and (value := graph.wiring.value(node.input[1])) is not None
        for size in value.reshape(-1)
    }
    return sorted(size for size in found if size > 1)


def _kept(node: onnx.NodeProto, size: int, before: Observation, after: Observation) -> bool:
    """Whether its result has the old size still, though what it reads has not, or it reads nothing that could move."""
    old, new = before.tensors.get(node.output[0]), after.tensors.get(node.output[0])
    if old is None or new is None or old.shape != new.shape or size not in old.shape:
        return False
    data = [
        (before.tensors[name], after.tensors[name]) for name in node.input if name in before.tensors and name in after.tensors
    ]
    moved = any(one.shape != other.shape for one, other in data)
    return moved or node.op_type in ("Expand", "ConstantOfShape", "Range", "Tile")


def _held(graph: Graph, node: onnx.NodeProto, before: Observation) -> list[int]:
    index = _HOLDERS[node.op_type]
    if index >= len(node.input):
        return []
    constant = graph.wiring.value(node.input[index])
    if constant is not None:
        return [int(item) for item in constant.reshape(-1)[:8]]
    seen: Seen | None = before.tensors.get(node.input[index])
    return list(seen.values[:8]) if seen is not None and seen.values is not None else []


def _named(node: onnx.NodeProto, held: list[int]) -> str:
    return f"{label(node)} to {held}" if held else label(node)


def _above(graph: Graph, names: list[str]) -> set[int]:
    """Identities of the nodes that `names` are computed from."""
    found: set[int] = set()
    while names:
        node = graph.wiring.maker(names.pop())
        if node is not None and id(node) not in found:
            found.add(id(node))
            names += list(node.input)
    return found


def _fixed_input(graph: Graph, node: onnx.NodeProto, size: int) -> str:
    """A constant of the old size that the failing node reads: a mask or a table of positions that was baked in."""
    for name in node.input:
        tensor = graph.wiring.constants.get(name)
        if tensor is not None and size in tensor.dims:
            return f"{label(node)} with the constant {name} of shape {list(tensor.dims)}"
    return ""
