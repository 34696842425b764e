"""Gelu(x + bias) → one BiasGelu node (exact) or FastGelu with a bias (tanh) of onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from .engine import Context, Rewrite
from .nodes import CONTRIB, STANDARD, array_of, attribute, either_way, is_op, made_by, size, used_once


@dataclass(frozen=True)
class BiasGelu:
    root: ir.Node
    x: ir.Value
    bias: ir.Value
    operator: str


def pattern(node: ir.Node) -> BiasGelu | None:
    if not is_op(node, "Gelu", domains=(*STANDARD, CONTRIB)):
        return None
    add = made_by(node.inputs[0], "Add")
    if add is None:
        return None
    operator = "FastGelu" if str(attribute(node, "approximate", "none")) == "tanh" else "BiasGelu"
    for x, bias in either_way(add):
        array = array_of(bias)
        if array is not None and array.ndim == 1 and array_of(x) is None:
            return BiasGelu(node, x, bias, operator)
    return None


def condition(found: BiasGelu, context: Context) -> str | None:
    if not used_once(found.root.inputs[0]):
        return "the sum with the bias is used elsewhere too"
    if size(found.x, -1) != len(array_of(found.bias)):  # type: ignore[arg-type]
        return "the bias is not as long as the last axis, or that axis is not known"
    return None


def replacement(found: BiasGelu, context: Context) -> Mapping[ir.Value, ir.Value]:
    node = ir.node(found.operator, [found.x, found.bias], domain=CONTRIB)
    return {found.root.outputs[0]: node.outputs[0]}


REWRITE = Rewrite("fuse-bias-gelu", "a bias and its GELU in one node", pattern, condition, replacement, standard=False)
