from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from exporters.rewrites.gemm_to_matmul import REWRITE

from .graphs import check_fused, check_left_alone, graph, node, normal, operators


def flattened(*, bias: bool = True, **gemm: Any) -> onnx.ModelProto:
    """(batch, time, 8) → rows → Gemm → (batch, time, 5)."""
    transposed = gemm.get("transB", 0)
    nodes = [
        node("Reshape", ["x", "rows"], "flat"),
        node("Gemm", ["flat", "w", *(["b"] if bias else [])], "product", **gemm),
        node("Concat", ["first", "second", "last"], "shape", axis=0),
        node("Reshape", ["product", "shape"], "y"),
    ]
    weights = {
        "w": normal(5, 8) if transposed else normal(8, 5),
        "b": normal(5),
        "rows": np.array([-1, 8]),
        "last": np.array([5]),
    }
    shape = [node("Shape", ["x"], "first", start=0, end=1), node("Shape", ["x"], "second", start=1, end=2)]
    return graph([*shape, *nodes], weights, outputs={"y": ["batch", "time", 5]})


@pytest.mark.parametrize("transposed", [0, 1])
def test_the_reshapes_go(transposed: int) -> None:
    assert operators(check_fused(REWRITE, flattened(transB=transposed), 1)) == {"MatMul": 1, "Add": 1}


def test_without_a_bias_it_is_one_product() -> None:
    assert operators(check_fused(REWRITE, flattened(bias=False), 1)) == {"MatMul": 1}


@pytest.mark.parametrize("attribute", [{"alpha": 0.5}, {"beta": 2.0}])
def test_a_gemm_that_scales_is_left_alone(attribute: dict[str, float]) -> None:
    check_left_alone(REWRITE, flattened(**attribute), "the Gemm scales or transposes its input")


def test_rows_that_are_used_elsewhere_are_left_alone() -> None:
    model = flattened()
    model.graph.output.append(onnx.helper.make_tensor_value_info("product", 1, ["rows", 5]))
    check_left_alone(REWRITE, model, "the rows are used elsewhere too")


def test_a_reshape_that_mixes_the_last_axis_is_left_alone() -> None:
    nodes = [
        node("Reshape", ["x", "rows"], "flat"),
        node("Gemm", ["flat", "w", "b"], "product"),
        node("Reshape", ["product", "shape"], "y"),
    ]
    weights = {"w": normal(4, 4), "b": normal(4), "rows": np.array([-1, 4]), "shape": np.array([-1, 2, 8])}
    model = graph(nodes, weights, inputs={"x": ["batch", 2, 8]}, outputs={"y": ["batch", 2, 8]})
    check_left_alone(REWRITE, model, "the last axis is not the one that is multiplied, or its size is not known")
