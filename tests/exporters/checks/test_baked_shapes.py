"""The node that holds a size which should vary is named, not merely the node that stumbles over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from exporters.observe import observe

from ...helpers import make_model
from .support import FLOAT, bundle_of, findings

WIDE = (FLOAT, ["batch", "time", 4])


def scalar(value: float, kind: Any = np.int64) -> np.ndarray[Any, Any]:
    return np.array(value, kind)


def stumbling_model(holder: str) -> onnx.ModelProto:
    """y = x + positions, where `holder` makes positions of length 8 whatever the length of x; the Add is what fails."""
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, Any] = {}
    if holder == "Range":
        nodes = [
            helper.make_node("Range", ["zero", "eight", "one"], ["steps"], name="baked"),
            helper.make_node("Cast", ["steps"], ["floats"], to=FLOAT),
            helper.make_node("Unsqueeze", ["floats", "last"], ["positions"]),
        ]
        constants = {"zero": scalar(0), "eight": scalar(8), "one": scalar(1), "last": np.array([1])}
    elif holder == "Expand":
        nodes = [helper.make_node("Expand", ["row", "shape"], ["positions"], name="baked")]
        constants = {"row": np.ones((1, 4), np.float32), "shape": np.array([8, 4])}
    elif holder == "ConstantOfShape":
        nodes = [helper.make_node("ConstantOfShape", ["shape"], ["positions"], name="baked")]
        constants = {"shape": np.array([8, 4])}
    elif holder == "Slice":
        nodes = [helper.make_node("Slice", ["x", "from", "to", "axis"], ["positions"], name="baked")]
        constants = {"from": np.array([0]), "to": np.array([8]), "axis": np.array([1])}
    elif holder == "Gather":
        nodes = [helper.make_node("Gather", ["x", "steps"], ["positions"], axis=1, name="baked")]
        constants = {"steps": np.arange(8)}
    elif holder == "Tile":
        nodes = [helper.make_node("Tile", ["row", "times"], ["positions"], name="baked")]
        constants = {"row": np.ones((1, 4), np.float32), "times": np.array([8, 1])}
    elif holder == "Constant":
        constants = {"positions": np.ones((8, 4), np.float32)}
    nodes.append(helper.make_node("Add", ["x", "positions"], ["y"], name="stumbles"))
    return make_model(nodes, constants, inputs={"x": WIDE}, outputs={"y": WIDE})


@pytest.mark.parametrize(
    ("holder", "named"),
    [
        ("Range", "baked to [8]"),
        ("Expand", "baked to [8, 4]"),
        ("ConstantOfShape", "baked to [8, 4]"),
        ("Slice", "baked to [8]"),
        ("Gather", "baked to [0, 1, 2, 3, 4, 5, 6, 7]"),
        ("Tile", "baked to [8, 1]"),
        ("Constant", "stumbles with the constant positions of shape [8, 4]"),
    ],
)
def test_the_holder_of_a_baked_length_is_named(holder: str, named: str, tmp_path: Path) -> None:
    model = stumbling_model(holder)
    feeds = {"model": {"x": np.ones((2, 8, 4), np.float32)}}
    errors = findings(bundle_of(tmp_path, {"model": model}, feeds=feeds), tmp_path, "frozen-axes")
    assert [(item.severity, item.node) for item in errors] == [("error", named)]
    assert "axis 'time' is declared dynamic but fails at 9" in errors[0].reason


def test_a_size_that_is_partly_read_from_the_input_is_still_found(tmp_path: Path) -> None:
    """Reshape to (batch, 8, 4) with the batch read and the time baked: the shape is no constant."""
    nodes = [
        helper.make_node("Shape", ["x"], ["batch"], start=0, end=1),
        helper.make_node("Concat", ["batch", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["y"], name="split_heads"),
    ]
    model = make_model(nodes, {"rest": np.array([8, 4])}, inputs={"x": WIDE}, outputs={"y": WIDE})
    bundle = bundle_of(tmp_path, {"model": model}, feeds={"model": {"x": np.ones((2, 8, 4), np.float32)}})
    (found,) = findings(bundle, tmp_path, "frozen-axes")
    assert found.node == "split_heads to [2, 8, 4]"


def test_a_node_that_silently_keeps_the_old_length_is_named(tmp_path: Path) -> None:
    """It runs at every size from 8 on, and gives 8 steps."""
    nodes = [
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("Slice", ["h", "from", "to", "axis"], ["cut"], name="first_eight"),
        helper.make_node("Neg", ["cut"], ["y"]),
    ]
    constants = {"from": np.array([0]), "to": np.array([8]), "axis": np.array([1])}
    model = make_model(nodes, constants, inputs={"x": WIDE}, outputs={"y": WIDE})
    bundle = bundle_of(tmp_path, {"model": model}, feeds={"model": {"x": np.ones((2, 8, 4), np.float32)}})
    (found,) = findings(bundle, tmp_path, "frozen-axes")
    assert found.node == "first_eight to [8]"


def test_nodes_that_hold_other_sizes_or_feed_other_results_are_not_blamed(tmp_path: Path) -> None:
    """Before the Slice that is to blame stand one that takes the last step, and one of 8 columns for another output."""
    nodes = [
        helper.make_node("Gather", ["x", "last"], ["end"], axis=1, name="last_step"),
        helper.make_node("Expand", ["row", "columns"], ["table"], name="eight_columns"),
        helper.make_node("Slice", ["x", "from", "to", "axis"], ["cut"], name="first_eight"),
        helper.make_node("Unsqueeze", ["end", "axis"], ["wide_end"]),
        helper.make_node("Add", ["cut", "wide_end"], ["y"]),
    ]
    constants: dict[str, Any] = {"last": scalar(-1), "row": np.ones((1, 1), np.float32), "columns": np.array([3, 8])}
    constants |= {"from": np.array([0]), "to": np.array([8]), "axis": np.array([1])}
    model = make_model(nodes, constants, inputs={"x": WIDE}, outputs={"y": WIDE, "table": (FLOAT, [3, 8])})
    bundle = bundle_of(tmp_path, {"model": model}, feeds={"model": {"x": np.ones((2, 8, 4), np.float32)}})
    (found,) = findings(bundle, tmp_path, "frozen-axes")
    assert found.node == "first_eight to [8]"


def test_taking_the_last_step_is_not_a_baked_size(tmp_path: Path) -> None:
    node = helper.make_node("Gather", ["x", "last"], ["y"], axis=1)
    model = make_model([node], {"last": scalar(-1)}, inputs={"x": WIDE}, outputs={"y": (FLOAT, ["batch", 4])})
    assert not findings(model, tmp_path, "frozen-axes")


def test_a_baked_size_that_is_none_of_the_usual_is_found_in_the_graph_itself(tmp_path: Path) -> None:
    node = helper.make_node("Reshape", ["x", "shape"], ["y"], name="flatten")
    model = make_model([node], {"shape": np.array([5, 4])}, outputs={"y": (FLOAT, ["batch", 4])})
    (found,) = findings(model, tmp_path, "frozen-axes")
    assert found.node == "flatten to [5, 4]"
    assert "fails at 6" in found.reason


def test_observing_sees_every_tensor_and_the_node_that_fails() -> None:
    model = stumbling_model("Range")
    seen = observe(model, {"x": np.ones((2, 8, 4), np.float32)})
    assert seen.failed is None
    assert seen.tensors["steps"].values == tuple(range(8))
    assert (seen.tensors["y"].shape, seen.tensors["y"].dtype) == ((2, 8, 4), "float32")
    broken = observe(model, {"x": np.ones((2, 9, 4), np.float32)})
    assert broken.failed == 3
    assert broken.tensors["positions"].shape == (8, 1)
    assert "y" not in broken.tensors
    unloadable = make_model([helper.make_node("NoSuchThing", ["x"], ["y"])])
    assert not observe(unloadable, {"x": np.ones((1, 4), np.float32)}).tensors
    assert model.graph.node[0].name == "baked"  # the model is left as it was


class _Positions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: int(x.shape[1])]


class _Recurrence(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.RNN(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x, torch.zeros(1, int(x.shape[0]), 4))[0]


@pytest.mark.parametrize(
    ("module", "axis", "named"),
    [(_Positions, "time", "of shape [8, 4]"), (_Recurrence, "batch", "to [1, 2, 4]")],
)
@pytest.mark.filterwarnings("ignore")
def test_sizes_that_tracing_baked_in_are_found(module: type[torch.nn.Module], axis: str, named: str, tmp_path: Path) -> None:
    """int(x.shape[…]) while tracing is how most of them come about."""
    axes, names = {"x": {0: "batch", 1: "time"}}, {"input_names": ["x"], "output_names": ["y"]}
    path = tmp_path / "m.onnx"
    torch.onnx.export(
        module().eval(), (torch.randn(2, 8, 4),), str(path), dynamo=False, opset_version=17, dynamic_axes=axes, **names
    )
    found = {item.reason.split("'")[1]: item.node for item in findings(path, tmp_path, "frozen-axes")}
    assert found[axis].endswith(named)
