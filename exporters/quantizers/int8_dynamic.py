"""int8-dynamic: weights in int8, activations quantized on the fly by their own range. No calibration data.

Good for matrix products. Convolutions in this form are several times slower than float32 on CPUs; the gate finds that out.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx

from .quiet import quiet
from .scheme import REDUCED_RANGE, Request, Scheme


def apply(request: Request) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # Gemm is first split into MatMul and Add, and the product keeps the name with a suffix.
    nodes = [*request.nodes, *(f"{name}_MatMul" for name in request.nodes)]
    with tempfile.TemporaryDirectory() as folder, quiet():
        target = Path(folder) / "quantized.onnx"
        quantize_dynamic(
            request.model,
            target,
            op_types_to_quantize=[*request.operators, "MatMul"],
            nodes_to_quantize=nodes,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=REDUCED_RANGE,
        )
        return onnx.load(target)


SCHEME = Scheme(
    name="int8-dynamic",
    description="int8 weights, activations quantized as they come; no calibration",
    operators=("MatMul", "Gemm", "Conv", "Gather", "LSTM"),
    needs_calibration=False,
    apply=apply,
)
