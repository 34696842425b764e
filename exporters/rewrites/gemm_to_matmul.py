"""Reshape to rows, Gemm, Reshape back → MatMul and Add, which take any number of leading axes.

    (…, in) → (rows, in) → x W + b → (…, out)

It helps by what it allows: a MatMul with its bias beside it is what the fusions of GELU and of the residual sum look for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from .engine import Context, Rewrite, weight
from .nodes import array_of, attribute, is_op, made_by, rank, size, used_once


@dataclass(frozen=True)
class FlattenedGemm:
    root: ir.Node  # the Reshape after it
    gemm: ir.Node
    x: ir.Value  # before the Reshape to rows


def pattern(node: ir.Node) -> FlattenedGemm | None:
    if not is_op(node, "Reshape"):
        return None
    gemm = made_by(node.inputs[0], "Gemm")
    rows = None if gemm is None else made_by(gemm.inputs[0], "Reshape")
    return None if gemm is None or rows is None else FlattenedGemm(node, gemm, rows.inputs[0])


def condition(found: FlattenedGemm, context: Context) -> str | None:
    gemm, output = found.gemm, found.root.outputs[0]
    matrix = array_of(gemm.inputs[1])
    if matrix is None or _bias_is_computed(gemm):
        return "a weight is computed at run time"
    if attribute(gemm, "transA", 0) or attribute(gemm, "alpha", 1.0) != 1.0 or attribute(gemm, "beta", 1.0) != 1.0:
        return "the Gemm scales or transposes its input"
    if not used_once(gemm.outputs[0]):
        return "the rows are used elsewhere too"
    if not used_once(gemm.inputs[1]) and attribute(gemm, "transB", 0):
        return "the weight is shared with another node and would be stored twice"
    if rank(found.x) is None or rank(found.x) != rank(output):
        return "the number of axes before and after differs, or is not known"
    inside, outside = matrix.shape[::-1] if attribute(gemm, "transB", 0) else matrix.shape
    if size(found.x, -1) != inside or size(output, -1) != outside:
        return "the last axis is not the one that is multiplied, or its size is not known"
    return None


def replacement(found: FlattenedGemm, context: Context) -> Mapping[ir.Value, ir.Value]:
    gemm = found.gemm
    matrix = gemm.inputs[1]
    if attribute(gemm, "transB", 0):
        matrix = weight("weight", array_of(matrix).T.copy())  # type: ignore[union-attr]
    result = ir.node("MatMul", [found.x, matrix]).outputs[0]
    if len(gemm.inputs) > 2 and gemm.inputs[2] is not None:
        result.shape, result.type = found.root.outputs[0].shape, found.root.outputs[0].type
        result = ir.node("Add", [result, gemm.inputs[2]]).outputs[0]
    return {found.root.outputs[0]: result}


def _bias_is_computed(gemm: ir.Node) -> bool:
    if len(gemm.inputs) < 3 or gemm.inputs[2] is None:
        return False
    bias = array_of(gemm.inputs[2])
    return bias is None or bias.ndim != 1


REWRITE = Rewrite("gemm-to-matmul", "a Gemm between reshapes becomes a MatMul with a bias", pattern, condition, replacement)
