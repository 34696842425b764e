"""Casts, Transposes and quantize pairs that do nothing are found; those that do something are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from ...helpers import gemm_model, make_model
from .support import DOUBLE, FLOAT, HALF, INT32, INT64, findings, severities


def cast_model(*kinds: int, source: int = FLOAT) -> onnx.ModelProto:
    names = ["x", *(f"t{index}" for index in range(len(kinds) - 1)), "y"]
    nodes = [
        helper.make_node("Cast", [names[index]], [names[index + 1]], to=kind, name=f"cast{index}")
        for index, kind in enumerate(kinds)
    ]
    return make_model(nodes, inputs={"x": (source, ["batch", 4])}, outputs={"y": (kinds[-1], ["batch", 4])})


def test_a_cast_to_the_same_type_is_found(tmp_path: Path) -> None:
    (found,) = findings(cast_model(FLOAT), tmp_path, "stray-casts")
    assert (found.severity, found.node) == ("warning", "cast0")
    assert found.reason == "a Cast from float to the same type"
    assert not findings(cast_model(HALF), tmp_path, "stray-casts")


@pytest.mark.parametrize(
    ("kinds", "source", "is_stray"),
    [
        ((DOUBLE, FLOAT), FLOAT, True),
        ((HALF, FLOAT), FLOAT, False),  # rounds on the way
        ((INT64, INT32), INT32, True),
        ((INT32, INT64), INT64, False),  # cuts large values
        ((FLOAT, INT32), INT32, False),  # 24 bits of mantissa do not hold 32
        ((DOUBLE, INT32), INT32, True),
        ((DOUBLE, HALF), FLOAT, False),  # ends in another type
    ],
)
def test_a_pair_of_casts_is_stray_only_if_every_value_survives(
    kinds: tuple[int, ...], source: int, is_stray: bool, tmp_path: Path
) -> None:
    found = findings(cast_model(*kinds, source=source), tmp_path, "stray-casts")
    assert [finding.node for finding in found] == (["cast0"] if is_stray else [])


def transpose_model(*orders: list[int]) -> onnx.ModelProto:
    names = ["x", *(f"t{index}" for index in range(len(orders) - 1)), "y"]
    nodes = [
        helper.make_node("Transpose", [names[index]], [names[index + 1]], perm=order, name=f"turn{index}")
        for index, order in enumerate(orders)
    ]
    return make_model(nodes, inputs={"x": (FLOAT, [2, 3, 4])}, outputs={"y": (FLOAT, None)})


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ([[0, 1, 2]], [("warning", "turn0")]),  # moves nothing
        ([[1, 2, 0], [2, 0, 1]], [("warning", "turn1")]),  # undone
        ([[1, 2, 0], [1, 2, 0]], [("info", "turn1")]),  # could be one
        ([[0, 2, 1]], []),
    ],
)
def test_transposes_that_move_nothing_or_are_undone(
    orders: list[list[int]], expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    found = findings(transpose_model(*orders), tmp_path, "stray-transposes")
    assert [(finding.severity, finding.node) for finding in found] == expected


def qdq_model(operator: str, second_scale: float = 0.1) -> onnx.ModelProto:
    """quantize, dequantize, `operator`; with operator "" instead: dequantize and quantize again."""
    scales = {"s": np.array(0.1, np.float32), "s2": np.array(second_scale, np.float32), "z": np.array(0, np.int8)}
    if operator:
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantize"),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="dequantize"),
            helper.make_node(operator, ["d"], ["y"]),
        ]
    else:
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
            helper.make_node("QuantizeLinear", ["d", "s2", "z"], ["q2"], name="again"),
            helper.make_node("DequantizeLinear", ["q2", "s2", "z"], ["d2"]),
            helper.make_node("Softmax", ["d2"], ["y"]),
        ]
    return make_model(nodes, scales, outputs={"y": (FLOAT, ["batch", 4])})


def test_values_quantized_for_an_operator_that_computes_in_float(tmp_path: Path) -> None:
    (found,) = findings(qdq_model("Exp"), tmp_path, "stray-qdq")
    assert (found.severity, found.node) == ("warning", "quantize")
    assert "for Exp, which computes in float" in found.reason
    assert not findings(qdq_model("Softmax"), tmp_path, "stray-qdq")  # has an 8-bit kernel
    assert not findings(gemm_model(), tmp_path, "stray-qdq")


@pytest.mark.parametrize(("scale", "reason"), [(0.1, "with the same scale"), (0.3, "lose precision twice")])
def test_values_that_are_quantized_twice(scale: float, reason: str, tmp_path: Path) -> None:
    found = findings(qdq_model("", scale), tmp_path, "stray-qdq")
    assert severities(found) == ["warning"]
    assert found[0].node == "again"
    assert reason in found[0].reason
