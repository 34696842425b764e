from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from exporters.rewrites.fuse_layernorm import REWRITE

from .graphs import check_fused, check_left_alone, graph, node, normal, operators

WEIGHTS: dict[str, Any] = {"two": 2.0, "eps": 1e-3, "g": normal(8), "b": normal(8, seed=1), "axes": np.array([-1])}


def written_out(
    *, square: str = "pow", divide: str = "div", scale: bool = True, bias: bool = True, opset: int = 20, **changed: Any
) -> onnx.ModelProto:
    old = opset < 18  # axes were an attribute then
    mean = {"keepdims": 1} | ({"axes": [-1]} if old else {})
    more = [] if old else ["axes"]
    nodes = [
        node("ReduceMean", ["x", *more], "mean", **mean),
        node("Sub", ["x", "mean"], "d"),
        node("Pow", ["d", "two"], "dd") if square == "pow" else node("Mul", ["d", "d"], "dd"),
        node("ReduceMean", ["dd", *more], "variance", **mean),
        node("Add", ["variance", "eps"], "ve"),
        node("Sqrt", ["ve"], "deviation"),
    ]
    if divide == "div":
        nodes.append(node("Div", ["d", "deviation"], "n"))
    else:
        nodes += [node("Reciprocal", ["deviation"], "r"), node("Mul", ["d", "r"], "n")]
    last = "n"
    if scale:
        nodes.append(node("Mul", [last, "g"], "scaled"))
        last = "scaled"
    if bias:
        nodes.append(node("Add", [last, "b"], "shifted"))
        last = "shifted"
    nodes[-1].output[0] = "y"
    return graph(nodes, WEIGHTS | changed, opset=opset)


@pytest.mark.parametrize("square", ["pow", "product"])
@pytest.mark.parametrize("divide", ["div", "reciprocal"])
def test_it_becomes_one_node_however_it_is_written(square: str, divide: str) -> None:
    fused = check_fused(REWRITE, written_out(square=square, divide=divide), 1)
    assert operators(fused) == {"LayerNormalization": 1}
    assert next(item.f for item in fused.graph.node[0].attribute if item.name == "epsilon") == pytest.approx(1e-3)


@pytest.mark.parametrize(("scale", "bias"), [(True, False), (False, False)])
def test_scale_and_bias_may_be_missing(scale: bool, bias: bool) -> None:
    assert operators(check_fused(REWRITE, written_out(scale=scale, bias=bias), 1)) == {"LayerNormalization": 1}


def test_axes_as_an_attribute_are_read_too() -> None:
    assert operators(check_fused(REWRITE, written_out(opset=17), 1)) == {"LayerNormalization": 1}


def test_before_opset_17_there_is_no_such_operator() -> None:
    reason = "LayerNormalization came with opset 17, and this graph has opset 16"
    check_left_alone(REWRITE, written_out(opset=16), reason)


def test_a_mean_over_another_axis_is_another_norm() -> None:
    check_left_alone(REWRITE, written_out(axes=np.array([1])), "the mean is not over the last axis alone")


def test_a_mean_over_two_axes_is_another_norm() -> None:
    check_left_alone(REWRITE, written_out(axes=np.array([1, 2])), "the mean is not over the last axis alone")


def test_another_power_is_no_variance() -> None:
    check_left_alone(REWRITE, written_out(two=4.0))


def test_a_scale_of_one_element_is_refused() -> None:
    check_left_alone(REWRITE, written_out(g=normal(1)), "the scale or the bias is not as long as the last axis")
