"""Layer normalization written out → LayerNormalization (Ba, Kiros and Hinton, "Layer normalization", 2016).

    d = x − mean(x);  y = d / √(mean(d²) + ε) · scale + bias, all means over the last axis

d² is Pow(d, 2) or Mul(d, d); the division may be a multiplication with the reciprocal; scale and bias may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .engine import Context, Rewrite, weight
from .nodes import (
    array_of,
    attribute,
    either_way,
    is_last_axis,
    is_op,
    is_scalar,
    made_by,
    reduced_axes,
    scalar_of,
    size,
    used_once,
)

LAYER_NORM_OPSET = 17


@dataclass(frozen=True)
class LayerNorm:
    root: ir.Node
    x: ir.Value
    epsilon: float
    means: tuple[ir.Node, ir.Node]  # of x, and of the squares
    scale: ir.Value | None = None
    bias: ir.Value | None = None


def pattern(node: ir.Node) -> LayerNorm | None:
    """Rooted at the last node that belongs to it: the bias, else the scale, else the division."""
    if is_op(node, "Add"):
        for inner, bias in either_way(node):
            found = _scaled(inner.producer()) if used_once(inner) and _is_vector(bias) else None
            if found is not None and found.scale is not None:
                return LayerNorm(node, found.x, found.epsilon, found.means, found.scale, bias)
        return None
    found = _scaled(node)
    return None if found is None or _goes_on(found) else found


def condition(found: LayerNorm, context: Context) -> str | None:
    if context.opset < LAYER_NORM_OPSET:
        return f"LayerNormalization came with opset {LAYER_NORM_OPSET}, and this graph has opset {context.opset}"
    for mean in found.means:
        axes = reduced_axes(mean)
        if axes is None or len(axes) != 1 or not is_last_axis(axes[0], found.x):
            return "the mean is not over the last axis alone"
        if not attribute(mean, "keepdims", 1):
            return "the mean drops its axis"
    width = size(found.x, -1)
    if width is None:
        return "the size of the last axis is not known"
    for vector in (found.scale, found.bias):
        if vector is not None and array_of(vector).shape != (width,):  # type: ignore[union-attr]
            return "the scale or the bias is not as long as the last axis"
    return None


def replacement(found: LayerNorm, context: Context) -> Mapping[ir.Value, ir.Value]:
    scale = found.scale or weight("scale", np.ones(size(found.x, -1) or 0, np.float32))
    inputs = [found.x, scale] + ([found.bias] if found.bias is not None else [])
    node = ir.node("LayerNormalization", inputs, {"axis": -1, "epsilon": found.epsilon})
    return {found.root.outputs[0]: node.outputs[0]}


def _scaled(node: ir.Node | None) -> LayerNorm | None:
    """d / √… · scale, or the bare quotient."""
    if is_op(node, "Mul"):
        for inner, scale in either_way(node):
            found = _quotient(inner.producer()) if used_once(inner) and _is_vector(scale) else None
            if found is not None:
                return LayerNorm(node, found.x, found.epsilon, found.means, scale)
    return _quotient(node)


def _quotient(node: ir.Node | None) -> LayerNorm | None:
    """d / √(mean(d²) + ε), or d · 1/√(…)."""
    pairs: list[tuple[ir.Value, ir.Value]] = []
    if is_op(node, "Div"):
        pairs = [(node.inputs[0], node.inputs[1])]  # type: ignore[union-attr]
    elif is_op(node, "Mul"):
        pairs = [
            (centred, inverse.inputs[0])
            for centred, factor in either_way(node)
            if (inverse := made_by(factor, "Reciprocal")) is not None
        ]
    for centred, deviation in pairs:
        root = made_by(deviation, "Sqrt")
        subtract = made_by(centred, "Sub")
        if root is None or subtract is None:
            continue
        x = subtract.inputs[0]
        mean = made_by(subtract.inputs[1], "ReduceMean")
        epsilon, squares = _variance(root.inputs[0], centred)
        if mean is not None and squares is not None and mean.inputs[0] is x:
            return LayerNorm(node, x, epsilon, (mean, squares))
    return None


def _variance(value: ir.Value, centred: ir.Value) -> tuple[float, ir.Node | None]:
    """mean(d²) + ε → ε and the mean."""
    add = made_by(value, "Add")
    for mean_value, epsilon in either_way(add) if add is not None else ():
        mean = made_by(mean_value, "ReduceMean")
        number = scalar_of(epsilon)
        if mean is None or number is None or number <= 0:
            continue
        square = made_by(mean.inputs[0], "Pow", "Mul")
        if square is None or square.inputs[0] is not centred:
            continue
        if square.inputs[1] is centred if square.op_type == "Mul" else is_scalar(square.inputs[1], 2.0):
            return number, mean
    return 0.0, None


def _is_vector(value: ir.Value) -> bool:
    array = array_of(value)
    return array is not None and array.ndim == 1


def _goes_on(found: LayerNorm) -> bool:
    """Whether a scale or bias follows, at which the pattern is found as a whole."""
    output = found.root.outputs[0]
    if not used_once(output):
        return False
    user = output.uses()[0].node
    wanted = "Add" if found.scale is not None else "Mul"
    return is_op(user, wanted) and any(item is output and _is_vector(other) for item, other in either_way(user))


REWRITE = Rewrite("fuse-layernorm", "layer normalization written out becomes one node", pattern, condition, replacement)
