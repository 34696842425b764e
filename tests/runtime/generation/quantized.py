"""Quantized bundles of the tiny networks, and what PyTorch computes with the weights they hold.

Onnxruntime rounds activations to int8 in kernels that differ from CPU to CPU, and a value next to the middle between two steps
may fall either way: no other program can be expected to give the same logits. So PyTorch is compared with an `exact` bundle, in
which only that is left out: weights, scales, zero points, tied tables and forms are the real one's. What holds of answers among
themselves (alone, in a batch, piece by piece …) is tested on the real bundles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from exporters.quantized_graphs import convert, draft
from exporters.quantizers import weights as weights_module
from exporters.quantizers.blocks import unpack
from exporters.quantizers.rounding import rounded, rounded_columns
from exporters.quantizers.rows import Columns, Made
from runtime.bundle import Bundle, write_bundle

FP32, INT8, MANY_ROWS, INT4 = "fp32", "int8-weights", "int8-weights-many-rows", "int4-weights"
PRECISIONS = (FP32, INT8, MANY_ROWS, INT4)  # schemes; of int8-weights also its form for many rows
OF_ONE_FORM = (FP32, MANY_ROWS, INT4)  # INT8 reads what it is given in another form than it writes in


def scheme_of(precision: str) -> str:
    return precision.removesuffix("-many-rows")


def write_quantized(bundle: Bundle, scheme: str, target: Path, *, exact: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # networks as tiny as these are not worth it
        patch.setattr("exporters.quantizers.scheme.FEWEST_WEIGHTS", 0)
        patch.setattr(weights_module, "SMALLEST_TABLE", 0)
        patch.setattr("exporters.quantizers.recurrent._FEWEST_STORED", 0)
        patch.setattr("exporters.quantizers.recurrent.FEWEST_IN_STEPS", 0)
        if exact:
            patch.setattr(weights_module, "_INT8_ACTIVATIONS", 1)
            patch.setattr(weights_module, "quantize_rows", lambda x, opset: ([], {}))
            patch.setattr(weights_module, "multiply_rows", _multiply_exactly)
        manifest, files = draft(bundle, convert(bundle, scheme, (), (), None), scheme)
    write_bundle(target, manifest, files)


def _multiply_exactly(x: str, weight: str, matrix: Any, output: str, columns_of: Columns) -> Made:
    """Weights already multiplied out: onnxruntime would turn numbers with a scale into a product of rounded activations."""
    numbers, scales = columns_of(matrix)
    return [helper.make_node("MatMul", [x, f"{weight}.columns"], [output])], {f"{weight}.columns": numbers * scales}


class _Rounded(TorchFunctionMode):
    """Products, embeddings and recurrent layers compute with the weights that a form stores in place of theirs."""

    def __init__(self, network: Any, bits: int, *, by_columns: bool) -> None:
        super().__init__()
        self._bits, self._by_columns = bits, by_columns
        self._settings = {8: weights_module.EIGHT_BIT, 4: weights_module.FOUR_BIT}[bits].settings
        self._tied = network.embedding.weight if network.output.weight is None else None
        self._of_encoder = set(network.encoder.parameters()) if hasattr(network, "encode") else set()
        self._kept: dict[tuple[Any, Tensor], Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear or (function is functional.embedding and args[1].shape[1] % 16 == 0):
            args = (args[0], self._stored(function, args[1]), *args[2:])
        elif function.__name__ in ("gru", "lstm", "rnn_tanh"):
            inputs, states, *biases = args[2]
            # What an encoder multiplies its states by is in blocks in either form: it has a row for each text only.
            states = self._stored(functional.linear, states, by_columns=states not in self._of_encoder)
            args = (*args[:2], [self._stored(functional.linear, inputs), states, *biases], *args[3:])
        return function(*args, **(kwargs or {}))

    def _stored(self, function: Any, weight: Tensor, *, by_columns: bool = True) -> Tensor:
        if (function, weight) not in self._kept:
            rows = weight.detach().numpy()
            if function is functional.linear and self._by_columns and by_columns:
                numbers, scales = rounded_columns(rows.T, self._settings)
                stored = np.ascontiguousarray((numbers * scales).T)
            else:
                bits = self._bits if function is functional.linear or weight is self._tied else 8
                stored = unpack(rounded(rows, bits, self._settings), rows.shape[1])
            self._kept[function, weight] = torch.from_numpy(stored)
        return self._kept[function, weight]


_rounded = cache(_Rounded)


@contextmanager
def as_stored(network: Any, precision: str, *, reading: bool) -> Iterator[None]:
    """PyTorch computes as the form of a decoder does that reads what is given, or that writes. See quantized_graphs.py."""
    if precision == FP32:
        yield
        return
    by_columns = precision == MANY_ROWS or (precision == INT8 and reading)
    with _rounded(network, int(precision[3]), by_columns=by_columns):
        yield
