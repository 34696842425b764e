"""Weights that no quantizer touches, and weights that are stored twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from ...helpers import gemm_model, make_model
from .support import FLOAT, bundle_of, findings, severities, weights


def product_model(operator: str, *, quantized: bool = True, width: int = 64, **attributes: Any) -> onnx.ModelProto:
    """A float product beside one on 8-bit weights (or none), both (batch, width) → (batch, width)."""
    second = [
        helper.make_node("DequantizeLinear", ["Q", "s", "z"], ["D"]),
        helper.make_node("MatMul", ["h", "D"], ["y"]),
    ]
    nodes = [
        helper.make_node(operator, ["x", "W"], ["h"], name="product", **attributes),
        *(second if quantized else [helper.make_node("Relu", ["h"], ["y"])]),
    ]
    constants: dict[str, Any] = {"W": weights(width, width)}
    if quantized:
        constants |= {"Q": np.ones((width, width), np.int8), "s": np.array(0.1, np.float32), "z": np.array(0, np.int8)}
    sides = (FLOAT, [width if attributes.get("transA") else "batch", width])
    return make_model(nodes, constants, inputs={"x": sides}, outputs={"y": sides})


@pytest.mark.parametrize(
    ("operator", "attributes", "severity", "reason"),
    [
        ("Gemm", {"alpha": 2.0}, "warning", "quantizers refuse its alpha"),
        ("Gemm", {"transA": 1}, "warning", "quantizers refuse its transA"),
        ("Gemm", {}, "info", "a float Gemm with 4,096 weights in a quantized model"),
        ("MatMul", {}, "info", "a float MatMul with 4,096 weights in a quantized model"),
    ],
)
def test_a_large_float_product_in_a_quantized_model(
    operator: str, attributes: dict[str, Any], severity: str, reason: str, tmp_path: Path
) -> None:
    (found,) = findings(product_model(operator, **attributes), tmp_path, "unquantized-gemm")
    assert (found.severity, found.node) == (severity, "product")
    assert reason in found.reason
    assert not findings(product_model(operator, quantized=False, **attributes), tmp_path, "unquantized-gemm")
    assert not findings(product_model(operator, width=8, **attributes), tmp_path, "unquantized-gemm")  # too small to matter


def test_a_gemm_beside_four_bit_products(tmp_path: Path) -> None:
    model = product_model("Gemm", quantized=False)
    packed = {"B": np.zeros((64, 2, 16), np.uint8), "scales": np.ones((64, 2), np.float32)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in packed.items())
    model.graph.node[1].CopyFrom(
        helper.make_node("MatMulNBits", ["h", "B", "scales"], ["y"], domain="com.microsoft", K=64, N=64, bits=4, block_size=32)
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    (found,) = findings(model, tmp_path, "unquantized-gemm")
    assert (found.severity, found.fix) == ("warning", "write it as x @ w + b, and quantize again")


def test_a_weight_that_is_computed_cannot_be_quantized(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["W"], ["Wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "Wt"], ["y"], name="layer"),
    ]
    model = make_model(nodes, {"W": weights(3, 4)})
    (found,) = findings(model, tmp_path, "unquantized-gemm")
    assert (found.severity, found.node, found.fix) == ("warning", "layer", "run: edgekit optimize, and quantize the result")
    assert not findings(gemm_model(), tmp_path, "unquantized-gemm")


def layer_model(seed: int, width: int = 20) -> onnx.ModelProto:
    node = helper.make_node("MatMul", ["x", "W"], ["y"])
    return make_model(
        [node],
        {"W": weights(width, width, seed=seed)},
        inputs={"x": (FLOAT, ["batch", width])},
        outputs={"y": (FLOAT, ["batch", width])},
    )


def test_weights_in_two_graphs_are_named_with_their_size(tmp_path: Path) -> None:
    (found,) = findings(
        bundle_of(tmp_path, {"encoder": layer_model(1), "decoder": layer_model(1)}), tmp_path, "duplicated-weights"
    )
    assert (found.severity, found.graph, found.node) == ("warning", "decoder", "W")
    assert found.reason == "1 weight (1,600 bytes) stored again, though graph 'encoder' has them"
    assert "one external data file" in found.fix


@pytest.mark.parametrize("why", ["different", "small", "shared"])
def test_weights_that_are_different_small_or_shared_are_not_duplicated(why: str, tmp_path: Path) -> None:
    width = 10 if why == "small" else 20
    graphs = {"encoder": layer_model(1, width), "decoder": layer_model(2 if why == "different" else 1, width)}
    assert not findings(bundle_of(tmp_path, graphs, shared=why == "shared"), tmp_path, "duplicated-weights")


def test_weights_stored_twice_in_one_graph(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "A"], ["h"]), helper.make_node("MatMul", ["h", "B"], ["y"])]
    sides = (FLOAT, ["batch", 20])
    model = make_model(nodes, {"A": weights(20, 20), "B": weights(20, 20)}, inputs={"x": sides}, outputs={"y": sides})
    found = findings(model, tmp_path, "duplicated-weights")
    assert severities(found) == ["warning"]
    assert found[0].fix == "run: edgekit optimize"
