"""fp16: weights and arithmetic in half precision, inputs and outputs kept in float32.

Half the size; faster on GPUs, not on CPUs.
"""

from __future__ import annotations

import onnx

from ..graph import copy_of
from .quiet import quiet
from .scheme import Request, Scheme


def apply(request: Request) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    keep = [node.name for node in request.model.graph.node if request.narrowed and node.name not in request.nodes]
    with quiet():
        return convert_float_to_float16(copy_of(request.model), keep_io_types=True, node_block_list=keep)


SCHEME = Scheme(
    name="fp16",
    description="half-precision weights and arithmetic; inputs and outputs stay float32",
    operators=("MatMul", "Gemm", "Conv", "ConvTranspose", "Gather", "Add", "Mul", "BatchNormalization", "LayerNormalization"),
    needs_calibration=False,
    apply=apply,
)
