from __future__ import annotations

import math
from typing import Any

import onnx
import pytest

from exporters.rewrites.fuse_gelu import REWRITE

from .graphs import check_fused, check_left_alone, graph, node, operators

CONSTANTS = {"half": 0.5, "one": 1.0, "root": math.sqrt(2), "inverse": math.sqrt(0.5)}
TANH = {"half": 0.5, "one": 1.0, "three": 3.0, "two": 2.0, "c": 0.044715, "s": math.sqrt(2 / math.pi)}


def erf(order: str, *, opset: int = 20, **changed: float) -> onnx.ModelProto:
    """x · ½ · (1 + erf(x / √2)) with its factors in one of three orders."""
    nodes = [
        node("Mul", ["x", "inverse"], "scaled") if order == "last" else node("Div", ["x", "root"], "scaled"),
        node("Erf", ["scaled"], "erf"),
        node("Add", ["one", "erf"] if order == "last" else ["erf", "one"], "plus"),
    ]
    nodes += {
        "first": [node("Mul", ["x", "half"], "h"), node("Mul", ["h", "plus"], "y")],
        "middle": [node("Mul", ["x", "plus"], "h"), node("Mul", ["h", "half"], "y")],
        "last": [node("Mul", ["half", "plus"], "h"), node("Mul", ["x", "h"], "y")],
    }[order]
    return graph(nodes, CONSTANTS | changed, opset=opset)


def tanh(form: str, **changed: Any) -> onnx.ModelProto:
    cubes = {
        "pow": [node("Pow", ["x", "three"], "p"), node("Mul", ["p", "c"], "cp"), node("Add", ["x", "cp"], "sum")],
        "products": [
            node("Mul", ["x", "x"], "xx"),
            node("Mul", ["xx", "x"], "xxx"),
            node("Mul", ["c", "xxx"], "cp"),
            node("Add", ["cp", "x"], "sum"),
        ],
        "factored": [
            node("Mul", ["x", "x"], "xx"),
            node("Mul", ["c", "xx"], "cp"),
            node("Add", ["one", "cp"], "inside"),
            node("Mul", ["x", "inside"], "sum"),
        ],
    }[form]
    nodes = [
        *cubes,
        node("Mul", ["sum", "s"], "arg"),
        node("Tanh", ["arg"], "t"),
        node("Add", ["t", "one"], "plus"),
        node("Mul", ["x", "half"], "h"),
        node("Mul", ["h", "plus"], "y"),
    ]
    return graph(nodes, TANH | changed)


@pytest.mark.parametrize("order", ["first", "middle", "last"])
def test_the_exact_form_becomes_gelu_in_any_order_of_its_factors(order: str) -> None:
    assert operators(check_fused(REWRITE, erf(order), 1)) == {"Gelu": 1}


@pytest.mark.parametrize("form", ["pow", "products", "factored"])
def test_the_tanh_form_becomes_the_approximation(form: str) -> None:
    fused = check_fused(REWRITE, tanh(form), 1)
    assert operators(fused) == {"Gelu": 1}
    assert fused.graph.node[0].attribute[0].s == b"tanh"


def test_before_opset_20_it_is_an_operator_of_onnxruntime() -> None:
    assert operators(check_fused(REWRITE, erf("first", opset=17), 1)) == {"com.microsoft::Gelu": 1}


def test_before_opset_20_a_portable_graph_is_left_alone_and_the_reason_given() -> None:
    reason = "Gelu is a standard operator from opset 20 on, and this graph has opset 17"
    check_left_alone(REWRITE, erf("first", opset=17), reason, portable=True)


@pytest.mark.parametrize("changed", [{"half": 0.6}, {"one": 1.1}, {"root": 1.5}])
def test_another_constant_is_another_function(changed: dict[str, float]) -> None:
    check_left_alone(REWRITE, erf("first", **changed))


@pytest.mark.parametrize("changed", [{"c": 0.04}, {"s": 0.7}, {"three": 2.0}, {"half": 1.0}])
def test_another_constant_in_the_tanh_form_is_another_function(changed: dict[str, float]) -> None:
    check_left_alone(REWRITE, tanh("pow", **changed))


def test_a_part_that_is_used_elsewhere_stays() -> None:
    model = erf("first")
    model.graph.output.append(onnx.helper.make_tensor_value_info("erf", 1, ["batch", "time", 8]))
    fused = check_fused(REWRITE, model, 1)
    assert operators(fused) == {"Div": 1, "Erf": 1, "Gelu": 1}
