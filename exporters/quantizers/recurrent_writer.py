"""What takes the place of an RNN, a GRU or an LSTM, in either of the ways of recurrent.py."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from ..wiring import Wiring, attribute
from .blocks import Array, Blocks, zeros_of
from .recurrent import INT8, Layer, arithmetic_of
from .rounding import WeightSettings, rounded
from .rows import Made
from .steps import Lookup, Nodes, Product, Steps


class TakeRows(Protocol):
    """The node that takes rows of a table."""

    def __call__(self, table: str, blocks: Blocks, indices: str, output: str, name: str) -> onnx.NodeProto: ...


class RecurrentWriter:
    def __init__(
        self, wiring: Wiring, opset: int, bits: int, settings: WeightSettings, product: Product, take_rows: TakeRows
    ) -> None:
        self._wiring, self._opset, self._bits, self._settings = wiring, opset, bits, settings
        self._product, self._take_rows = product, take_rows

    def written(self, node: onnx.NodeProto) -> Made:
        shapes = {name: tuple(tensor.dims) for name, tensor in self._wiring.constants.items()}
        if arithmetic_of(node, shapes, self._settings.recurrence)[0] != INT8:
            return self._stored(node)
        inputs, states = (self._array(name) for name in node.input[1:3])
        bias = self._array(node.input[3]) if len(node.input) > 3 and node.input[3] else None
        layer = Layer.of(node, inputs, states, bias)
        wanted = {name for name in node.output if name in self._wiring.outputs or self._wiring.readers.get(name)}
        steps = Steps(node, layer, self._opset, self._product, self._lookup(node, layer), wanted)
        return steps.nodes(), steps.weights

    def _array(self, name: str) -> Array:
        array = self._wiring.value(name)
        assert array is not None
        return array

    def _stored(self, node: onnx.NodeProto) -> Made:
        """The operator, and its weights behind nodes that depend on constants alone; onnxruntime does not compute its own
        operators for blocks when it loads a graph, so that these are standard ones."""
        weights: dict[str, NDArray[Any]] = {}
        made = []
        for place in (1, 2):
            weight, label = node.input[place], f"{node.input[place]}.{node.name}"
            array = self._array(weight)
            blocks = rounded(array.reshape(-1, array.shape[-1]), self._bits, self._settings)
            stored = {"blocks": blocks.numbers, "scales": blocks.scales[..., None], "zeros": zeros_of(blocks)[..., None]}
            weights |= {f"{weight}.stored.{kind}": value for kind, value in stored.items()}
            nodes = Nodes(label, self._opset, weights)
            numbers, zeros = f"{weight}.stored.blocks", f"{weight}.stored.zeros"
            if blocks.bits == 4:
                numbers = _unpacked(nodes, numbers, blocks)
            shifted = nodes("Sub", *(nodes("Cast", name, to=TensorProto.FLOAT) for name in (numbers, zeros)))
            scaled = nodes("Mul", shifted, f"{weight}.stored.scales")
            whole = nodes("Reshape", scaled, nodes.constant(*array.shape[:2], -1))
            if array.shape[-1] % blocks.size:
                ends = [nodes.constant(value) for value in (0, array.shape[-1], 2)]
                whole = nodes("Slice", whole, *ends)
            node.input[place] = whole
            made += nodes.nodes
        return [*made, node], weights

    def _lookup(self, node: onnx.NodeProto, layer: Layer) -> Lookup | None:
        """If the inputs are rows of a small table: what the gates are for each of its rows."""
        turned = self._wiring.maker(node.input[0])
        if turned is None or turned.op_type != "Transpose" or list(attribute(turned, "perm", [])) != [1, 0, 2]:
            return None
        source = self._wiring.maker(turned.input[0])
        table = None if source is None or source.op_type != "Gather" else self._wiring.value(source.input[0])
        if source is None or table is None or table.ndim != 2 or attribute(source, "axis", 0) != 0:
            return None
        if len(table) > table.shape[1] or layer.bias.size % 16:  # larger than the product's own weights
            return None
        tokens = source.input[1]

        def lookup(rows: Array, gates: str) -> list[onnx.NodeProto]:
            blocks = rounded(table @ rows.T + layer.bias.reshape(-1), 8, self._settings)
            by_step = f"{gates}.{tokens}"
            turn = onnx.helper.make_node("Transpose", [tokens], [by_step], name=by_step, perm=[1, 0])
            return [turn, self._take_rows(f"{gates}.table", blocks, by_step, gates, gates)]

        return lookup


def _unpacked(nodes: Nodes, numbers: str, blocks: Blocks) -> str:
    """Two 4-bit numbers of each byte, the lower half first."""
    nodes.weights |= {f"{nodes.prefix}.{value}": np.array(value, np.uint8) for value in (4, 16)}
    low = nodes("Mod", numbers, f"{nodes.prefix}.16")
    high = nodes("BitShift", numbers, f"{nodes.prefix}.4", direction="RIGHT")
    pairs = nodes("Concat", *(nodes.axis("Unsqueeze", half, 3) for half in (low, high)), axis=3)
    return nodes("Reshape", pairs, nodes.constant(*blocks.scales.shape, -1))
