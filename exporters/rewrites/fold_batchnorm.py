"""BatchNormalization after a Conv, ConvTranspose, Gemm or MatMul → into its weights (Ioffe and Szegedy, 2015).

At inference it is a fixed line for each channel, y = a x + c with a = scale / √(variance + ε) and c = bias − a mean, and a
line after a linear map is a linear map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .engine import Context, Rewrite, weight
from .nodes import array_of, attribute, is_op, made_by, rank, used_once

LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True)
class LinearThenNorm:
    root: ir.Node  # the BatchNormalization
    linear: ir.Node


def pattern(node: ir.Node) -> LinearThenNorm | None:
    if not is_op(node, "BatchNormalization"):
        return None
    linear = made_by(node.inputs[0], *LINEAR)
    return None if linear is None else LinearThenNorm(node, linear)


def condition(found: LinearThenNorm, context: Context) -> str | None:
    linear, norm = found.linear, found.root
    if attribute(norm, "training_mode", 0) or any(output.uses() for output in norm.outputs[1:]):
        return "the normalization is in training mode"
    if not used_once(linear.outputs[0]):
        return f"what the {linear.op_type} gives is used elsewhere too"
    if any(array_of(value) is None for value in (*norm.inputs[1:], *linear.inputs[1:]) if value is not None):
        return "a weight is computed at run time"
    if not used_once(linear.inputs[1]):
        return "the weight is shared with another node and would be stored twice"
    if linear.op_type == "MatMul" and (rank(linear.outputs[0]) != 2 or array_of(linear.inputs[1]).ndim != 2):  # type: ignore[union-attr]
        return "the channels of the normalization are not the columns of the MatMul"
    if linear.op_type == "Gemm" and _bias(linear) is not None and _bias(linear).size not in (1, _channels(norm)):  # type: ignore[union-attr]
        return "the Gemm adds a matrix, not a bias"
    return None


def replacement(found: LinearThenNorm, context: Context) -> Mapping[ir.Value, ir.Value]:
    linear, norm = found.linear, found.root
    scale, shift, mean, variance = (array_of(value).astype(np.float64) for value in norm.inputs[1:5])  # type: ignore[union-attr]
    slope = scale / np.sqrt(variance + float(attribute(norm, "epsilon", 1e-5)))
    kernel = array_of(linear.inputs[1])
    assert kernel is not None
    bias = _bias(linear)
    start = np.zeros_like(mean) if bias is None else bias.reshape(-1) * float(attribute(linear, "beta", 1.0))
    new_kernel = weight("weight", (kernel * _along_outputs(linear, slope, kernel)).astype(kernel.dtype))
    new_bias = weight("bias", (slope * (start - mean) + shift).astype(kernel.dtype))
    if linear.op_type == "MatMul":
        product = ir.node("MatMul", [linear.inputs[0], new_kernel])
        node = ir.node("Add", [product.outputs[0], new_bias])
    else:
        attributes = [item for item in linear.attributes.values() if item.name != "beta"]
        node = ir.Node("", linear.op_type, [linear.inputs[0], new_kernel, new_bias], attributes)
    return {norm.outputs[0]: node.outputs[0]}


def _along_outputs(linear: ir.Node, slope: NDArray[Any], kernel: NDArray[Any]) -> NDArray[Any]:
    """The slopes shaped to multiply the kernel along its output channels."""
    if linear.op_type == "Conv":  # (out, in / groups, …)
        return slope.reshape(-1, *[1] * (kernel.ndim - 1))
    if linear.op_type == "ConvTranspose":  # (in, out / groups, …): rows of group g feed the g-th share of the outputs
        groups = int(attribute(linear, "group", 1))
        shares = np.repeat(slope.reshape(groups, -1), kernel.shape[0] // groups, axis=0)  # (in, out / groups)
        return shares.reshape(*shares.shape, *[1] * (kernel.ndim - 2))
    if linear.op_type == "Gemm" and attribute(linear, "transB", 0):
        return slope[:, None]
    return slope


def _bias(linear: ir.Node) -> NDArray[Any] | None:
    return array_of(linear.inputs[2]) if len(linear.inputs) > 2 and linear.inputs[2] is not None else None


def _channels(norm: ir.Node) -> int:
    return int(array_of(norm.inputs[1]).size)  # type: ignore[union-attr]


REWRITE = Rewrite("fold-batchnorm", "batch normalization into the weights before it", pattern, condition, replacement)
