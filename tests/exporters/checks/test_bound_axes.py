"""Axes that move, but not freely, are not frozen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from exporters.check import check

from ...helpers import make_model


def findings(tmp_path: Path, nodes: list, inputs: dict, weights: dict) -> list[tuple[str, str]]:  # type: ignore[type-arg]
    model = make_model(nodes, weights, inputs=inputs, outputs={"y": (TensorProto.FLOAT, [None, None])})
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return [(item.severity, item.reason) for item in check(path).findings if item.rule == "frozen-axes"]


def test_two_axes_that_move_together_are_a_remark(tmp_path: Path) -> None:
    inputs = {"a": (TensorProto.FLOAT, ["rows", 4]), "b": (TensorProto.FLOAT, ["others", 4])}
    nodes = [helper.make_node("Concat", ["a", "b"], ["y"], axis=1)]
    assert findings(tmp_path, nodes, inputs, {}) == [
        ("info", "axis 'rows' moves only together with 'others'"),
        ("info", "axis 'others' moves only together with 'rows'"),
    ]


def test_an_axis_that_moves_in_steps_is_a_remark(tmp_path: Path) -> None:
    inputs = {"a": (TensorProto.FLOAT, [2, "pairs"])}
    nodes = [helper.make_node("Reshape", ["a", "shape"], ["y"])]
    (found,) = findings(tmp_path, nodes, inputs, {"shape": np.array([-1, 8])})
    assert found[0] == "info"
    assert "moves only in steps of" in found[1]


def test_an_axis_that_cannot_move_at_all_stays_an_error(tmp_path: Path) -> None:
    inputs = {"a": (TensorProto.FLOAT, ["rows", 4])}
    nodes = [helper.make_node("Reshape", ["a", "shape"], ["y"])]
    (found,) = findings(tmp_path, nodes, inputs, {"shape": np.array([2, 4])})
    assert found[0] == "error"
