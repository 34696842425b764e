"""int8-dynamic for networks on tokens: every row of a product's input is quantized by its own largest value (see rows.py).

onnxruntime's dynamic quantization has one scale for a whole input, so that the answer for one text would change with what else
is in the batch, and a text generated alone would differ from the same one in a batch.
"""

from __future__ import annotations

from dataclasses import replace

import onnx

from .scheme import NoSettings, Request
from .weights import EIGHT_BIT


def apply(request: Request) -> onnx.ModelProto:
    return EIGHT_BIT.apply(replace(request, many_rows=True, settings=EIGHT_BIT.settings))


ON_TOKENS = replace(
    EIGHT_BIT,
    name="int8-dynamic",
    description="int8 weights, every row of the activations quantized as it comes; no calibration",
    apply=apply,
    has_many_rows=False,
    settings=NoSettings(),
)
