"""The parts that attention is recognised by: heads, and the weights made of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from .nodes import array_of, attribute, either_way, is_last_axis, made_by, rank, scalar_of

_LOW = -1e30  # a mask this low hides a score whatever the score is


@dataclass(frozen=True)
class Heads:
    """A tensor (batch, heads, time, head): `split` itself, unless it is never made in that order of axes; `joined`
    (batch, time, width) if it was split from one; and the `past` in front of it, in which case `joined` is what follows."""

    split: ir.Value | None
    joined: ir.Value | None = None
    past: ir.Value | None = None


@dataclass(frozen=True)
class Scores:
    """softmax(scale · query keyᵀ, masked); `hidden` is the number that a boolean mask puts where a key is not visible."""

    query: Heads
    key: Heads
    scale: float
    mask: ir.Value | None
    hidden: ir.Value | None
    refusal: str | None = None


def heads_of(value: ir.Value) -> Heads:
    concat = made_by(value, "Concat")
    if concat is not None and len(concat.inputs) == 2 and attribute(concat, "axis", 0) in (2, -2):
        return Heads(value, _joined(concat.inputs[1]), concat.inputs[0])
    return Heads(value, _joined(value))


def scores_of(value: ir.Value) -> Scores | None:
    """Taken apart from the weights backwards."""
    softmax, guarded = _softmax(value)
    if softmax is None:
        return None
    scores, mask, hidden = _unmasked(softmax.inputs[0])
    scores, scale = _unscaled(scores)
    product = made_by(scores, "MatMul")
    if product is None:
        return None
    query, query_scale = _unscaled(product.inputs[0])
    transposed, key_scale = _unscaled(product.inputs[1])
    key = _untransposed(transposed)
    if key is None:
        return None
    refusal = None
    if not is_last_axis(attribute(softmax, "axis", -1), softmax.inputs[0]):
        refusal = "the softmax is not over the keys"
    elif hidden is not None and (scalar_of(hidden) or 0.0) > _LOW:
        refusal = "the mask puts a number in place of hidden scores that is not low enough to be added instead"
    elif guarded and not _is_finite(mask, hidden):
        refusal = "the weights are guarded against NaN, which the mask may cause"
    return Scores(heads_of(query), key, scale * query_scale * key_scale, mask, hidden, refusal)


def _softmax(value: ir.Value) -> tuple[ir.Node | None, bool]:
    """The Softmax, and whether Where(IsNaN(weights), 0, weights) stands after it."""
    where = made_by(value, "Where")
    if where is None:
        return made_by(value, "Softmax"), False
    check = made_by(where.inputs[0], "IsNaN")
    if check is None or check.inputs[0] is not where.inputs[2] or scalar_of(where.inputs[1]) != 0.0:
        return None, False
    return made_by(where.inputs[2], "Softmax"), True


def _unmasked(scores: ir.Value) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
    """(scores, mask, number for hidden scores or None if the mask is added)."""
    if where := made_by(scores, "Where"):
        visible, kept, hidden = where.inputs
        if scalar_of(hidden) is not None:
            return kept, visible, hidden
    if add := made_by(scores, "Add"):
        for inner, mask in either_way(add):
            if made_by(_unscaled(inner)[0], "MatMul") is not None and array_of(inner) is None:
                return inner, mask, None
    return scores, None, None


def _unscaled(value: ir.Value) -> tuple[ir.Value, float]:
    if node := made_by(value, "Mul"):
        for inner, factor in either_way(node):
            if (number := scalar_of(factor)) is not None:
                return inner, number
    if node := made_by(value, "Div"):
        number = scalar_of(node.inputs[1])
        if number:
            return node.inputs[0], 1.0 / number
    return value, 1.0


def _untransposed(value: ir.Value) -> Heads | None:
    """k of kᵀ: by Transpose of the last two axes, or of (batch, time, heads, head), or on rows between two Reshapes."""
    if transpose := made_by(value, "Transpose"):
        order = list(attribute(transpose, "perm", []))
        if order == [0, 1, 3, 2]:
            return heads_of(transpose.inputs[0])
        if order == [0, 2, 3, 1] and (joined := _before_reshape(transpose.inputs[0])) is not None:
            return Heads(None, joined)
    if after := made_by(value, "Reshape"):
        transpose = made_by(after.inputs[0], "Transpose")
        before = None if transpose is None else made_by(transpose.inputs[0], "Reshape")
        if before is None or transpose is None or list(attribute(transpose, "perm", [])) != [0, 2, 1]:
            return None
        split = before.inputs[0]
        return heads_of(split) if rank(split) == 4 and rank(value) == 4 else None
    return None


def _joined(value: ir.Value) -> ir.Value | None:
    """(batch, time, width) of Transpose(Reshape(it))."""
    transpose = made_by(value, "Transpose")
    if transpose is None or list(attribute(transpose, "perm", [])) != [0, 2, 1, 3]:
        return None
    return _before_reshape(transpose.inputs[0])


def _before_reshape(value: ir.Value) -> ir.Value | None:
    """(batch, time, width) of (batch, time, heads, head)."""
    reshape = made_by(value, "Reshape")
    if reshape is None or rank(reshape.inputs[0]) != 3 or rank(value) != 4:
        return None
    return reshape.inputs[0]


def _is_finite(mask: ir.Value | None, hidden: ir.Value | None) -> bool:
    """Whether no row of the scores can be all −∞: no mask, or one made by Where of finite numbers."""
    if mask is None:
        return True
    if hidden is not None:
        return math.isfinite(scalar_of(hidden) or 0.0)
    where = made_by(mask, "Where")
    numbers = [scalar_of(value) for value in where.inputs[1:]] if where is not None else [None]
    return all(number is not None and math.isfinite(number) for number in numbers)
