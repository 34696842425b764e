"""A recurrent operator taken apart: what its inputs give to all steps at once, and a Scan over the steps.

    gates_t = W x_t + b           one product for all steps and both directions, or a table of them if x_t is a row of a table
    step: (gates_t, state) → state       the equations of architectures/layers/recurrent.py, with U h as a product

Directions lie side by side as rows, (d·batch, …): this is how the operators' own outputs (time, d, batch, hidden) lie in
memory, and the step's small operations are done once for both. The backward direction reads its gates from the end.
A row that has ended, as `sequence_lens` says, keeps its state, and gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from .blocks import Array
from .recurrent import Layer

_AXES_ARE_INPUTS = 13  # opset
_SPLIT_COUNTS = 18
_TO_THE_START = np.iinfo(np.int64).min


class Product(Protocol):
    """Nodes that compute `x` (…, inputs) times `rows` (outputs, inputs) transposed, plus `bias`."""

    def __call__(
        self, x: str, weight: str, rows: Array, output: str, bias: Array | None, *, of_state: bool
    ) -> list[onnx.NodeProto]: ...


Lookup = Callable[[Array, str], list[onnx.NodeProto]]  # nodes that give the rows of a table to all steps, under a name


class Nodes:
    """Nodes in the making, with names of their own. nodes("Add", a, b) adds one and gives the name of what it computes."""

    def __init__(self, prefix: str, opset: int, weights: dict[str, NDArray[Any]]) -> None:
        self.prefix, self.opset, self.weights = prefix, opset, weights
        self.nodes: list[onnx.NodeProto] = []

    def __call__(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        return self.several(operator, inputs, [output or self.name(operator)], **attributes)[0]

    def several(self, operator: str, inputs: tuple[str, ...], outputs: list[str], **attributes: Any) -> list[str]:
        self.nodes.append(helper.make_node(operator, inputs, outputs, name=self.name(operator), **attributes))
        return outputs

    def name(self, operator: str) -> str:
        return f"{self.prefix}.{operator}.{len(self.nodes)}"

    def constant(self, *values: int) -> str:
        name = f"{self.prefix}.constant.{'.'.join(map(str, values))}"
        self.weights[name] = np.array(values)
        return name

    def split(self, x: str, *sizes: int) -> list[str]:
        """Along the last axis."""
        outputs = [f"{self.name('Split')}.{number}" for number in range(len(sizes))]
        if self.opset < _AXES_ARE_INPUTS:
            return self.several("Split", (x,), outputs, axis=-1, split=list(sizes))
        return self.several("Split", (x, self.constant(*sizes)), outputs, axis=-1)

    def halves(self, x: str, axis: int) -> list[str]:
        outputs = [f"{self.name('Split')}.{number}" for number in range(2)]
        return self.several("Split", (x,), outputs, axis=axis, **({"num_outputs": 2} if self.opset >= _SPLIT_COUNTS else {}))

    def axis(self, operator: str, x: str, axis: int, output: str = "") -> str:
        """Squeeze or Unsqueeze."""
        if self.opset < _AXES_ARE_INPUTS:
            return self(operator, x, axes=[axis], output=output)
        return self(operator, x, self.constant(axis), output=output)


class Steps:
    """The nodes that take the place of one recurrent node, and the small constants they read."""

    def __init__(
        self, node: onnx.NodeProto, layer: Layer, opset: int, product: Product, lookup: Lookup | None, wanted: set[str]
    ) -> None:
        self._layer, self._product, self._lookup = layer, product, lookup
        given = [*node.input, *[""] * (7 - len(node.input))]
        self._x, self._names, self._lengths, self._initial = given[0], given[1:3], given[4], given[5:7]
        self._states = 2 if layer.kind == "LSTM" else 1
        outputs = [name if name in wanted else "" for name in node.output]
        self._y, self._finals = outputs[0], outputs[1:]
        self.weights: dict[str, NDArray[Any]] = {}
        self._main = Nodes(node.name, opset, self.weights)
        self._inner = Nodes(f"{node.name}.step", opset, self.weights)
        self._before = f"{node.name}.gates"  # (time, batch, d·gates·hidden), of both directions in the order of the steps

    @property
    def _directions(self) -> int:
        return len(self._layer.backwards)

    def nodes(self) -> list[onnx.NodeProto]:
        main, hidden = self._main, self._layer.hidden
        scanned = self._gates()
        states = [self._initial_state(name) for name in self._initial[: self._states]]
        if self._layer.kind == "GRU":
            scanned = main.split(scanned[0], 2 * hidden, hidden)
        if self._lengths:
            scanned = [*scanned, self._is_running()]
        body = self._step(len(scanned))
        finals = [f"{main.prefix}.final.{number}" for number in range(self._states)]
        outputs = [*finals, *([f"{main.prefix}.outputs"] if self._y else [])]
        main.several("Scan", (*states, *scanned), outputs, body=body, num_scan_inputs=len(scanned))
        for final, name in zip(finals, self._finals, strict=False):
            if name:
                self._side_by_side(final, name)
        if self._y:
            self._all_outputs(outputs[-1])
        return main.nodes

    def _gates(self) -> list[str]:
        """(time, d·batch, gates·hidden)"""
        main, layer = self._main, self._layer
        rows = layer.inputs.reshape(-1, layer.inputs.shape[-1])
        gates = self._before
        if self._lookup is not None:
            main.nodes += self._lookup(rows, gates)
        else:
            main.nodes += self._product(self._x, self._names[0], rows, gates, layer.bias.reshape(-1), of_state=False)
        if self._directions == 1:
            return [self._turned(gates) if layer.backwards[0] else gates]
        forward, backward = main.halves(gates, -1)
        return [main("Concat", forward, self._turned(backward), axis=1)]

    def _turned(self, x: str) -> str:
        """(time, batch, …) from the last step of each row to its first; what lies behind the last stays there."""
        if self._lengths:
            lengths = self._main("Cast", self._lengths, to=TensorProto.INT64)
            return self._main("ReverseSequence", x, lengths, time_axis=0, batch_axis=1)
        constant = self._main.constant
        return self._main("Slice", x, constant(-1), constant(_TO_THE_START), constant(0), constant(-1))

    def _is_running(self) -> str:
        """(time, d·batch, 1), true until the end of each row"""
        main = self._main
        count = main("Gather", main("Shape", self._before), main.constant(0))
        zero, one = (self._scalar(value) for value in (0, 1))
        steps = main("Cast", main("Range", zero, main.axis("Squeeze", count, 0), one), to=TensorProto.INT32)
        lengths = self._lengths if self._directions == 1 else main("Concat", self._lengths, self._lengths, axis=0)
        return main.axis("Unsqueeze", main("Less", main.axis("Unsqueeze", steps, 1), lengths), 2)

    def _scalar(self, value: int) -> str:
        name = f"{self._main.prefix}.{value}"
        self.weights[name] = np.array(value)
        return name

    def _initial_state(self, given: str) -> str:
        """(d, batch, hidden) as (d·batch, hidden); zeros if none is given"""
        main, hidden = self._main, self._layer.hidden
        if given and self._directions == 1:
            return main.axis("Squeeze", given, 0)
        if given:
            return main("Reshape", given, main.constant(-1, hidden))
        rows = main("Gather", main("Shape", self._before), main.constant(1))
        if self._directions > 1:
            rows = main("Add", rows, rows)
        return main("ConstantOfShape", main("Concat", rows, main.constant(hidden), axis=0))

    def _side_by_side(self, x: str, output: str) -> None:
        """(d·batch, hidden) as (d, batch, hidden)"""
        if self._directions == 1:
            self._main.axis("Unsqueeze", x, 0, output)
        else:
            self._main("Reshape", x, self._main.constant(2, -1, self._layer.hidden), output=output)

    def _all_outputs(self, y: str) -> None:
        """(time, d·batch, hidden) as (time, d, batch, hidden)"""
        main = self._main
        if self._directions == 1:
            main.axis("Unsqueeze", self._turned(y) if self._layer.backwards[0] else y, 1, self._y)
            return
        forward, backward = main.halves(y, 1)
        parts = [main.axis("Unsqueeze", part, 1) for part in (forward, self._turned(backward))]
        main("Concat", *parts, axis=1, output=self._y)

    def _step(self, scanned: int) -> onnx.GraphProto:
        inner, hidden = self._inner, self._layer.hidden
        before = [f"{inner.prefix}.before.{number}" for number in range(self._states)]
        given = [f"{inner.prefix}.given.{number}" for number in range(scanned)]
        gates = given[:-1] if self._lengths else given
        after = {"RNN": self._rnn, "GRU": self._gru, "LSTM": self._lstm}[self._layer.kind](gates, before)
        output = after[0]
        if self._lengths:
            output = inner("Where", given[-1], output, self._nothing()) if self._y else ""
            after = [inner("Where", given[-1], new, old) for new, old in zip(after, before, strict=True)]
        elif self._y:
            output = inner("Identity", output)
        widths = {"RNN": [hidden], "GRU": [2 * hidden, hidden], "LSTM": [4 * hidden]}[self._layer.kind]
        inputs = [_rows(name, hidden) for name in before] + [_rows(*item) for item in zip(gates, widths, strict=True)]
        if self._lengths:
            inputs.append(helper.make_tensor_value_info(given[-1], TensorProto.BOOL, [None, 1]))
        outputs = [_rows(name, hidden) for name in (*after, *([output] if self._y else []))]
        return helper.make_graph(inner.nodes, inner.prefix, inputs, outputs)

    def _nothing(self) -> str:
        name = f"{self._inner.prefix}.zero"
        self.weights[name] = np.array(0, np.float32)
        return name

    def _multiplied(self, h: str, part: slice, label: str = "") -> str:
        """U h + b of each direction by its own weights, (d·batch, outputs)"""
        inner, layer = self._inner, self._layer
        products = []
        for direction, x in enumerate([h] if self._directions == 1 else inner.halves(h, 0)):
            output = f"{inner.prefix}.product{label}.{direction}"
            bias = None if layer.state_bias is None else layer.state_bias[direction, part]
            weight = f"{self._names[1]}{label}.{direction}"
            inner.nodes += self._product(x, weight, layer.states[direction, part], output, bias, of_state=True)
            products.append(output)
        return products[0] if len(products) == 1 else inner("Concat", *products, axis=0)

    def _rnn(self, gates: list[str], before: list[str]) -> list[str]:
        inner = self._inner
        return [inner(self._layer.activation, inner("Add", gates[0], self._multiplied(before[0], slice(None))))]

    def _gru(self, gates: list[str], before: list[str]) -> list[str]:
        inner, hidden = self._inner, self._layer.hidden
        (h,), (early, late) = before, gates
        if self._layer.resets_product:
            product, reset = inner.split(self._multiplied(h, slice(None)), 2 * hidden, hidden)
        else:
            product, reset = self._multiplied(h, slice(2 * hidden), ".zr"), ""
        z, r = inner.split(inner("Sigmoid", inner("Add", early, product)), hidden, hidden)
        if reset:
            candidate = inner("Mul", r, reset)
        else:
            candidate = self._multiplied(inner("Mul", r, h), slice(2 * hidden, None), ".n")
        n = inner("Tanh", inner("Add", late, candidate))
        return [inner("Add", n, inner("Mul", z, inner("Sub", h, n)))]

    def _lstm(self, gates: list[str], before: list[str]) -> list[str]:
        inner, hidden = self._inner, self._layer.hidden
        h, c = before
        summed = inner("Add", gates[0], self._multiplied(h, slice(None)))
        open_gates, candidate = inner.split(summed, 3 * hidden, hidden)
        i, o, f = inner.split(inner("Sigmoid", open_gates), hidden, hidden, hidden)
        c = inner("Add", inner("Mul", f, c), inner("Mul", i, inner("Tanh", candidate)))
        return [inner("Mul", o, inner("Tanh", c)), c]


def _rows(name: str, width: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, width])
