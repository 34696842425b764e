"""Split, GroupQueryAttention → GroupQueryAttention of the packed tensor: the kernel takes query, key and value side by side.

GroupQueryAttention(Split(x), …)  →  GroupQueryAttention(x, –, –, …)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from .engine import Context, Rewrite
from .nodes import CONTRIB, array_of, attribute, is_op, made_by, rank, used_once


@dataclass(frozen=True)
class SplitAttention:
    root: ir.Node
    split: ir.Node


def pattern(node: ir.Node) -> SplitAttention | None:
    if not is_op(node, "GroupQueryAttention", domains=(CONTRIB,)) or len(node.inputs) < 3:
        return None
    split = made_by(node.inputs[0], "Split")
    if split is None or tuple(node.inputs[:3]) != tuple(split.outputs):
        return None
    return SplitAttention(node, split) if all(used_once(value) for value in split.outputs) else None


def condition(found: SplitAttention, context: Context) -> str | None:
    axis, axes = attribute(found.split, "axis", 0), rank(found.split.inputs[0])
    if axis != -1 and axis + 1 != axes:
        return "the Split is not along the last axis"
    sizes = array_of(found.split.inputs[1]) if len(found.split.inputs) > 1 else None
    heads = [attribute(found.root, name, 0) for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
    if sizes is None or any(int(size) * heads[0] != int(sizes[0]) * head for size, head in zip(sizes, heads, strict=True)):
        return "the parts of the Split do not have the sizes of query, key and value"
    return None


def replacement(found: SplitAttention, context: Context) -> Mapping[ir.Value, ir.Value]:
    inputs = [found.split.inputs[0], None, None, *found.root.inputs[3:]]
    packed = ir.Node(
        CONTRIB,
        "GroupQueryAttention",
        inputs,
        [ir.Attr(item.name, item.type, item.value) for item in found.root.attributes.values()],
        num_outputs=len(found.root.outputs),
    )
    return dict(zip(found.root.outputs, packed.outputs, strict=True))


REWRITE = Rewrite("pack-attention", "attention takes packed projections as they are", pattern, condition, replacement)
