"""GELU written out → one Gelu node.

    exact  x · ½ · (1 + erf(x / √2))
    tanh   x · ½ · (1 + tanh(√(2/π) · (x + 0.044715 x³)))

The factors come in any order and nesting, as exporters differ. Gelu is a standard operator from opset 20 on; before that
onnxruntime's own Gelu (exact) and FastGelu (tanh) take its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from .engine import Context, Rewrite
from .nodes import CONTRIB, either_way, factors_of, is_op, is_scalar, made_by, scalar_of, used_once

GELU_OPSET = 20


@dataclass(frozen=True)
class Gelu:
    root: ir.Node
    x: ir.Value
    approximate: str  # "none" or "tanh"


def pattern(node: ir.Node) -> Gelu | None:
    if not is_op(node, "Mul"):
        return None
    factors, _ = factors_of(node.outputs[0])
    if len(factors) != 3:
        return None
    for one_plus in factors:
        half, x = _half_and_rest([item for item in factors if item is not one_plus])
        inner = _of_one_plus(one_plus)
        if half is None or x is None or inner is None:
            continue
        if inner.op_type == "Erf" and _is_scaled(inner.inputs[0], x):
            return Gelu(node, x, "none")
        if inner.op_type == "Tanh" and _is_cubic(inner.inputs[0], x):
            return Gelu(node, x, "tanh")
    return None


def condition(found: Gelu, context: Context) -> str | None:
    if context.portable and context.opset < GELU_OPSET:
        return f"Gelu is a standard operator from opset {GELU_OPSET} on, and this graph has opset {context.opset}"
    return None


def replacement(found: Gelu, context: Context) -> Mapping[ir.Value, ir.Value]:
    if context.opset >= GELU_OPSET:
        node = ir.node("Gelu", [found.x], {"approximate": found.approximate})
    else:
        node = ir.node("Gelu" if found.approximate == "none" else "FastGelu", [found.x], domain=CONTRIB)
    return {found.root.outputs[0]: node.outputs[0]}


def _half_and_rest(factors: list[ir.Value]) -> tuple[ir.Value | None, ir.Value | None]:
    if len(factors) == 2:
        for half, x in (factors, factors[::-1]):
            if is_scalar(half, 0.5) and scalar_of(x) is None:
                return half, x
    return None, None


def _of_one_plus(value: ir.Value) -> ir.Node | None:
    """Erf or Tanh of `1 + it`."""
    add = made_by(value, "Add")
    if add is None:
        return None
    return next((made_by(inner, "Erf", "Tanh") for inner, one in either_way(add) if is_scalar(one, 1.0)), None)


def _is_scaled(value: ir.Value, x: ir.Value) -> bool:
    """x / √2, or x · (1/√2)."""
    if divided := made_by(value, "Div"):
        return divided.inputs[0] is x and is_scalar(divided.inputs[1], math.sqrt(2))
    scaled = made_by(value, "Mul")
    return scaled is not None and any(a is x and is_scalar(b, math.sqrt(0.5)) for a, b in either_way(scaled))


def _is_cubic(value: ir.Value, x: ir.Value) -> bool:
    """√(2/π) · (x + 0.044715 x³), or √(2/π) · x · (1 + 0.044715 x²)."""
    factors, _ = factors_of(value)
    rest = [item for item in factors if not is_scalar(item, math.sqrt(2 / math.pi))]
    if len(rest) != len(factors) - 1:
        return False
    outside = [item for item in rest if item is x]
    sums = [made_by(item, "Add") for item in rest if item is not x]
    if len(sums) != 1 or sums[0] is None or len(outside) > 1:
        return False
    for first, power in either_way(sums[0]):
        starts = is_scalar(first, 1.0) if outside else first is x
        if starts and used_once(power) and _is_power(power, x, 2 if outside else 3):
            return True
    return False


def _is_power(value: ir.Value, x: ir.Value, exponent: int) -> bool:
    """0.044715 · x^exponent."""
    factors, _ = factors_of(value)
    rest = [item for item in factors if not is_scalar(item, 0.044715)]
    if len(rest) != len(factors) - 1:
        return False
    total = 0
    for item in rest:
        power = made_by(item, "Pow")
        if item is x:
            total += 1
        elif power is not None and power.inputs[0] is x:
            total += round(scalar_of(power.inputs[1]) or 0)
        else:
            square = made_by(item, "Mul")
            if square is None or any(part is not x for part in square.inputs):
                return False
            total += 2
    return total == exponent


REWRITE = Rewrite("fuse-gelu", "GELU written out becomes one node", pattern, condition, replacement)
