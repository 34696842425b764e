"""Attention, LayerNorm and Gelu in pieces are found in what torch exports, and not where they are one node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from ...helpers import gemm_model, make_model, save
from .support import FLOAT, findings, severities, weights

SCALAR = np.float32


def attention_model(*, masked: bool = True) -> onnx.ModelProto:
    """softmax(q k^T * scale + mask) v over (batch, time, 4)."""
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["raw"]),
        helper.make_node("Mul", ["raw", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "mask"], ["masked"]) if masked else helper.make_node("Neg", ["scaled"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["weights"], name="attend"),
        helper.make_node("MatMul", ["weights", "v"], ["y"]),
    ]
    sides = (FLOAT, ["batch", "time", 4])
    constants = {"scale": np.array(0.5, np.float32), "mask": np.zeros((1, 1), np.float32)}
    return make_model(nodes, constants, inputs={"q": sides, "k": sides, "v": sides}, outputs={"y": sides})


def test_attention_in_pieces_is_a_warning(tmp_path: Path) -> None:
    (found,) = findings(attention_model(), tmp_path, "unfused-attention")
    assert (found.severity, found.node) == ("warning", "attend")
    assert found.fix.startswith("run: edgekit optimize")


def test_quantized_attention_in_pieces_is_found_as_well(tmp_path: Path) -> None:
    model = attention_model()
    constants = {"s": np.array(0.1, np.float32), "z": np.array(0, np.int8)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    quantized = []
    for node in model.graph.node:
        quantized.append(node)
        if node.op_type in ("MatMul", "Mul", "Add", "Softmax") and node.output[0] != "y":
            name, node.output[0] = node.output[0], f"{node.output[0]}_float"
            quantized.append(helper.make_node("QuantizeLinear", [f"{name}_float", "s", "z"], [f"{name}_int"]))
            quantized.append(helper.make_node("DequantizeLinear", [f"{name}_int", "s", "z"], [name]))
    quantized = [onnx.NodeProto.FromString(node.SerializeToString()) for node in quantized]
    del model.graph.node[:]
    model.graph.node.extend(quantized)
    assert [finding.node for finding in findings(model, tmp_path, "unfused-attention")] == ["attend"]


def test_a_softmax_between_layers_is_not_attention(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Softmax", ["h"], ["p"]),
        helper.make_node("MatMul", ["p", "b"], ["y"]),
    ]
    model = make_model(nodes, {"a": weights(4, 5), "b": weights(5, 3)})
    assert not findings(model, tmp_path, "unfused-attention")
    assert not findings(attention_model(masked=False), tmp_path, "unfused-attention")  # Neg: not attention that is known


def norm_model(*, centred: bool = True, power: float = 2.0) -> onnx.ModelProto:
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"]),
        helper.make_node("Sub", ["x", "mean"], ["d"]) if centred else helper.make_node("Identity", ["x"], ["d"]),
        helper.make_node("Pow", ["d", "two"], ["square"]),
        helper.make_node("ReduceMean", ["square", "axes"], ["variance"]),
        helper.make_node("Add", ["variance", "epsilon"], ["safe"]),
        helper.make_node("Sqrt", ["safe"], ["deviation"], name="root"),
        helper.make_node("Div", ["d", "deviation"], ["normal"]),
        helper.make_node("Mul", ["normal", "gain"], ["scaled"]),
        helper.make_node("Add", ["scaled", "bias"], ["y"]),
    ]
    constants: dict[str, Any] = {"axes": np.array([-1], np.int64), "two": SCALAR(power), "epsilon": SCALAR(1e-5)}
    constants |= {"gain": np.ones(4, np.float32), "bias": np.zeros(4, np.float32)}
    return make_model(nodes, {name: np.asarray(item) for name, item in constants.items()}, outputs={"y": (FLOAT, ["batch", 4])})


def gelu_model(kind: str, one: float = 1.0) -> onnx.ModelProto:
    if kind == "Erf":
        inner = [helper.make_node("Div", ["x", "root_two"], ["arg"])]
    else:
        inner = [
            helper.make_node("Pow", ["x", "three"], ["cube"]),
            helper.make_node("Mul", ["cube", "small"], ["bent"]),
            helper.make_node("Add", ["x", "bent"], ["sum"]),
            helper.make_node("Mul", ["sum", "root_pi"], ["arg"]),
        ]
    nodes = [
        *inner,
        helper.make_node(kind, ["arg"], ["curve"], name="curve"),
        helper.make_node("Add", ["curve", "one"], ["plus"]),
        helper.make_node("Mul", ["x", "plus"], ["double"]),
        helper.make_node("Mul", ["double", "half"], ["y"]),
    ]
    constants = {"root_two": 2**0.5, "three": 3.0, "small": 0.044715, "root_pi": (2 / np.pi) ** 0.5, "one": one, "half": 0.5}
    read = {name for node in nodes for name in node.input}
    values = {name: np.asarray(value, np.float32) for name, value in constants.items() if name in read}
    return make_model(nodes, values, outputs={"y": (FLOAT, ["batch", 4])})


def fused_at_load(model: onnx.ModelProto, folder: Path) -> set[str]:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(str(save(model, folder / "plain.onnx")), options, providers=["CPUExecutionProvider"])
    return {node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node}


@pytest.mark.parametrize(("centred", "kind"), [(True, "LayerNorm"), (False, "RMSNorm")])
def test_a_norm_in_pieces_is_a_remark(centred: bool, kind: str, tmp_path: Path) -> None:
    (found,) = findings(norm_model(centred=centred), tmp_path, "unfused-layernorm")
    assert (found.severity, found.node) == ("info", "root")
    assert found.reason.startswith(kind)


def test_other_roots_are_no_norm(tmp_path: Path) -> None:
    assert not findings(norm_model(power=3.0), tmp_path, "unfused-layernorm")
    nodes = [helper.make_node("Abs", ["x"], ["a"]), helper.make_node("Sqrt", ["a"], ["y"])]
    assert not findings(make_model(nodes, outputs={"y": (FLOAT, ["batch", 4])}), tmp_path, "unfused-layernorm")


@pytest.mark.parametrize(("kind", "severity"), [("Erf", "info"), ("Tanh", "warning")])
def test_a_gelu_in_pieces_is_found(kind: str, severity: str, tmp_path: Path) -> None:
    found = findings(gelu_model(kind), tmp_path, "unfused-gelu")
    assert severities(found) == [severity]
    assert f"written out with {kind}" in found[0].reason
    assert not findings(gelu_model(kind, one=2.0), tmp_path, "unfused-gelu")
    assert not findings(gemm_model(), tmp_path, "unfused-gelu")


def test_what_is_only_a_remark_is_what_onnxruntime_fuses_at_load(tmp_path: Path) -> None:
    assert "LayerNormalization" in fused_at_load(norm_model(), tmp_path)
    assert "SimplifiedLayerNormalization" in fused_at_load(norm_model(centred=False), tmp_path)
    assert "Gelu" in fused_at_load(gelu_model("Erf"), tmp_path)
    assert "Tanh" in fused_at_load(gelu_model("Tanh"), tmp_path)
    assert {"MatMul", "Softmax"} & fused_at_load(attention_model(), tmp_path)


@pytest.mark.parametrize("exporter_opset", [17, 20])
def test_what_torch_exports_is_recognized(exporter_opset: int, tmp_path: Path) -> None:
    import torch

    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True, dropout=0.0).eval()
    path = tmp_path / "layer.onnx"
    axes = ({0: "batch", 1: "time"},)
    torch.onnx.export(
        layer, (torch.randn(2, 5, 8),), str(path), dynamic_shapes=axes, opset_version=exporter_opset, verbose=False
    )
    assert severities(findings(path, tmp_path, "unfused-attention")) == ["warning"]
    assert severities(findings(path, tmp_path, "unfused-gelu")) == (["info"] if exporter_opset < 20 else [])
    assert not findings(path, tmp_path, "unfused-layernorm")
