from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from exporters.rewrites.fold_batchnorm import REWRITE

from .graphs import check_fused, check_left_alone, graph, node, normal, operators

IMAGE: list[Any] = ["batch", 4, 6, 6]


def norm(channels: int) -> dict[str, Any]:
    return {
        "scale": normal(channels, seed=1),
        "shift": normal(channels, seed=2),
        "mean": normal(channels, seed=3),
        "variance": np.abs(normal(channels, seed=4)) + 0.1,
    }


def followed(linear: onnx.NodeProto, weights: dict[str, Any], channels: int, x: list[Any], y: list[Any]) -> onnx.ModelProto:
    after = node("BatchNormalization", ["h", "scale", "shift", "mean", "variance"], "y", epsilon=1e-3)
    return graph([linear, after], weights | norm(channels), inputs={"x": x}, outputs={"y": y})


def conv(**more: Any) -> onnx.ModelProto:
    weights = {"w": normal(6, 2, 3, 3), "b": normal(6, seed=9)}
    return followed(node("Conv", ["x", "w", "b"], "h", group=2, **more), weights, 6, IMAGE, ["batch", 6, 4, 4])


@pytest.mark.parametrize("bias", [True, False])
def test_into_a_convolution_with_groups(bias: bool) -> None:
    model = conv()
    if not bias:
        del model.graph.node[0].input[2]
    assert operators(check_fused(REWRITE, model, 1)) == {"Conv": 1}


@pytest.mark.parametrize("group", [1, 2])
def test_into_a_transposed_convolution(group: int) -> None:
    weights = {"w": normal(4, 6 // group, 3, 3)}
    model = followed(node("ConvTranspose", ["x", "w"], "h", group=group), weights, 6, IMAGE, ["batch", 6, 8, 8])
    assert operators(check_fused(REWRITE, model, 1)) == {"ConvTranspose": 1}


@pytest.mark.parametrize("transposed", [0, 1])
def test_into_a_gemm_with_its_factors(transposed: int) -> None:
    weights = {"w": normal(6, 4) if transposed else normal(4, 6), "b": normal(6)}
    gemm = node("Gemm", ["x", "w", "b"], "h", transB=transposed, alpha=0.5, beta=2.0)
    model = followed(gemm, weights, 6, ["batch", 4], ["batch", 6])
    assert operators(check_fused(REWRITE, model, 1)) == {"Gemm": 1}


def test_into_a_matmul_which_gets_a_bias() -> None:
    model = followed(node("MatMul", ["x", "w"], "h"), {"w": normal(4, 6)}, 6, ["batch", 4], ["batch", 6])
    assert operators(check_fused(REWRITE, model, 1)) == {"MatMul": 1, "Add": 1}


def test_a_convolution_whose_output_is_used_elsewhere_is_left_alone() -> None:
    model = conv()
    model.graph.output.append(onnx.helper.make_tensor_value_info("h", 1, ["batch", 6, 4, 4]))
    check_left_alone(REWRITE, model, "what the Conv gives is used elsewhere too")


def test_a_weight_that_is_shared_is_left_alone() -> None:
    model = conv()
    model.graph.node.append(node("Identity", ["w"], "again"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("again", 1, [6, 2, 3, 3]))
    check_left_alone(REWRITE, model, "the weight is shared with another node and would be stored twice")


def test_channels_that_are_not_the_columns_of_a_matmul_are_left_alone() -> None:
    shape: list[Any] = ["batch", 6, 6]
    model = followed(node("MatMul", ["x", "w"], "h"), {"w": normal(6, 6)}, 6, shape, shape)
    check_left_alone(REWRITE, model, "the channels of the normalization are not the columns of the MatMul")


def test_training_mode_is_left_alone() -> None:
    model = conv()
    model.graph.node[1].attribute.append(onnx.helper.make_attribute("training_mode", 1))
    model.graph.node[1].output.extend(["running_mean", "running_variance"])
    check_left_alone(REWRITE, model, "the normalization is in training mode")
