"""int8-static on some nodes of a convolutional network: what lies between quantized convolutions stays in int8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from exporters.adopt import adopt
from exporters.quantized_graphs import Part, convert_parts
from exporters.wiring import Wiring
from runtime.bundle import Bundle
from runtime.session import Session

from ..helpers import make_model, save

CHANNELS = 8
IMAGE = (TensorProto.FLOAT, ["batch", CHANNELS, 8, 8])


def two_blocks(folder: Path) -> Bundle:
    """Twice a convolution, pooling and a norm. Both convolutions have the same bias."""
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((CHANNELS, CHANNELS, 3, 3)).astype(np.float32) / 8 for name in ("v", "w")}
    weights["bias"] = np.zeros(CHANNELS, np.float32)
    norm = {name: np.full(CHANNELS, value, np.float32) for name, value in (("scale", 0.5), ("shift", 0.1), ("one", 1.0))}
    nodes = []
    for block, read, kernel, made in (("first", "x", "v", "h"), ("second", "h", "w", "y")):
        given = [f"{block}.pooled", "scale", "shift", "bias", "one"]
        nodes += [
            helper.make_node("Conv", [read, kernel, "bias"], [f"{block}.made"], name=block, pads=[1] * 4),
            helper.make_node(
                "MaxPool", [f"{block}.made"], [f"{block}.pooled"], name=f"{block} pool", kernel_shape=[3, 3], pads=[1] * 4
            ),
            helper.make_node("BatchNormalization", given, [made], name=f"{block} norm"),
        ]
    model = make_model(nodes, weights | norm, inputs={"x": IMAGE}, outputs={"y": IMAGE})
    return adopt(save(model, folder / "net.onnx"), folder / "net.bundle").bundle


def samples() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((4, CHANNELS, 8, 8)).astype(np.float32)


def converted(bundle: Bundle, nodes: frozenset[str] | None) -> onnx.ModelProto:
    return convert_parts(bundle, (Part("int8-static", nodes=nodes),), lambda graph: iter([{"x": samples()}])).models["model"]


def in_int8(model: onnx.ModelProto) -> set[str]:
    """The pooling and norms that read what was stored in int8."""
    wiring = Wiring.of(model)
    makers = {
        node.name: wiring.maker(node.input[0]) for node in model.graph.node if node.op_type in ("MaxPool", "BatchNormalization")
    }
    return {name for name, above in makers.items() if above is not None and above.op_type == "DequantizeLinear"}


def of(*blocks: str) -> set[str]:
    return {f"{block}{part}" for block in blocks for part in (" pool", " norm")}


@pytest.mark.parametrize("blocks", [("first", "second"), ("first",), ("second",)])
def test_what_follows_a_quantized_convolution_is_in_int8_and_what_follows_another_is_not(
    blocks: tuple[str, ...], tmp_path: Path
) -> None:
    assert in_int8(converted(two_blocks(tmp_path), frozenset(blocks))) == of(*blocks)


def test_all_nodes_by_name_are_the_whole_scheme(tmp_path: Path) -> None:
    bundle = two_blocks(tmp_path)
    whole, by_name = (converted(bundle, nodes) for nodes in (None, frozenset(["first", "second"])))
    assert by_name.SerializeToString() == whole.SerializeToString()


def test_convolutions_that_share_a_bias_are_quantized_near_the_original(tmp_path: Path) -> None:
    bundle = two_blocks(tmp_path)
    signature = bundle.graph()[1].signature
    model = converted(bundle, None).SerializeToString()
    expected, answer = (
        Session(graph, signature, device="cpu").run({"x": samples()})["y"] for graph in (bundle.graph_path(), model)
    )
    assert np.abs(answer - expected).max() < 0.05 * np.abs(expected).max()


def stem(folder: Path, *, colours: int, outputs: int, groups: int, side: int) -> Bundle:
    """A convolution of an image, a residual block, and both side by side."""
    random = np.random.default_rng(0)
    shapes = {"v": (outputs, colours // groups, side, side), "w": (outputs, outputs, 3, 3)}
    weights = {name: random.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], name="stem", pads=[side // 2] * 4, group=groups),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Conv", ["b", "w"], ["c"], name="inner", pads=[1] * 4),
        helper.make_node("Add", ["b", "c"], ["y"], name="sum"),
        helper.make_node("Concat", ["a", "c"], ["z"], name="side by side", axis=1),
    ]
    sizes = (("x", colours), ("y", outputs), ("z", 2 * outputs))
    images = {name: (TensorProto.FLOAT, ["batch", channels, 8, 8]) for name, channels in sizes}
    model = make_model(nodes, weights, inputs={"x": images.pop("x")}, outputs=images)
    return adopt(save(model, folder / "net.onnx"), folder / "net.bundle").bundle


@pytest.mark.parametrize(
    ("colours", "outputs", "groups", "side", "stays"),
    [
        (1, 32, 1, 3, True),
        (3, 48, 1, 5, True),
        (3, 48, 1, 7, False),
        (3, 64, 1, 3, False),
        (4, 32, 1, 3, False),
        (8, 8, 8, 3, False),
    ],
)
def test_a_first_convolution_of_few_colours_stays_in_float32_and_the_sum_after_it_does_not(
    colours: int, outputs: int, groups: int, side: int, stays: bool, tmp_path: Path
) -> None:
    bundle = stem(tmp_path, colours=colours, outputs=outputs, groups=groups, side=side)
    x = np.random.default_rng(1).standard_normal((4, colours, 8, 8)).astype(np.float32)
    found = convert_parts(bundle, (Part("int8-static"),), lambda graph: iter([{"x": x}]))
    reasons = {node.node: node.reason for node in found.nodes if not node.quantized}
    expected = {"stem": f"a convolution from {colours} to {outputs} channels is faster in float32"}
    assert reasons == (expected if stays else {})
    model = found.models["model"]
    wiring = Wiring.of(model)

    def is_stored(name: str) -> bool:
        above = wiring.maker(name)
        return above is not None and above.op_type == "DequantizeLinear"

    by_name = {node.name: node for node in model.graph.node}
    assert is_stored(by_name["stem"].input[0]) != stays
    assert all(is_stored(name) for name in (by_name["inner"].input[0], *by_name["sum"].input, *by_name["side by side"].input))


def test_a_first_convolution_before_max_pooling_is_quantized_with_it(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = {"v": random.standard_normal((16, 1, 5, 5)), "w": random.standard_normal((8, 16, 3, 3))}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], name="stem", pads=[2] * 4),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("MaxPool", ["b"], ["c"], name="pool", kernel_shape=[3, 3], pads=[1] * 4),
        helper.make_node("Conv", ["c", "w"], ["y"], name="inner", pads=[1] * 4),
    ]
    images = {name: (TensorProto.FLOAT, ["batch", channels, 8, 8]) for name, channels in (("x", 1), ("y", 8))}
    given = {name: array.astype(np.float32) for name, array in weights.items()}
    model = make_model(nodes, given, inputs={"x": images["x"]}, outputs={"y": images["y"]})
    bundle = adopt(save(model, tmp_path / "net.onnx"), tmp_path / "net.bundle").bundle
    x = random.standard_normal((4, 1, 8, 8)).astype(np.float32)
    found = convert_parts(bundle, (Part("int8-static"),), lambda graph: iter([{"x": x}]))
    assert all(node.quantized for node in found.nodes)
    assert in_int8(found.models["model"]) == {"pool"}


def branches(folder: Path) -> Bundle:
    """Two convolutions of the input, joined with each other, with the input, and with a number."""
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((CHANNELS, CHANNELS, 3, 3)).astype(np.float32) / 8 for name in ("v", "w", "u")}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], name="left", pads=[1] * 4),
        helper.make_node("Conv", ["x", "w"], ["b"], name="right", pads=[1] * 4),
        helper.make_node("Add", ["a", "b"], ["sum"], name="both"),
        helper.make_node("Conv", ["sum", "u"], ["c"], name="last", pads=[1] * 4),
        helper.make_node("Add", ["c", "number"], ["d"], name="and a number"),
        helper.make_node("Add", ["sum", "x"], ["e"], name="and the input"),
        helper.make_node("Concat", ["sum", "b"], ["f"], name="side by side", axis=1),
    ]
    shapes = {"d": IMAGE, "e": IMAGE, "f": (TensorProto.FLOAT, ["batch", 2 * CHANNELS, 8, 8])}
    model = make_model(nodes, weights | {"number": np.ones(1, np.float32)}, inputs={"x": IMAGE}, outputs=shapes)
    return adopt(save(model, folder / "net.onnx"), folder / "net.bundle").bundle


@pytest.mark.parametrize(
    ("nodes", "expected"), [(None, {"both", "side by side"}), ({"left", "right"}, {"both", "side by side"}), ({"left"}, set())]
)
def test_branches_are_joined_in_int8_where_all_of_them_are(nodes: set[str] | None, expected: set[str], tmp_path: Path) -> None:
    bundle = branches(tmp_path)
    model = converted(bundle, None if nodes is None else frozenset(nodes))
    stored = {name for node in model.graph.node if node.op_type == "QuantizeLinear" for name in node.input}
    joined = {node.name for node in model.graph.node if node.op_type in ("Add", "Concat") and node.output[0] in stored}
    assert joined == expected
    signature = bundle.graph()[1].signature
    before, after = (
        Session(graph, signature, device="cpu").run({"x": samples()})
        for graph in (bundle.graph_path(), model.SerializeToString())
    )
    for name, values in before.items():
        assert np.abs(after[name] - values).max() < 0.05 * np.abs(values).max()


def test_a_product_and_its_bias_as_two_nodes_are_one_integer_product_when_loaded(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((64, 48)) / 8, "b": random.standard_normal(48)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"], name="product"), helper.make_node("Add", ["b", "p"], ["y"])]
    shapes = {name: (TensorProto.FLOAT, ["batch", width]) for name, width in (("x", 64), ("y", 48))}
    model = make_model(
        nodes,
        {name: array.astype(np.float32) for name, array in weights.items()},
        inputs={"x": shapes["x"]},
        outputs={"y": shapes["y"]},
    )
    bundle = adopt(save(model, tmp_path / "net.onnx"), tmp_path / "net.bundle").bundle
    x = random.standard_normal((16, 64)).astype(np.float32)
    made = convert_parts(bundle, (Part("int8-static"),), lambda graph: iter([{"x": x}])).models["model"]
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    session = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert {node.op_type for node in onnx.load(tmp_path / "loaded.onnx").graph.node} == {"QuantizeLinear", "QGemm"}
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ weights["w"] + weights["b"], atol=0.1)
