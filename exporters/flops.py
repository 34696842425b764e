"""Floating-point operations of the nodes that matter, from shapes: a multiplication with an addition counts as two.

Counted are matrix products, convolutions, recurrences and attention. The rest (activations, norms, softmax) is one or two
orders of magnitude below and left out, as in PyTorch's own counter.

    MatMul          2 M N K a matrix                    Conv           2 · outputs · (inputs of a group · kernel)
    LSTM, GRU, RNN  2 T B (|W| + |R|)                   ConvTranspose  2 · inputs · (outputs of a group · kernel)
    attention       2 B T S (heads · head + heads · value head): a query row against all S keys, whatever the mask
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import onnx

from .wiring import attribute

Shape = tuple[int, ...]


class Tensors:
    """Shapes by name, as seen from one node. A shape that is not known raises KeyError: then the node is not counted."""

    def __init__(self, node: onnx.NodeProto, shapes: Mapping[str, Shape], values: Mapping[str, tuple[int, ...]]) -> None:
        self.node, self._shapes, self._values = node, shapes, values

    def input(self, index: int) -> Shape:
        return self._shapes[self.node.input[index]]

    def output(self, index: int = 0) -> Shape:
        return self._shapes[self.node.output[index]]

    def has(self, index: int) -> bool:
        return index < len(self.node.input) and bool(self.node.input[index])

    def value(self, index: int) -> int | None:
        """The value of an input of one integer, where it is known."""
        values = self._values.get(self.node.input[index]) if self.has(index) else None
        return values[0] if values and len(values) == 1 else None


def flops_of(
    node: onnx.NodeProto, shapes: Mapping[str, Shape], values: Mapping[str, tuple[int, ...]] | None = None
) -> int | None:
    """FLOPs of one run of `node`; 0 for what is not counted; None if its shapes are not known."""
    count = _COUNTERS.get(node.op_type)
    if count is None:
        return 0
    try:
        return count(Tensors(node, shapes, values or {}))
    except (KeyError, IndexError, ValueError, TypeError):  # a shape that is not known, or an attribute that is missing
        return None


def _matmul(at: Tensors) -> int:
    depth = at.input(0)[-2 if attribute(at.node, "transA", 0) else -1]
    return 2 * prod(at.output()) * depth


def _matmul_by_blocks(at: Tensors) -> int:
    return 2 * prod(at.output()) * int(attribute(at.node, "K"))


def _gemm(at: Tensors) -> int:
    depth = at.input(0)[0 if attribute(at.node, "transA", 0) else 1]
    return 2 * prod(at.output()) * depth


def _conv(weight: int) -> Callable[[Tensors], int]:
    return lambda at: 2 * prod(at.output()) * prod(at.input(weight)[1:])


def _conv_transpose(at: Tensors) -> int:
    return 2 * prod(at.input(0)) * prod(at.input(1)[1:])


def _recurrence(at: Tensors) -> int:
    steps, batch = at.input(0)[:2]  # in either layout: their product is what counts
    return 2 * steps * batch * (prod(at.input(1)) + prod(at.input(2)))


def _einsum(at: Tensors) -> int:
    equation = attribute(at.node, "equation").decode().replace(" ", "")
    terms = equation.split("->")[0].split(",")
    if "." in equation or len(terms) != 2:
        raise KeyError(equation)
    sizes = {letter: size for index, term in enumerate(terms) for letter, size in zip(term, at.input(index), strict=True)}
    return 2 * prod(sizes.values())


def _standard_attention(at: Tensors) -> int:
    if at.node.domain == "com.microsoft":
        return _fused_projection_attention(at)
    query, key, result = at.input(0), at.input(1), at.output()
    keys = key[-2] + (at.input(4)[2] if at.has(4) else 0)
    batch, steps = query[0], query[-2]
    width = query[2] if len(query) == 3 else query[1] * query[3]
    value_width = result[2] if len(result) == 3 else result[1] * result[3]
    return 2 * batch * steps * keys * (width + value_width)


def _fused_projection_attention(at: Tensors) -> int:
    """com.microsoft Attention: queries, keys and values are projected by one weight inside the node."""
    batch, steps = at.input(0)[:2]
    past = at.input(4)[3] if at.has(4) else 0
    return 2 * batch * steps * prod(at.input(1)) + 2 * batch * steps * (steps + past) * 2 * at.output()[2]


def _multi_head(at: Tensors) -> int:
    query, result = at.input(0), at.output()
    batch, steps = query[:2]
    key = at.input(1) if at.has(1) else query  # packed with the queries
    keys = (key[2] if len(key) == 4 else key[1]) + (at.input(6)[2] if at.has(6) else 0)
    width = query[2] if len(query) == 3 else query[2] * query[4]
    return 2 * batch * steps * keys * (width + result[2])


def _group_query(at: Tensors) -> int:
    batch, steps = at.input(0)[:2]
    keys = at.value(6)  # all of a preallocated cache is shaped, but only what is filled is read
    if keys is None:
        keys = at.output(1)[2] if len(at.node.output) > 1 and at.node.output[1] else steps
    return 2 * batch * steps * keys * 2 * at.output()[2]


_COUNTERS: dict[str, Callable[[Tensors], int]] = {
    **dict.fromkeys(("MatMul", "FusedMatMul", "TransposeMatMul", "MatMulInteger", "MatMulIntegerToFloat"), _matmul),
    **dict.fromkeys(("DynamicQuantizeMatMul", "QLinearMatMul"), _matmul),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4"), _matmul_by_blocks),
    **dict.fromkeys(("Gemm", "QGemm", "FusedGemm"), _gemm),
    **dict.fromkeys(("Conv", "ConvInteger", "FusedConv"), _conv(1)),
    "QLinearConv": _conv(3),
    "ConvTranspose": _conv_transpose,
    **dict.fromkeys(("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"), _recurrence),
    "Einsum": _einsum,
    "Attention": _standard_attention,
    "QAttention": _fused_projection_attention,
    "MultiHeadAttention": _multi_head,
    "GroupQueryAttention": _group_query,
}
