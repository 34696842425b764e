"""int64-indices: index arithmetic in int64 on whole tensors. Half the speed on a CPU; WebGPU and many accelerators lack it."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..finding import Finding, Graph, Rule
from ..wiring import label

_ARITHMETIC = {"MatMul", "Gemm", "Add", "Sub", "Mul", "Div", "Mod", "Pow", "Neg", "Abs", "Sign", "Min", "Max", "Clip", "Where"}
_ARITHMETIC |= {"CumSum", "ReduceSum", "ReduceMax", "ReduceMin"}
_SMALL = 64  # elements: shape arithmetic, not data


def run(graph: Graph) -> Iterator[Finding]:
    for node in graph.typed.graph.node:
        large = [graph.types[name] for name in node.output if _is_large_int64(graph.types.get(name))]
        if node.op_type in _ARITHMETIC and large:
            few = all(_is_a_number_a_token(tensor) for tensor in large)
            reason = f"int64 arithmetic on {'one number a token' if few else 'a whole tensor'}"
            fix = "compute indices once outside the hot path, or in int32: torch.arange(…, dtype=torch.int32)"
            yield Finding("int64-indices", "info" if few else "warning", label(node), reason, fix)


def _is_large_int64(tensor: onnx.TypeProto.Tensor | None) -> bool:
    if tensor is None or tensor.elem_type != onnx.TensorProto.INT64 or not tensor.HasField("shape"):
        return False
    total, dynamic = 1, False
    for dim in tensor.shape.dim:
        total *= dim.dim_value or 1
        dynamic |= not dim.HasField("dim_value")
    return len(tensor.shape.dim) > 1 and (dynamic or total > _SMALL)


def _is_a_number_a_token(tensor: onnx.TypeProto.Tensor) -> bool:
    """(batch, time), both open: positions and masks of tokens, a thousandth of what a layer computes for each of them."""
    return len(tensor.shape.dim) == 2 and not any(dim.HasField("dim_value") for dim in tensor.shape.dim)


RULE = Rule("int64-indices", "no int64 arithmetic in hot paths", run)
