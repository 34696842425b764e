"""Squeeze of a Slice that takes everything → Squeeze.

Tracing a loop over an axis of one (the one layer of a state, the one token of a step) leaves such slices behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from .engine import Context, Rewrite
from .nodes import array_of, is_op, made_by, rank, size


@dataclass(frozen=True)
class SqueezedSlice:
    root: ir.Node
    slice: ir.Node


def pattern(node: ir.Node) -> SqueezedSlice | None:
    if not is_op(node, "Squeeze"):
        return None
    before = made_by(node.inputs[0], "Slice")
    return None if before is None or len(before.inputs) < 4 else SqueezedSlice(node, before)


def condition(found: SqueezedSlice, context: Context) -> str | None:
    x, *bounds = found.slice.inputs
    starts, ends, axes, *rest = (array_of(value) for value in bounds)
    steps = rest[0] if rest else [1] * len(starts) if starts is not None else None
    if x is None or starts is None or ends is None or axes is None or steps is None:
        return "what the slice takes is computed at run time"
    if rank(x) is None:
        return "the axes are not known"
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        extent = size(x, int(axis))
        if extent is None or start != 0 or step != 1 or end < extent:
            return "the slice does not take everything, or that is not known"
    return None


def replacement(found: SqueezedSlice, context: Context) -> Mapping[ir.Value, ir.Value]:
    squeeze = ir.node("Squeeze", [found.slice.inputs[0], *found.root.inputs[1:]], dict(found.root.attributes))
    return {found.root.outputs[0]: squeeze.outputs[0]}


REWRITE = Rewrite("skip-slices", "slices that take everything go", pattern, condition, replacement)
