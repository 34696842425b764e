"""Several schemes in one graph, and graphs as others write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from architectures.settings import apply_settings
from exporters.adopt import adopt
from exporters.quantized_graphs import Part, convert_parts
from exporters.quantizers import SCHEMES

from ..helpers import make_model, save
from .recurrent_models import Case
from .test_search import WIDTH, bundle_of, samples, three_products


def test_parts_take_each_node_once(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path)
    parts = (Part("int8-weights", nodes=frozenset(["product.a"])), Part("int8-dynamic"))
    nodes = {node.node: node.scheme for node in convert_parts(bundle, parts).nodes}
    assert nodes["product.a"] == "int8-weights"
    assert nodes["product.c"] == "int8-dynamic"


@pytest.mark.parametrize("other", ["int8-weights", "int4-weights", "bf16"])
def test_a_gemm_that_onnxruntimes_quantizer_splits_is_still_found_by_the_next_scheme(tmp_path: Path, other: str) -> None:
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((WIDTH, WIDTH)).astype(np.float32) for name in "ab"}
    weights["bias"] = np.ones(WIDTH, np.float32)
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "a"], ["h"], name="product"),
        onnx.helper.make_node("Gemm", ["h", "b", "bias"], ["y"], name="gemm"),
    ]
    shape = (TensorProto.FLOAT, ["batch", WIDTH])
    model = make_model(nodes, weights, inputs={"x": shape}, outputs={"y": shape})
    bundle = adopt(save(model, tmp_path / "net.onnx"), tmp_path / "net.bundle").bundle
    converted = convert_parts(bundle, (Part(other, nodes=frozenset(["gemm"])), Part("int8-dynamic")))
    assert {node.node: node.scheme for node in converted.nodes} == {"product": "int8-dynamic", "gemm": other}
    (made,) = converted.models.values()
    floats = [tensor for tensor in made.graph.initializer if tensor.data_type == TensorProto.FLOAT]
    assert sum(int(np.prod(tensor.dims)) for tensor in floats) < WIDTH * WIDTH, "no matrix is left in float32"


def test_a_bias_that_became_part_of_its_product_is_not_looked_for_by_the_next_scheme(tmp_path: Path) -> None:
    weights = {"a": np.ones((WIDTH, WIDTH), np.float32), "bias": np.ones(WIDTH, np.float32)}
    weights["b"] = np.full((WIDTH, WIDTH), 2, np.float32)
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "a"], ["h"], name="product"),
        onnx.helper.make_node("Add", ["h", "bias"], ["i"], name="sum"),
        onnx.helper.make_node("MatMul", ["i", "b"], ["y"], name="last"),
    ]
    shape = (TensorProto.FLOAT, ["batch", WIDTH])
    model = make_model(nodes, weights, inputs={"x": shape}, outputs={"y": shape})
    bundle = adopt(save(model, tmp_path / "net.onnx"), tmp_path / "net.bundle").bundle
    stored = Part("bf16", nodes=frozenset(["sum", "last"]))
    converted = convert_parts(bundle, (Part("int4-weights", nodes=frozenset(["product"])), stored))
    found = {node.node: (node.scheme, node.reason) for node in converted.nodes}
    assert found["product"][0] == "int4-weights"
    assert found["last"][0] == "bf16"
    assert found["sum"] == (None, "part of the product before it")


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_a_table_that_became_part_of_a_recurrent_layer_is_not_looked_for_by_the_next_scheme(kind: str, tmp_path: Path) -> None:
    case = Case(
        kind, width=72, hidden=64, table=30, initial=False, attributes={"linear_before_reset": 1} if kind == "GRU" else {}
    )
    bundle = adopt(save(case.model(), tmp_path / "net.onnx"), tmp_path / "net.bundle").bundle
    settings = apply_settings(SCHEMES["int8-weights"].settings, {"recurrence": "int8"})
    stored = Part("fp16", apply_settings(SCHEMES["fp16"].settings, {"arithmetic": "float32"}))
    converted = convert_parts(bundle, (Part("int8-weights", settings, nodes=frozenset(["layer"])), stored))
    found = {node.node: (node.scheme, node.reason) for node in converted.nodes}
    assert found["layer"][0] == "int8-weights"
    assert found["Gather_0"] == (None, "part of the layer that reads it")


# Graphs as others write them.


@pytest.mark.parametrize(
    "scheme", ["int8-static", "int8-dynamic", "int8-weights", "int4-weights", "fp16", "fp16 stored", "bf16"]
)
def test_weights_that_are_inputs_too_as_in_old_files_are_quantized(scheme: str, tmp_path: Path) -> None:
    model = three_products(outlier=False)
    model.ir_version = 3
    model.opset_import[0].version = 13
    shape = (TensorProto.FLOAT, [WIDTH, WIDTH])
    model.graph.input.extend(onnx.helper.make_tensor_value_info(name, *shape) for name in "abc")
    bundle = adopt(save(model, tmp_path / "net.onnx"), tmp_path / "net.bundle").bundle
    name, _, arithmetic = scheme.partition(" ")
    settings = apply_settings(SCHEMES[name].settings, {"arithmetic": "float32"}) if arithmetic else None
    (small,) = convert_parts(bundle, (Part(name, settings),), lambda graph: iter([samples()])).models.values()
    assert [value.name for value in small.graph.input] == ["x"]
    assert small.ByteSize() < 0.6 * model.ByteSize()
    expected, found = (ort.InferenceSession(item.SerializeToString()).run(None, samples())[0] for item in (model, small))
    assert np.linalg.norm(found - expected) < 0.2 * np.linalg.norm(expected)


@pytest.mark.parametrize("reduce_range", ["always", "auto", "never"])
def test_a_product_with_its_weights_on_the_left_is_left_alone_by_int8_static(reduce_range: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for name in ("left", "right")}
    nodes = [
        onnx.helper.make_node("MatMul", ["left", "x"], ["h"], name="mixed"),
        onnx.helper.make_node("MatMul", ["h", "right"], ["y"], name="product"),
    ]
    shape = (TensorProto.FLOAT, ["batch", WIDTH, WIDTH])
    model = make_model(nodes, weights, inputs={"x": shape}, outputs={"y": shape})
    bundle = adopt(save(model, tmp_path / "net.onnx"), tmp_path / "net.bundle").bundle
    feeds = {"x": random.standard_normal((2, WIDTH, WIDTH)).astype(np.float32)}
    settings = apply_settings(SCHEMES["int8-static"].settings, {"reduce_range": reduce_range})
    converted = convert_parts(bundle, (Part("int8-static", settings),), lambda graph: iter([feeds]))
    found = {node.node: node for node in converted.nodes}
    assert found["product"].quantized
    assert found["mixed"].reason == "only products by a constant matrix on the right have a quantized form"
