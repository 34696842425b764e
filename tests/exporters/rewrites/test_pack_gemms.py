from __future__ import annotations

from typing import Any

import onnx
import pytest

from exporters.rewrites.pack_gemms import REWRITE

from .graphs import check_fused, check_left_alone, graph, node, normal, operators


def two_gemms(*, bias: bool = True, turned: int = 1, **of_second: Any) -> onnx.ModelProto:
    nodes = [
        node("Gemm", ["x", "v"], "a", transB=turned),
        node("Gemm", ["x", "w", *(["b"] if bias else [])], "c", **{"transB": 1, **of_second}),
    ]
    weights = {"v": normal(3, 8) if turned else normal(8, 3), "w": normal(5, 8), "b": normal(5)}
    return graph(nodes, weights, inputs={"x": ["batch", 8]}, outputs={"a": ["batch", 3], "c": ["batch", 5]})


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_gemms_of_one_input_become_one(bias: bool, turned: int) -> None:
    assert operators(check_fused(REWRITE, two_gemms(bias=bias, turned=turned), 1)) == {"Gemm": 1, "Split": 1}


@pytest.mark.parametrize("attribute", [{"alpha": 0.5}, {"beta": 2.0}])
def test_a_gemm_that_scales_is_left_alone(attribute: dict[str, float]) -> None:
    check_left_alone(REWRITE, two_gemms(**attribute), "a Gemm scales or transposes its input")


def test_a_weight_of_two_gemms_is_left_alone() -> None:
    model = two_gemms(bias=False)
    model.graph.node[1].input[1] = "v"
    model.graph.output[1].type.tensor_type.shape.dim[1].dim_value = 3
    check_left_alone(REWRITE, model, "a weight is shared with another node and would be stored twice")


def test_before_opset_13_they_are_left_alone() -> None:
    model = two_gemms()
    model.opset_import[0].version = 12
    check_left_alone(REWRITE, model, "Split takes its sizes as an input from opset 13 on, and this graph has opset 12")
