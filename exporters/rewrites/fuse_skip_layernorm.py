"""LayerNormalization(a + b) → SkipLayerNormalization of onnxruntime.

In a pre-norm network the sum goes on as the residual stream: it is then the fused node's fourth output. If a or b is itself
`c + bias` (the bias of the projection before), that bias goes in too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from .engine import Context, Rewrite
from .nodes import CONTRIB, array_of, attribute, either_way, is_last_axis, is_op, made_by, rank, size, used_once


@dataclass(frozen=True)
class SkipLayerNorm:
    root: ir.Node
    add: ir.Node
    first: ir.Value
    second: ir.Value
    bias: ir.Value | None


def pattern(node: ir.Node) -> SkipLayerNorm | None:
    if not is_op(node, "LayerNormalization"):
        return None
    add = made_by(node.inputs[0], "Add")
    if add is None or any(array_of(value) is not None for value in add.inputs):
        return None
    for biased, other in either_way(add):
        inner = made_by(biased, "Add")
        if inner is None or not used_once(biased):
            continue
        for x, bias in either_way(inner):
            array = array_of(bias)
            if array is not None and array.shape == (size(other, -1),) and size(x, -1) == size(other, -1):
                return SkipLayerNorm(node, add, other, x, bias)
    return SkipLayerNorm(node, add, add.inputs[0], add.inputs[1], None)


def condition(found: SkipLayerNorm, context: Context) -> str | None:
    x = found.root.inputs[0]
    if not is_last_axis(attribute(found.root, "axis", -1), x):
        return "the normalization is not over the last axis alone"
    if len(found.root.outputs) > 1 and any(output.uses() for output in found.root.outputs[1:]):
        return "the mean or deviation of the normalization is used"
    if rank(found.first) not in (2, 3) or rank(found.first) != rank(found.second):
        return "the summands are not both of rank 2 or 3"
    if size(found.first, -1) is None or size(found.first, -1) != size(found.second, -1):
        return "the summands differ in their last axis, or it is not known"
    if any(1 in _sizes(value) for value in (found.first, found.second)) and _sizes(found.first) != _sizes(found.second):
        return "one summand is broadcast"
    return None


def replacement(found: SkipLayerNorm, context: Context) -> Mapping[ir.Value, ir.Value]:
    norm = found.root
    beta = norm.inputs[2] if len(norm.inputs) > 2 else None
    node = ir.node(
        "SkipLayerNormalization",
        [found.first, found.second, norm.inputs[1], beta, found.bias],
        {"epsilon": float(attribute(norm, "epsilon", 1e-5))},
        domain=CONTRIB,
        num_outputs=1 if used_once(found.add.outputs[0]) else 4,
    )
    values = {norm.outputs[0]: node.outputs[0]}
    if len(node.outputs) == 4:
        values[found.add.outputs[0]] = node.outputs[3]
    return values


def _sizes(value: ir.Value) -> list[int | None]:
    return [size(value, axis) for axis in range((rank(value) or 1) - 1)]


# onnxruntime 1.31's kernel on the CPU is slower than the two it replaces at every number of rows: docs/optimize.md.
REWRITE = Rewrite(
    "fuse-skip-layernorm",
    "a residual sum and its normalization in one node",
    pattern,
    condition,
    replacement,
    standard=False,
    doubtful=True,
)
