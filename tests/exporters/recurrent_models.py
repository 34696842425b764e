"""Graphs of one recurrent operator, with every input, output and attribute that it can have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..helpers import make_model

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


@dataclass(frozen=True)
class Case:
    kind: str
    direction: str = "forward"
    width: int = 72
    hidden: int = 48
    lengths: bool = False
    initial: bool = True
    bias: bool = True
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: str = "all"  # or "last": without the outputs of the steps
    opset: int = 20
    table: int = 0  # rows of the table that the inputs are taken from; 0: they are given

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @property
    def states(self) -> tuple[str, ...]:
        return ("h", "c") if self.kind == "LSTM" else ("h",)

    def model(self, seed: int = 0) -> onnx.ModelProto:
        random = np.random.default_rng(seed)
        rows = GATES[self.kind] * self.hidden
        drawn = {"W": (rows, self.width), "R": (rows, self.hidden)} | ({"B": (2 * rows,)} if self.bias else {})
        weights = {
            name: (random.standard_normal((self.directions, *shape)) / 6).astype(np.float32) for name, shape in drawn.items()
        }
        inputs: dict[str, Any] = {"x": (TensorProto.FLOAT, ["time", "batch", self.width])}
        nodes = []
        if self.table:
            inputs = {"tokens": (TensorProto.INT64, ["batch", "time"])}
            weights["E"] = random.standard_normal((self.table, self.width)).astype(np.float32)
            nodes = [
                helper.make_node("Gather", ["E", "tokens"], ["rows"]),
                helper.make_node("Transpose", ["rows"], ["x"], perm=[1, 0, 2]),
            ]
        if self.lengths:
            inputs["lengths"] = (TensorProto.INT32, ["batch"])
        state = [self.directions, "batch", self.hidden]
        if self.initial:
            inputs |= {f"{name}0": (TensorProto.FLOAT, state) for name in self.states}
        given = ["x", "W", "R", "B" if self.bias else "", "lengths" if self.lengths else ""]
        given += [f"{name}0" if self.initial else "" for name in self.states]
        outputs: dict[str, Any] = {f"{name}n": (TensorProto.FLOAT, state) for name in self.states}
        if self.outputs == "all":
            outputs["y"] = (TensorProto.FLOAT, ["time", self.directions, "batch", self.hidden])
        named = ["y" if "y" in outputs else "", *(f"{name}n" for name in self.states)]
        node = helper.make_node(
            self.kind, given, named, name="layer", direction=self.direction, hidden_size=self.hidden, **self.attributes
        )
        model = make_model([*nodes, node], weights, inputs=inputs, outputs=outputs)
        model.opset_import[0].version = self.opset
        return model

    def feeds(self, batch: int, time: int, seed: int = 1) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        feeds: dict[str, Any] = {"x": random.standard_normal((time, batch, self.width)).astype(np.float32)}
        if self.table:
            feeds = {"tokens": random.integers(0, self.table, (batch, time))}
        if self.lengths:
            feeds["lengths"] = random.integers(1, time + 1, batch).astype(np.int32)
        if self.initial:
            shape = (self.directions, batch, self.hidden)
            feeds |= {f"{name}0": random.standard_normal(shape).astype(np.float32) for name in self.states}
        return feeds
