"""int8-static on some nodes of a convolutional network: what lies between quantized convolutions stays in int8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
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
    """Two residual blocks of a convolution each, the first one pooled. Both convolutions have the same bias."""
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((CHANNELS, CHANNELS, 3, 3)).astype(np.float32) / 8 for name in ("v", "w")}
    weights["bias"] = np.zeros(CHANNELS, np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "v", "bias"], ["a"], name="first", pads=[1] * 4),
        helper.make_node("MaxPool", ["a"], ["b"], name="pool", kernel_shape=[3, 3], pads=[1] * 4),
        helper.make_node("Add", ["b", "x"], ["c"], name="sum.first"),
        helper.make_node("Conv", ["c", "w", "bias"], ["d"], name="second", pads=[1] * 4),
        helper.make_node("Add", ["d", "c"], ["y"], name="sum.second"),
    ]
    model = make_model(nodes, weights, inputs={"x": IMAGE}, outputs={"y": IMAGE})
    return adopt(save(model, folder / "net.onnx"), folder / "net.bundle").bundle


def samples() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((4, CHANNELS, 8, 8)).astype(np.float32)


def converted(bundle: Bundle, nodes: frozenset[str] | None) -> onnx.ModelProto:
    return convert_parts(bundle, (Part("int8-static", nodes=nodes),), lambda graph: iter([{"x": samples()}])).models["model"]


def in_int8(model: onnx.ModelProto) -> set[str]:
    """The nodes that read nothing but what was stored in int8."""
    wiring = Wiring.of(model)
    nodes = [node for node in model.graph.node if node.op_type in ("Conv", "Add", "MaxPool")]
    makers = {node.name: [wiring.maker(name) for name in node.input] for node in nodes}
    return {
        name for name, above in makers.items() if all(node is not None and node.op_type == "DequantizeLinear" for node in above)
    }


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (None, {"first", "sum.first", "pool", "second", "sum.second"}),
        (frozenset(["first"]), {"first", "sum.first", "pool"}),
        (frozenset(["second"]), {"second", "sum.second"}),
    ],
)
def test_sums_and_pooling_after_a_quantized_convolution_are_in_int8_and_others_are_not(
    nodes: frozenset[str] | None, expected: set[str], tmp_path: Path
) -> None:
    assert in_int8(converted(two_blocks(tmp_path), nodes)) == expected


def test_convolutions_that_share_a_bias_are_quantized_near_the_original(tmp_path: Path) -> None:
    bundle = two_blocks(tmp_path)
    signature = bundle.graph()[1].signature
    model = converted(bundle, None).SerializeToString()
    expected, answer = (
        Session(graph, signature, device="cpu").run({"x": samples()})["y"] for graph in (bundle.graph_path(), model)
    )
    assert np.abs(answer - expected).max() < 0.05 * np.abs(expected).max()
