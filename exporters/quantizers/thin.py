"""Convolutions of an image's few colours, which int8 makes slower on one thread.

onnxruntime's integer convolution is slow for a kernel of fewer than four input channels. Float32 with its output rounded took,
of the time of int8 with its input rounded (one thread, onnxruntime 1.31, AVX512-VNNI; two or three runs):

    channels   kernel   pixels      float32 / int8
    1 → 32     3x3      32x32       0.63 to 0.65
    1 → 64     3x3      32x32       0.76 to 0.77
    1 → 32     7x7      32x32       0.59 to 0.61
    3 → 32     3x3      32x32       0.74 to 0.76
    3 → 32     5x5      32x32       0.86
    3 → 64     3x3      32x32       0.89 to 0.93, at 224x224 1.06 to 1.15
    4 → 32     3x3      32x32       1.14 to 1.16

Whole networks take 0.58 to 0.99 of the time on one thread so, and on two 0.65 to 1.04 (decision 0016).
Not where max pooling follows: onnxruntime rounds before it, and pools bytes of this layout about nine times as slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import onnx

from ..wiring import Wiring, attribute

_ACTIVATIONS = ("Relu", "Clip", "LeakyRelu")
_COLOURS, _OUTPUTS, _TAPS = 4, 64, 100  # fewer than these


def thin_convolutions(model: onnx.ModelProto) -> Mapping[str, str]:
    """Name of each → why it is left in float32."""
    wiring = Wiring.of(model)
    found = {}
    for node in model.graph.node:
        kernel = wiring.constants.get(node.input[1]) if node.op_type == "Conv" else None
        if kernel is None or attribute(node, "group", 1) != 1:
            continue
        outputs, colours, *_ = kernel.dims
        is_thin = colours < _COLOURS and outputs < _OUTPUTS and prod(kernel.dims[1:]) < _TAPS
        if is_thin and all(after.op_type != "MaxPool" for after in wiring.downstream(node, _ACTIVATIONS)):
            found[node.name] = f"a convolution from {colours} to {outputs} channels is faster in float32"
    return found


def outputs_of_thin(model: onnx.ModelProto) -> set[str]:
    """What such convolutions give, before and after their activation functions."""
    names = thin_convolutions(model)
    found: set[str] = set()
    for node in model.graph.node:
        if node.name in names or (node.op_type in _ACTIVATIONS and node.input[0] in found):
            found.update(node.output)
    return found
