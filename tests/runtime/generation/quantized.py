"""Quantized bundles of the tiny networks, and what PyTorch computes with the weights they hold.

Onnxruntime rounds activations to int8 in kernels that differ from CPU to CPU, and a value next to the middle between two steps
may fall either way: no other program can be expected to give the same logits. So PyTorch is compared with an `exact` bundle, in
which only that is left out: weights, scales, zero points, tied tables and forms are the real one's. What holds of answers among
themselves (alone, in a batch, piece by piece …) is tested on the real bundles.

Half precision rounds activations too, but only a little: there the real bundle is compared with PyTorch, within the error that
PyTorch makes itself when it computes in half precision (`Tiny.noise`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from exporters.quantized_graphs import Converted, convert, draft
from exporters.quantizers import weights as weights_module
from exporters.quantizers.blocks import unpack
from exporters.quantizers.fp16 import HalfSettings
from exporters.quantizers.rounding import rounded, rounded_columns
from exporters.quantizers.rows import Columns, Made
from exporters.quantizers.saturation import FULL, REDUCED, quantize_weight
from exporters.rollouts import calibration_of_text
from runtime.bundle import Bundle, write_bundle
from runtime.text import SPECIALS

FP32, INT8, MANY_ROWS, INT4 = "fp32", "int8-weights", "int8-weights-many-rows", "int4-weights"
DYNAMIC, STATIC, FP16, FP16_STORED, BF16 = "int8-dynamic", "int8-static", "fp16", "fp16-stored", "bf16"
# Schemes; of int8-weights also its form for many rows, of fp16 also its weights alone.
PRECISIONS = (FP32, INT8, MANY_ROWS, INT4, DYNAMIC, STATIC, FP16, FP16_STORED, BF16)
OF_ONE_FORM = tuple(precision for precision in PRECISIONS if precision != INT8)  # it reads in another form than it writes in
IN_INT8 = (INT8, MANY_ROWS, INT4, DYNAMIC, STATIC)  # activations are rounded too
_SIXTEEN_BITS = {FP16: torch.float16, FP16_STORED: torch.float16, BF16: torch.bfloat16}
_FEWEST_STORED = 2  # numbers in 16 bits: one alone is a constant of the computation and no weight


def bundle_of(precision: str) -> str:
    """The precision whose bundle this one is read from: two forms lie in one."""
    return INT8 if precision == MANY_ROWS else precision


def write_quantized(bundle: Bundle, precision: str, target: Path, *, exact: bool) -> None:
    scheme = FP16 if precision == FP16_STORED else precision
    calibration = calibration_of_text(bundle, _texts()) if precision == STATIC else None
    settings = HalfSettings("float32") if precision == FP16_STORED else None
    with pytest.MonkeyPatch.context() as patch:
        # networks as tiny as these are not worth it
        patch.setattr("exporters.quantizers.scheme.FEWEST_WEIGHTS", 0)
        patch.setattr(weights_module, "SMALLEST_TABLE", 0)
        patch.setattr("exporters.quantizers.recurrent._FEWEST_STORED", 0)
        patch.setattr("exporters.quantizers.recurrent.FEWEST_IN_STEPS", 0)
        patch.setattr("exporters.quantizers.stored._FEWEST_WEIGHTS", _FEWEST_STORED)
        if exact:
            patch.setattr(weights_module, "_INT8_ACTIVATIONS", 1)
            patch.setattr(
                weights_module, "quantize_rows", lambda x, rows, opset: ([helper.make_node("Identity", [x], [rows])], {})
            )
            patch.setattr(weights_module, "multiply_rows", _multiply_exactly)
            # biases in steps of what the activations are rounded to
            patch.setattr("exporters.quantizers.static_text.with_integer_biases", lambda model, flat: model)
        converted = convert(bundle, scheme, (), (), calibration, settings)
    if exact and precision == STATIC:
        converted = Converted({name: _without_rounding(model) for name, model in converted.models.items()}, converted.nodes)
    with TemporaryDirectory() as folder:
        write_bundle(target, *draft(bundle, converted, scheme, Path(folder)))


def _texts() -> list[list[int]]:
    """To calibrate on: enough for ranges, and done in an instant."""
    return np.random.default_rng(0).integers(len(SPECIALS), len(SPECIALS) + 5, (8, 12)).tolist()


def _multiply_exactly(rows: str, weight: str, matrix: Any, output: str, columns_of: Columns) -> Made:
    """Weights already multiplied out: onnxruntime would turn numbers with a scale into a product of rounded activations."""
    numbers, scales = columns_of(matrix)
    return [helper.make_node("MatMul", [rows, f"{weight}.columns"], [output])], {f"{weight}.columns": numbers * scales}


def _without_rounding(model: onnx.ModelProto) -> onnx.ModelProto:
    """int8-static with weights multiplied out, for the same reason, and activations as they are."""
    nodes, rounded_names = [], set()
    for node in model.graph.node:
        x, y = (node.input or [""])[0], node.output[0]
        if node.op_type == "QuantizeLinear" or (node.op_type == "DequantizeLinear" and x in rounded_names):
            nodes.append(helper.make_node("Identity", [x], [y]))
            rounded_names.add(y)
        elif node.op_type == "DequantizeLinear":  # (inputs, outputs), with a scale for each output
            nodes.append(helper.make_node("Cast", [x], [f"{y}.numbers"], to=TensorProto.FLOAT))
            nodes.append(helper.make_node("Mul", [f"{y}.numbers", node.input[1]], [y]))
        else:
            nodes.append(node)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    return made


class _Rounded(TorchFunctionMode):
    """Products, embeddings and recurrent layers compute with the weights that a form stores in place of theirs."""

    def __init__(self, network: Any, precision: str, *, by_columns: bool) -> None:
        super().__init__()
        self._static, self._by_columns = precision == STATIC, by_columns
        self._bits = int(precision[3])
        self._settings = {8: weights_module.EIGHT_BIT, 4: weights_module.FOUR_BIT}[self._bits].settings
        self._tied = network.embedding.weight if network.output.weight is None else None
        # What these multiply a state by is in blocks in either form: an encoder has a row for each text only, and int8-dynamic
        # one form for few texts and many.
        self._in_blocks = set(network.encoder.parameters()) if hasattr(network, "encode") else set()
        if precision == DYNAMIC:
            self._in_blocks |= set(network.parameters())
        self._kept: dict[tuple[Any, Tensor], Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_table = function is functional.embedding and (self._static or args[1].shape[1] % 16 == 0)
        if function is functional.linear or is_table:
            args = (args[0], self._stored(function, args[1]), *args[2:])
        elif function.__name__ in ("gru", "lstm", "rnn_tanh") and not self._static:  # which leaves them as they are
            inputs, states, *biases = args[2]
            states = self._stored(functional.linear, states, by_columns=states not in self._in_blocks)
            args = (*args[:2], [self._stored(functional.linear, inputs), states, *biases], *args[3:])
        return function(*args, **(kwargs or {}))

    def _stored(self, function: Any, weight: Tensor, *, by_columns: bool = True) -> Tensor:
        if (function, weight) not in self._kept:
            is_product, rows = function is functional.linear, weight.detach().numpy()
            if self._static:
                numbers, scales = quantize_weight(rows, REDUCED if is_product or weight is self._tied else FULL, 0)
                stored = numbers * scales[:, None]
            elif is_product and self._by_columns and by_columns:
                numbers, scales = rounded_columns(rows.T, self._settings)
                stored = np.ascontiguousarray((numbers * scales).T)
            else:
                bits = self._bits if is_product or weight is self._tied else 8
                stored = unpack(rounded(rows, bits, self._settings), rows.shape[1])
            self._kept[function, weight] = torch.from_numpy(stored)
        return self._kept[function, weight]


_rounded = cache(_Rounded)


@contextmanager
def _in_sixteen_bits(network: nn.Module, kind: torch.dtype) -> Iterator[None]:
    """Every weight, and every table that is no weight, as if it had been stored so."""
    kept = {tensor: tensor.data for tensor in (*network.parameters(), *network.buffers()) if tensor.numel() >= _FEWEST_STORED}
    for tensor, data in kept.items():
        if data.is_floating_point():
            tensor.data = data.to(kind).to(data.dtype)
    try:
        yield
    finally:
        for tensor, data in kept.items():
            tensor.data = data


@contextmanager
def as_stored(network: Any, precision: str, *, reading: bool) -> Iterator[None]:
    """PyTorch computes as the form of a decoder does that reads what is given, or that writes. See quantized_graphs.py."""
    if precision == FP32:
        yield
    elif precision in _SIXTEEN_BITS:
        with _in_sixteen_bits(network, _SIXTEEN_BITS[precision]):
            yield
    else:
        by_columns = precision in (MANY_ROWS, DYNAMIC) or (precision == INT8 and reading)
        with _rounded(network, precision, by_columns=by_columns):
            yield
