"""Scaled dot-product attention in heads, written out → MultiHeadAttention of onnxruntime.

    softmax(scale · q kᵀ + mask) v,  q (batch, heads, time, head), k and v (batch, heads, source, head)

The pieces come in the dialects of several exporters: the scale on q, on k, on both, or on the scores; the mask added, or
chosen with Where; kᵀ by one Transpose or by three nodes; a guard against NaN rows. Keys and values may follow a past, which is
then the fused node's own input, and the longer ones its outputs; or they come from elsewhere, in heads, as in cross-attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .attention_parts import Heads, Scores, heads_of, scores_of
from .engine import Context, Rewrite, weight
from .nodes import CONTRIB, attribute, depends_on, is_op, made_by, rank, size, used_once


@dataclass(frozen=True)
class Attention:
    root: ir.Node  # the last Transpose, from heads back to time
    scores: Scores
    query: Heads
    key: Heads
    value: Heads
    heads: int | None
    merge: ir.Node | None  # the Reshape after the root that joins the heads, if it is the root's only use


def pattern(node: ir.Node) -> Attention | None:
    if not is_op(node, "Transpose") or list(attribute(node, "perm", [])) != [0, 2, 1, 3]:
        return None
    product = made_by(node.inputs[0], "MatMul")
    scores = None if product is None else scores_of(product.inputs[0])
    if product is None or scores is None:
        return None
    query, key, value = scores.query, scores.key, heads_of(product.inputs[1])
    output = node.outputs[0]
    user = output.uses()[0].node if used_once(output) else None
    return Attention(node, scores, query, key, value, _head_count(query, key, value), user if is_op(user, "Reshape") else None)


def condition(found: Attention, context: Context) -> str | None:
    if found.scores.refusal:
        return found.scores.refusal
    if found.query.joined is None or found.query.past is not None:
        return "the queries are not heads of one (batch, time, width) tensor"
    if found.heads is None:
        return "the number of heads is not known"
    if found.merge is None:
        return "the heads are not joined by a Reshape after the last Transpose"
    if _keys_and_values(found) is None:
        return "keys and values come in different forms, one in heads and one not"
    if found.scores.mask is not None and rank(found.scores.mask) is None:
        return "the number of axes of the mask is not known"
    if found.scores.mask is not None and size(found.scores.mask, -1) == 1:
        return "the mask is the same for all keys, which the kernel does not broadcast"
    return None


def replacement(found: Attention, context: Context) -> Mapping[ir.Value, ir.Value]:
    key, value, past = found.key, found.value, _past_of(found)
    node = ir.node(
        "MultiHeadAttention",
        [found.query.joined, *(_keys_and_values(found) or ()), None, None, _bias(found)]
        + ([key.past, value.past] if past else []),
        {"num_heads": int(found.heads or 1), "scale": float(found.scores.scale)},
        domain=CONTRIB,
        num_outputs=3 if past else 1,
    )
    outputs = _joined_as_before(found, node.outputs[0])
    if past and key.split is not None and value.split is not None:
        outputs |= {key.split: node.outputs[1], value.split: node.outputs[2]}
    return outputs


def _keys_and_values(found: Attention) -> tuple[ir.Value, ir.Value] | None:
    """Both joined, or both in heads: the kernel takes no other."""
    key, value = found.key, found.value
    own_past = _past_of(found)
    if key.joined is not None and value.joined is not None and (own_past or (key.past is None and value.past is None)):
        return key.joined, value.joined
    return None if key.split is None or value.split is None else (key.split, value.split)


def _joined_as_before(found: Attention, context: ir.Value) -> dict[ir.Value, ir.Value]:
    """The joined heads in the shape the old graph gave them: (batch, time, width), or rows."""
    merge = found.merge
    assert merge is not None
    assert found.query.joined is not None
    width = size(found.value.joined, -1) if found.value.joined is not None else None
    width = width or (found.heads or 0) * (size(found.value.split, -1) or 0 if found.value.split is not None else 0)
    context.shape = ir.Shape([*found.query.joined.shape[:2], width or None])
    context.type = merge.outputs[0].type
    if rank(merge.outputs[0]) == 3:
        return {merge.outputs[0]: context}
    return {
        merge.outputs[0]: ir.node(
            "Reshape", [context, merge.inputs[1]], {"allowzero": int(attribute(merge, "allowzero", 0))}
        ).outputs[0]
    }


def _past_of(found: Attention) -> bool:
    """Whether both pasts can be the fused node's own inputs: nothing it needs may depend on the longer keys and values."""
    key, value = found.key, found.value
    if key.past is None or value.past is None or key.joined is None or value.joined is None:
        return False
    if key.split is None or value.split is None:
        return False
    needed = [found.query.joined, key.joined, value.joined, key.past, value.past, found.scores.mask]
    return not depends_on(needed, [key.split.producer(), value.split.producer()])


def _bias(found: Attention) -> ir.Value | None:
    """The mask with its four axes; the kernel broadcasts batch and heads, but not time."""
    mask = found.scores.mask
    if mask is None:
        return None
    if found.scores.hidden is not None:  # Where(visible, scores, low) → scores + Where(visible, 0, low)
        mask = ir.node("Where", [mask, weight("zero", np.zeros((), np.float32)), found.scores.hidden]).outputs[0]
    if rank(found.scores.mask) == 4 and size(found.scores.mask, -2) != 1:
        return mask
    one = weight("one", np.ones(1, np.int64))
    time = ir.node("Gather", [ir.node("Shape", [found.query.joined]).outputs[0], one], {"axis": 0}).outputs[0]
    shape = ir.node("Concat", [one, one, time, one], {"axis": 0}).outputs[0]
    return ir.node("Expand", [mask, shape]).outputs[0]


def _head_count(query: Heads, key: Heads, value: Heads) -> int | None:
    """From the axis of heads where it is fixed, else from width and head size."""
    for part in (query, key, value):
        for source in (part.split, part.past):
            if source is not None and (count := size(source, 1)) is not None:
                return count
    width = None if query.joined is None else size(query.joined, -1)
    head = None if query.split is None else size(query.split, -1)
    return width // head if width and head else None


REWRITE = Rewrite("fuse-attention", "attention in heads becomes one node", pattern, condition, replacement, standard=False)
