"""int8-weights and int4-weights: the packing, and the graphs they make. Their bundles: test_weight_bundles.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from exporters.graph import operators_of
from exporters.quantizers import SCHEMES
from exporters.quantizers.blocks import block_size, pack, unpack
from exporters.quantizers.scheme import Request, decide, quantizable
from exporters.quantizers.weights import tied_tables
from runtime.errors import QuantizationRefused

from ..helpers import make_model

SCHEME_NAMES = ("int8-weights", "int4-weights")


def random_weights(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).standard_normal(shape) / 8).astype(np.float32)


# The packing.


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("width", "size"), [(64, 32), (96, 32), (50, 16), (128, 128)])
def test_packed_weights_are_within_half_a_step_of_what_they_were(bits: int, width: int, size: int) -> None:
    rows = random_weights(7, width)
    rows[2] = 0
    rows[3] = np.abs(rows[3]) + 1  # zero is outside the range of its weights, and must have a number all the same
    blocks = pack(rows, bits, size)
    steps = np.repeat(blocks.scales, size, axis=1)[:, :width]
    assert (np.abs(unpack(blocks, width) - rows) <= 0.501 * steps).all()
    assert not unpack(blocks, width)[2].any()
    assert blocks.numbers.nbytes == 7 * -(-width // size) * size * bits // 8


@pytest.mark.parametrize("bits", [4, 8])
def test_the_packing_is_onnxruntimes_own(bits: int) -> None:
    from onnxruntime.capi import _pybind_state as native

    matrix = random_weights(64, 8)
    blocks = pack(matrix.T, bits, 16)
    numbers, scales, zeros = np.zeros(blocks.numbers.shape, np.uint8), np.zeros(8 * 4, np.float32), np.zeros_like(blocks.zeros)
    native_pack = getattr(native, f"quantize_matmul_{bits}bits")
    native_pack(numbers, matrix, scales, zeros, 16, 8, 64, False)
    np.testing.assert_array_equal(blocks.numbers, numbers)
    np.testing.assert_array_equal(blocks.scales.ravel(), scales)
    np.testing.assert_array_equal(blocks.zeros, zeros)


def test_blocks_divide_the_width_where_any_does() -> None:
    assert [block_size(width) for width in (768, 192, 96, 48, 50)] == [128, 64, 32, 16, 16]


# The graphs.


def applied(model: onnx.ModelProto, scheme: str, *, many_rows: bool = False) -> onnx.ModelProto:
    chosen = SCHEMES[scheme]
    prepared = chosen.prepare(quantizable(model))
    nodes = tuple(item.node for item in decide(chosen, prepared, (), ()) if item.quantized)
    tied = tied_tables([prepared])
    return chosen.apply(Request(prepared, nodes, (), False, None, many_rows=many_rows, tied=tied))


def answers(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return list(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds))


def relative_error(actual: Any, reference: Any) -> float:
    return float(np.linalg.norm(actual - reference) / np.linalg.norm(reference))


def product(node: onnx.NodeProto, **weights: Any) -> onnx.ModelProto:
    shapes = {"x": (TensorProto.FLOAT, ["batch", "time", 96])}
    if node.op_type == "Gemm":
        shapes = {"x": (TensorProto.FLOAT, ["batch", 96])}
    output = [*shapes["x"][1][:-1], 64]
    return make_model([node], weights, inputs=shapes, outputs={"y": (TensorProto.FLOAT, output)})


GEMMS = {
    "plain": ({}, (96, 64)),
    "transposed": ({"transB": 1}, (64, 96)),
    "scaled": ({"transB": 1, "alpha": 0.5}, (64, 96)),
}


@pytest.mark.parametrize("form", ["int8-weights", "int4-weights", "many"])
@pytest.mark.parametrize("kind", ["MatMul", *GEMMS])
def test_products_become_quantized_ones_and_stay_near(kind: str, form: str) -> None:
    scheme, error = ("int8-weights", 0.03) if form == "many" else (form, 0.02 if form == "int8-weights" else 0.15)
    if kind == "MatMul":
        model = product(helper.make_node("MatMul", ["x", "W"], ["y"]), W=random_weights(96, 64))
    else:
        attributes, shape = GEMMS[kind]
        gemm = helper.make_node("Gemm", ["x", "W", "b"], ["y"], **attributes)
        model = product(gemm, W=random_weights(*shape), b=random_weights(64, seed=1))
    quantized = applied(model, scheme, many_rows=form == "many")
    added = {"Add": 1} if kind != "MatMul" and form == "many" else {}  # otherwise the bias is part of the product
    chain = ("Abs", "ReduceMax", "Max", "Div", "QuantizeLinear", "com.microsoft::MatMulIntegerToFloat")
    expected = {**dict.fromkeys(chain, 1), "Mul": 1} if form == "many" else {"com.microsoft::MatMulNBits": 1}
    assert operators_of(quantized) == Counter({**expected, **added})
    rows = np.random.default_rng(2).standard_normal((6, 96)).astype(np.float32)
    feeds = {"x": rows.reshape(2, 3, 96) if kind == "MatMul" else rows}
    assert relative_error(answers(quantized, feeds)[0], answers(model, feeds)[0]) < error
    assert quantized.ByteSize() < 0.45 * model.ByteSize()


@pytest.mark.parametrize("opset", [17, 20])
def test_a_rows_answer_does_not_depend_on_its_neighbours(opset: int) -> None:
    node = helper.make_node("MatMul", ["x", "W"], ["y"])
    model = product(node, W=random_weights(96, 64))
    model.opset_import[0].version = opset
    quantized = applied(model, "int8-weights", many_rows=True)
    x = np.random.default_rng(3).standard_normal((1, 5, 96)).astype(np.float32)
    x *= np.array([0, 1e-3, 1, 1, 1000], np.float32)[:, None]
    together = answers(quantized, {"x": x})[0]
    alone = np.concatenate([answers(quantized, {"x": x[:, row : row + 1]})[0] for row in range(5)], axis=1)
    np.testing.assert_array_equal(together, alone)
    assert not together[0, 0].any()
    assert relative_error(together[0, 1], answers(model, {"x": x})[0][0, 1]) < 0.03  # a small row beside a large one


def test_no_kernel_can_saturate_on_weights_for_many_rows() -> None:
    """Two products of uint8 and int8 are added in 16 bits on some CPUs."""
    quantized = applied(
        product(helper.make_node("MatMul", ["x", "W"], ["y"]), W=random_weights(96, 64)), "int8-weights", many_rows=True
    )
    weights = next(numpy_helper.to_array(item) for item in quantized.graph.initializer if item.data_type == TensorProto.INT8)
    assert 2 * 255 * int(np.abs(weights.astype(int)).max()) <= np.iinfo(np.int16).max
    assert np.abs(weights).max() == 63


def test_products_of_the_same_rows_quantize_them_once() -> None:
    nodes = [helper.make_node("MatMul", ["x", name], [f"y{name}"]) for name in "ABC"]
    nodes.append(helper.make_node("Sum", ["yA", "yB", "yC"], ["y"]))
    shapes = {"x": (TensorProto.FLOAT, ["batch", 64])}, {"y": (TensorProto.FLOAT, ["batch", 64])}
    weights = {name: random_weights(64, 64, seed=seed) for seed, name in enumerate("ABC")}
    model = make_model(nodes, weights, inputs=shapes[0], outputs=shapes[1])
    counts = operators_of(applied(model, "int8-weights", many_rows=True))
    assert (counts["QuantizeLinear"], counts["com.microsoft::MatMulIntegerToFloat"]) == (1, 3)


def tied_model() -> onnx.ModelProto:
    """An embedding whose transpose is the output layer; the middle's weight is in a Constant node."""
    middle = helper.make_node("Constant", [], ["M"], value=numpy_helper.from_array(random_weights(64, 64, seed=1)))
    nodes = [
        middle,
        helper.make_node("Gather", ["E", "tokens"], ["x"]),
        helper.make_node("MatMul", ["x", "M"], ["h"]),
        helper.make_node("Transpose", ["E"], ["T"], perm=[1, 0]),
        helper.make_node("MatMul", ["h", "T"], ["y"]),
    ]
    shapes = {"tokens": (TensorProto.INT64, ["batch", "time"])}, {"y": (TensorProto.FLOAT, ["batch", "time", 100])}
    return make_model(nodes, {"E": random_weights(100, 64)}, inputs=shapes[0], outputs=shapes[1])


@pytest.mark.parametrize(("scheme", "error"), [("int8-weights", 0.03), ("int4-weights", 0.25)])
def test_an_output_layer_tied_to_its_embedding_uses_the_same_bytes(scheme: str, error: float) -> None:
    model = tied_model()
    quantized = applied(model, scheme)
    assert operators_of(quantized) == Counter({"com.microsoft::GatherBlockQuantized": 1, "com.microsoft::MatMulNBits": 2})
    blocks = [item for item in quantized.graph.initializer if item.name.endswith(".blocks")]
    table, layer = (next(item for item in blocks if item.name == name) for name in ("E.table.blocks", "E.transposed.blocks"))
    assert table.raw_data == layer.raw_data
    assert len(blocks) == 3
    feeds = {"tokens": np.arange(100).reshape(4, 25)}
    assert relative_error(answers(quantized, feeds)[0], answers(model, feeds)[0]) < error


def test_an_embedding_that_is_not_tied_keeps_eight_bits() -> None:
    model = tied_model()
    model.graph.initializer.append(numpy_helper.from_array(random_weights(100, 64, seed=5), "other"))
    model.graph.node[1].input[0] = "other"
    quantized = applied(model, "int4-weights")
    bits = {node.op_type: helper.get_node_attr_value(node, "bits") for node in quantized.graph.node}
    assert bits == {"GatherBlockQuantized": 8, "MatMulNBits": 4}


@pytest.mark.parametrize(
    ("node", "shape", "reason"),
    [
        (helper.make_node("MatMul", ["W", "x"], ["y"]), (64, 96), "by a constant matrix on the right"),
        (helper.make_node("MatMul", ["x", "W"], ["y"]), (2, 96, 64), "by a constant matrix on the right"),
        (helper.make_node("MatMul", ["x", "W"], ["y"]), (96, 4), "384 weights are too few"),
        (helper.make_node("Gemm", ["x", "W"], ["y"], transA=1), (96, 64), "transposes its input or scales its bias"),
        (helper.make_node("Gather", ["W", "x"], ["y"], axis=1), (96, 64), "whose rows are taken whole"),
        (helper.make_node("Gather", ["W", "x"], ["y"]), (60, 64), "3840 weights are too few to save anything"),
        (helper.make_node("Gather", ["W", "x"], ["y"]), (96, 65), "rows of 65 cannot be divided into blocks of 16"),
        (helper.make_node("Conv", ["x", "W"], ["y"]), (8, 8, 5, 5), "no node has float32 weights it can quantize"),
    ],
)
def test_nothing_to_quantize_is_refused_with_the_reason(node: onnx.NodeProto, shape: tuple[int, ...], reason: str) -> None:
    model = quantizable(make_model([copy_of_node(node)], {"W": random_weights(*shape)}))
    for scheme in SCHEME_NAMES:
        with pytest.raises(QuantizationRefused, match=f"{scheme} has nothing to quantize here: .*{reason}"):
            decide(SCHEMES[scheme], model, (), ())


def copy_of_node(node: onnx.NodeProto) -> onnx.NodeProto:
    copied = onnx.NodeProto()
    copied.CopyFrom(node)
    return copied
