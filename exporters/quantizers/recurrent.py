"""RNN, GRU and LSTM with quantized weights. onnxruntime has no such operator for a GRU or an RNN, and for an LSTM one that
quantizes all rows and steps by their common range, so that an answer would depend on its neighbours. There are two ways:

int8     The operator is taken apart (steps.py): the product of the inputs for all steps at once, and a Scan whose step holds
         the product of the state. Both are quantized as other products are (weights.py).
float32  The weights are stored in blocks and become float32 when the graph is loaded, where onnxruntime computes what depends
         on constants alone. The operator and its speed stay what they were.

Chosen by measuring one layer on one core, int8 against the plain operator, a row of 8 steps: a GRU of 64 states takes 3 times
as long, of 128 twice, of 256 as long, and of 512 it takes 0.55 of the time (0.45 at 16 rows); an LSTM 3, 1.9, 0.9 and 0.52. A
step of a Scan costs about 8 µs, whatever its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from ..wiring import attribute
from .blocks import Array
from .scheme import Shapes

OPERATORS = ("RNN", "GRU", "LSTM")
AUTO, INT8, FLOAT32 = "auto", "int8", "float32"
STEP_BY_STEP = "quantized step by step"
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
FEWEST_IN_STEPS = 3 * 256 * 256  # weights of one direction's state from which on int8 is no slower
_FEWEST_STORED = 4096  # weights: below that nothing is saved
_USUAL = {"RNN": (["Tanh"], ["Relu"]), "GRU": (["Sigmoid", "Tanh"],), "LSTM": (["Sigmoid", "Tanh", "Tanh"],)}


def why_not(node: onnx.NodeProto, shapes: Shapes) -> str | None:
    matrices = [shapes.get(name, ()) for name in node.input[1:3]]
    if any(len(shape) != 3 for shape in matrices):
        return "only weights that are constant have a quantized form"
    weights = sum(map(prod, matrices))
    return f"{weights} weights are too few to save anything" if weights < _FEWEST_STORED else None


def arithmetic_of(node: onnx.NodeProto, shapes: Shapes, wanted: str = AUTO) -> tuple[str, str]:
    """INT8 or FLOAT32, and the reason."""
    if objection := _only_the_operator_can(node, shapes):
        return FLOAT32, f"stored in blocks, computed in float32: {objection}"
    weights = prod(shapes[node.input[2]][1:])
    if wanted != AUTO:
        chosen, why = wanted, f"recurrence={wanted} was asked for"
    elif weights < FEWEST_IN_STEPS:
        chosen, why = FLOAT32, f"with {weights} weights of the state its own operator is faster"
    else:
        chosen, why = INT8, f"with {weights} weights of the state that is no slower than its own operator"
    return chosen, f"{STEP_BY_STEP if chosen == INT8 else 'stored in blocks, computed in float32'}: {why}"


def _only_the_operator_can(node: onnx.NodeProto, shapes: Shapes) -> str | None:
    for name in ("clip", "layout", "input_forget", "activation_alpha", "activation_beta"):
        if attribute(node, name):
            return f"it has {name}"
    if len(node.input) > 7 and node.input[7]:
        return "it has peepholes"
    if len(node.input) > 3 and node.input[3] and node.input[3] not in shapes:
        return "its bias is not constant"
    given = [name.decode() for name in attribute(node, "activations", [])]
    directions = shapes[node.input[1]][0]
    if given and not any(given == usual * directions for usual in _USUAL[node.op_type]):
        return f"it has the activations {', '.join(given)}"
    return None


@dataclass(frozen=True)
class Layer:
    """What a recurrent node computes, with arrays in place of names. d counts directions."""

    kind: str
    backwards: tuple[bool, ...]  # of each direction
    hidden: int
    inputs: Array  # (d, gates·hidden, input)
    states: Array  # (d, gates·hidden, hidden)
    bias: Array  # (d, gates·hidden), of all that can be added before the recurrence
    state_bias: Array | None  # … and of what cannot: that of a GRU which resets what it was added to
    resets_product: bool  # a GRU's: r ⊙ (U h + b), where others have U (r ⊙ h)
    activation: str  # of an RNN

    @classmethod
    def of(cls, node: onnx.NodeProto, inputs: Array, states: Array, biases: Array | None) -> Layer:
        count, width, hidden = states.shape
        given, recurrent = np.zeros((2, count, width), np.float32) if biases is None else np.split(biases, 2, axis=1)
        resets_product = node.op_type == "GRU" and bool(attribute(node, "linear_before_reset", 0))
        state_bias = None
        if resets_product:
            early = np.arange(width) < 2 * hidden
            state_bias, recurrent = np.where(early, 0, recurrent), np.where(early, recurrent, 0)
        direction = attribute(node, "direction", b"forward").decode()
        return cls(
            node.op_type,
            {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction],
            hidden,
            inputs,
            states,
            (given + recurrent).astype(np.float32),
            None if state_bias is None or not state_bias.any() else state_bias.astype(np.float32),
            resets_product,
            attribute(node, "activations", [b"Tanh"])[0].decode(),
        )
