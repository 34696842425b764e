from __future__ import annotations

from typing import Any

import onnx

from exporters.rewrites.fuse_skip_layernorm import REWRITE

from .graphs import check_fused, check_left_alone, graph, node, normal, operators

SHAPE: list[Any] = ["batch", "time", 8]
FUSED = {"com.microsoft::SkipLayerNormalization": 1}
WEIGHTS = {"g": normal(8), "b": normal(8, seed=1), "bias": normal(8, seed=2)}


def residual(*, axis: int = -1, bias: bool = False, stream: bool = False, second: list[Any] = SHAPE) -> onnx.ModelProto:
    nodes = [
        *([node("Add", ["z", "bias"], "biased")] if bias else []),
        node("Add", ["x", "biased" if bias else "z"], "sum"),
        node("LayerNormalization", ["sum", "g", "b"], "y", axis=axis, epsilon=1e-4),
    ]
    outputs = {"y": SHAPE} | ({"sum": SHAPE} if stream else {})
    return graph(nodes, WEIGHTS, inputs={"x": SHAPE, "z": second}, outputs=outputs)


def test_the_sum_and_the_norm_become_one_node() -> None:
    fused = check_fused(REWRITE, residual(), 1)
    assert operators(fused) == FUSED
    assert len(fused.graph.node[0].output) == 1


def test_a_residual_stream_that_goes_on_is_the_fourth_output() -> None:
    fused = check_fused(REWRITE, residual(stream=True), 1)
    assert operators(fused) == FUSED
    assert list(fused.graph.node[0].output) == ["y", "", "", "sum"]


def test_the_bias_of_the_projection_before_goes_in_too() -> None:
    fused = check_fused(REWRITE, residual(bias=True, stream=True), 1)
    assert operators(fused) == FUSED
    assert fused.graph.node[0].input[4] == "bias"


def test_a_norm_over_more_axes_is_left_alone() -> None:
    model = residual(axis=-2)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(normal(1, 8), tensor.name))
    check_left_alone(REWRITE, model, "the normalization is not over the last axis alone")


def test_a_summand_that_is_broadcast_is_left_alone() -> None:
    check_left_alone(REWRITE, residual(second=[1, "time", 8]), "one summand is broadcast")


def test_a_summand_of_another_rank_is_left_alone() -> None:
    check_left_alone(REWRITE, residual(second=["time", 8]), "the summands are not both of rank 2 or 3")


def test_a_sum_with_a_constant_is_no_residual() -> None:
    nodes = [node("Add", ["x", "bias"], "sum"), node("LayerNormalization", ["sum", "g", "b"], "y", axis=-1)]
    check_left_alone(REWRITE, graph(nodes, WEIGHTS))
