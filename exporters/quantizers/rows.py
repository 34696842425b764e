"""A product of many rows in int8: each row is quantized by its own largest value, each column of the weight by its own.

    y[r, c] ≈ a[r] / 127 · b[c] · Σ_k (u[r, k] - 128) · w[k, c],   a[r] = max|x[r]|,   u = round(127 · x / a) + 128

By row, since one scale for all rows would make a row's answer depend on its neighbours in the batch (and be less exact: 0.037
against 0.011 on rows of different size). Unsigned activations with a fixed zero point, since onnxruntime's kernels for signed
ones were 10 to 100 times slower. Weights take seven bits (see REDUCED_RANGE in scheme.py): 2 · 255 · 63 fits into 16 bits, so
that no CPU's kernel can saturate.

On the matrices of a GPT-2 small this takes a quarter of float32's time at 512 rows and half of MatMulNBits' at 16; of one row
MatMulNBits takes 0.85 of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from .blocks import Array

_LEVELS = 63  # of a weight, either side of zero
_ZERO = np.uint8(128)
_SMALLEST = np.float32(1e-30)  # of a row's largest value: a row of zeros gives zeros
_REDUCE_TAKES_AXES_AS_INPUT = 18  # opset

Columns = Callable[[Array], tuple[Array, Array]]
Made = tuple[list[onnx.NodeProto], dict[str, NDArray[Any]]]  # nodes, and the weights they read


def quantize_columns(matrix: Array) -> tuple[Array, Array]:
    """(inputs, outputs) float32 → int8 of the same shape, and the scale of each output."""
    scales = (np.abs(matrix).max(axis=0) / _LEVELS).astype(np.float32)
    scales[scales == 0] = 1
    return np.rint(matrix / scales).astype(np.int8), scales


def quantize_rows(x: str, rows: str, opset: int) -> Made:
    """`x` (…, inputs) → `rows`, uint8, and "`rows`.scale" (…, 1). Several products of the same rows share these."""
    weights: dict[str, NDArray[Any]] = {
        "rows.smallest": np.array(_SMALLEST),
        "rows.step": np.array(1 / 127, np.float32),
        "rows.zero": np.array(_ZERO),
    }
    largest = f"{rows}.largest"
    if opset >= _REDUCE_TAKES_AXES_AS_INPUT:
        weights["rows.axis"] = np.array([-1])
        reduce = helper.make_node("ReduceMax", [f"{rows}.abs", "rows.axis"], [largest], keepdims=1)
    else:
        reduce = helper.make_node("ReduceMax", [f"{rows}.abs"], [largest], axes=[-1], keepdims=1)
    nodes = [
        helper.make_node("Abs", [x], [f"{rows}.abs"]),
        reduce,
        helper.make_node("Max", [largest, "rows.smallest"], [f"{rows}.scale"]),
        helper.make_node("Div", [x, f"{rows}.scale"], [f"{rows}.scaled"]),
        helper.make_node("QuantizeLinear", [f"{rows}.scaled", "rows.step", "rows.zero"], [rows]),
    ]
    return nodes, weights


def multiply_rows(rows: str, weight: str, matrix: Array, output: str, columns_of: Columns = quantize_columns) -> Made:
    """The product of `rows` that `quantize_rows` made; `columns_of` turns the matrix into int8 and scales."""
    numbers, scales = columns_of(matrix)
    columns = f"{weight}.columns"
    inputs = [rows, columns, "rows.step", f"{columns}.scale", "rows.zero"]
    nodes = [
        helper.make_node("MatMulIntegerToFloat", inputs, [f"{output}.columns"], domain="com.microsoft"),
        helper.make_node("Mul", [f"{output}.columns", f"{rows}.scale"], [output]),
    ]
    return nodes, {columns: numbers, f"{columns}.scale": scales}
