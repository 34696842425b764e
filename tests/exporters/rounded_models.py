"""Weights, inputs and graphs for the tests of rounding, and how to quantize them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from architectures.settings import apply_settings
from exporters.quantizers import SCHEMES
from exporters.quantizers.scheme import Request, Samples, decide_all, quantizable
from exporters.quantizers.weights import tied_tables

from ..helpers import make_model

Array = np.ndarray[Any, Any]
FLOAT = TensorProto.FLOAT


def heavy_tailed(*shape: int, seed: int = 0) -> Array:
    """Weights with outliers, as trained ones have."""
    return (np.random.default_rng(seed).standard_t(4, shape) / 16).astype(np.float32)


def correlated(rows: int, width: int, seed: int = 1) -> Array:
    """Inputs of a few underlying causes, as the inputs of a layer are."""
    random = np.random.default_rng(seed)
    causes = random.standard_normal((rows, width // 4)) @ random.standard_normal((width // 4, width))
    return (causes + 0.3 * random.standard_normal((rows, width))).astype(np.float32)


def answers(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return list(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds))


def applied(
    *models: onnx.ModelProto,
    scheme: str = "int4-weights",
    samples: Samples | None = None,
    many_rows: bool = False,
    **settings: Any,
) -> list[onnx.ModelProto]:
    """The quantized graphs of a bundle that has these."""
    chosen = SCHEMES[scheme]
    prepared = {str(number): chosen.prepare(quantizable(model)) for number, model in enumerate(models)}
    decisions = decide_all(chosen, prepared, (), ())
    tied = tied_tables(prepared.values())
    quantized = []
    for name, model in prepared.items():
        nodes = tuple(item.node for item in decisions[name] if item.quantized)
        given = apply_settings(chosen.settings, settings)
        quantized.append(chosen.apply(Request(model, nodes, (), False, samples, given, many_rows, tied)))
    return quantized


def product_model(weight: Array) -> onnx.ModelProto:
    node = helper.make_node("MatMul", ["x", "W"], ["y"], name="product")
    inputs, outputs = weight.shape
    return make_model(
        [node], {"W": weight}, inputs={"x": (FLOAT, ["batch", inputs])}, outputs={"y": (FLOAT, ["batch", outputs])}
    )


def bits_of(model: onnx.ModelProto) -> dict[str, int]:
    quantized = (node for node in model.graph.node if node.domain == "com.microsoft")
    return {node.name: helper.get_node_attr_value(node, "bits") for node in quantized}


def weights_of(model: onnx.ModelProto) -> dict[str, bytes]:
    return {tensor.name: tensor.raw_data for tensor in model.graph.initializer}
