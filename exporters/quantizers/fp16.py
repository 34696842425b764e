"""fp16 and bf16: weights in 16 bits, inputs and outputs kept in float32. Half the size.

fp16 computes in half precision too, which GPUs do faster and CPUs slower; with `arithmetic=float32` only the weights are
stored so (stored.py), which costs a CPU nothing. bf16 is stored only: onnxruntime's CPU provider has no bfloat16 kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from runtime.errors import OptionError

from ..weights import loaded
from .quiet import quiet
from .scheme import Request, Scheme
from .stored import store

_OPERATORS = (
    "MatMul",
    "Gemm",
    "Conv",
    "ConvTranspose",
    "Gather",
    "Add",
    "Mul",
    "BatchNormalization",
    "LayerNormalization",
    "RNN",
    "GRU",
    "LSTM",
)
_ARITHMETIC = ("half", "float32")


@dataclass(frozen=True)
class HalfSettings:
    arithmetic: str = "half"

    def __post_init__(self) -> None:
        if self.arithmetic not in _ARITHMETIC:
            raise OptionError(f"arithmetic is {self.arithmetic!r}, expected one of: {', '.join(_ARITHMETIC)}")


def apply(request: Request) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    if request.settings.arithmetic == "float32":
        return store(request.model, request.nodes, "fp16")
    narrowed = request.narrowed or request.by_node
    keep = [node.name for node in request.model.graph.node if narrowed and node.name not in request.nodes]
    typed = onnx.shape_inference.infer_shapes(request.model)  # while large weights are in files: no message holds them
    with quiet():
        return convert_float_to_float16(loaded(typed), keep_io_types=True, disable_shape_infer=True, node_block_list=keep)


SCHEME = Scheme(
    name="fp16",
    description="half-precision weights and arithmetic; inputs and outputs stay float32",
    operators=_OPERATORS,
    needs_calibration=False,
    apply=apply,
    takes_text=True,
    settings=HalfSettings(),
)
BF16 = Scheme(
    name="bf16",
    description="weights stored in bfloat16 and computed with in float32",
    operators=_OPERATORS,
    needs_calibration=False,
    apply=lambda request: store(request.model, request.nodes, "bf16"),
    takes_text=True,
    opset=13,
)
