"""wide-types: 64-bit arithmetic in hot paths. Accelerators lack it, and CPUs run it at half the speed or less."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..finding import Finding, Graph, Rule

_HOT = {
    "MatMul",
    "Gemm",
    "Conv",
    "ConvTranspose",
    "Add",
    "Mul",
    "Sub",
    "Div",
    "Softmax",
    "LayerNormalization",
    "LSTM",
    "GRU",
    "RNN",
}
_DOUBLE, _INT64 = onnx.TensorProto.DOUBLE, onnx.TensorProto.INT64
_SMALL = 64  # elements: shape arithmetic, not data


def run(graph: Graph) -> Iterator[Finding]:
    try:
        model = onnx.shape_inference.infer_shapes(graph.model)
    except Exception:  # the shape-inference rule reports it
        model = graph.model
    types = {value.name: value.type.tensor_type for value in (*model.graph.value_info, *model.graph.input, *model.graph.output)}
    kinds = {name: item.elem_type for name, item in types.items()} | {
        item.name: item.data_type for item in model.graph.initializer
    }
    doubles = [node for node in model.graph.node if any(kinds.get(name) == _DOUBLE for name in node.input)]
    if doubles:
        yield Finding(
            "wide-types",
            "warning",
            doubles[0].name or doubles[0].op_type,
            f"{len(doubles)} nodes compute in float64 (first: {doubles[0].op_type})",
            "cast inputs and constants to float32 in the network: 1.0 / torch.tensor(…, dtype=torch.float32)",
        )
    for node in model.graph.node:
        if node.op_type in _HOT and any(kinds.get(name) == _INT64 and _is_large(types.get(name)) for name in node.output):
            yield Finding(
                "wide-types",
                "warning",
                node.name or node.op_type,
                f"{node.op_type} computes on int64 data",
                "compute indices once outside the hot path, or use int32",
            )


def _is_large(tensor: onnx.TypeProto.Tensor | None) -> bool:
    if tensor is None or not tensor.HasField("shape"):
        return False
    total, dynamic = 1, False
    for dim in tensor.shape.dim:
        total *= dim.dim_value or 1
        dynamic |= not dim.HasField("dim_value")
    return len(tensor.shape.dim) > 1 and (dynamic or total > _SMALL)


RULE = Rule("wide-types", "no float64 or int64 arithmetic in hot paths", run)
