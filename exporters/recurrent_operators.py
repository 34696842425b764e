"""Recurrent layers as ONNX's own RNN, GRU and LSTM, with any batch and number of steps.

Left to itself the tracer unrolls nn.RNN to the example's steps, and freezes the steps of nn.GRU and nn.LSTM in what the graph
declares. So while a network is traced, its recurrent layers put the operator into the graph themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.onnx.ops import symbolic_multi_out

State = tuple[Tensor, ...]

# torch keeps gates in the order r, z, n (GRU) and i, f, g, o (LSTM); ONNX wants z, r, n and i, o, f, g.
_GATES = {"rnn": (0,), "gru": (1, 0, 2), "lstm": (0, 3, 1, 2)}


def recurrent_operator(
    kind: str,
    x: Tensor,
    weights: Sequence[Sequence[Tensor]],
    state: State,
    lengths: Tensor | None = None,
    activation: str = "Tanh",
) -> tuple[Tensor, State]:
    """One layer over x (time, batch, input), the layout of onnxruntime's kernels → (time, batch, directions·hidden), state.

    `weights` are W_i, W_h, b_i, b_h of each direction as torch.nn keeps them, `state` is (directions, batch, hidden) each.
    """
    time, batch, _ = x.shape
    count, hidden = len(weights), state[0].shape[-1]
    joined = [torch.stack(parts) for parts in zip(*(_in_onnx_order(kind, *each) for each in weights), strict=True)]
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": "bidirectional" if count > 1 else "forward"}
    if kind == "gru":
        attributes["linear_before_reset"] = 1  # torch's candidate is tanh(W x + r ⊙ (U h + b))
    if activation != "Tanh":
        attributes["activations"] = [activation] * count
    y, *after = symbolic_multi_out(
        kind.upper(),
        (x, *joined, None if lengths is None else lengths.to(torch.int32), *state),
        attributes,
        dtypes=[x.dtype] * (1 + len(state)),
        shapes=[(time, count, batch, hidden), *((count, batch, hidden) for _ in state)],
    )
    return y.squeeze(1) if count == 1 else y.transpose(1, 2).flatten(2), tuple(after)


def _in_onnx_order(kind: str, w_i: Tensor, w_h: Tensor, b_i: Tensor, b_h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W, R and both biases, with the gates in ONNX's order."""

    def reordered(weight: Tensor) -> Tensor:
        gates = weight.chunk(len(_GATES[kind]))
        return torch.cat([gates[index] for index in _GATES[kind]]) if len(gates) > 1 else weight

    return reordered(w_i), reordered(w_h), torch.cat([reordered(b_i), reordered(b_h)])


@contextmanager
def recurrent_modules_as_operators() -> Iterator[None]:
    """Within the block nn.RNN, nn.GRU and nn.LSTM give ONNX operators when they are traced for export."""
    originals = {kind: kind.forward for kind in (nn.RNN, nn.GRU, nn.LSTM)}
    for kind, forward in originals.items():
        kind.forward = _traced(forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, forward in originals.items():
            kind.forward = forward  # type: ignore[method-assign]


def _traced(original: Any) -> Any:
    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
        if not torch.onnx.is_in_onnx_export() or not isinstance(input, Tensor) or input.dim() != 3 or self.proj_size:
            return original(self, input, hx)  # a packed sequence, one sequence without a batch, or a projection
        return _run(self, input, hx)

    return forward


def _run(module: nn.RNNBase, x: Tensor, given: Any) -> tuple[Tensor, Any]:
    kind = module.mode.split("_")[0].lower()
    directions = 2 if module.bidirectional else 1
    x = x.transpose(0, 1) if module.batch_first else x
    parts = 2 if kind == "lstm" else 1
    if given is None:
        state: State = (x.new_zeros(module.num_layers * directions, x.shape[1], module.hidden_size),) * parts
    else:
        state = tuple(given) if kind == "lstm" else (given,)
    finals = []
    for layer in range(module.num_layers):
        weights = [_weights_of(module, layer, "_reverse" if reverse else "") for reverse in range(directions)]
        before = tuple(part[layer * directions : (layer + 1) * directions] for part in state)
        activation = "Relu" if module.mode == "RNN_RELU" else "Tanh"
        x, after = recurrent_operator(kind, x, weights, before, activation=activation)
        finals.append(after)
    joined = tuple(torch.cat(each) for each in zip(*finals, strict=True))
    y = x.transpose(0, 1) if module.batch_first else x
    return y, joined if kind == "lstm" else joined[0]


def _weights_of(module: nn.RNNBase, layer: int, suffix: str) -> list[Tensor]:
    w_i, w_h = (getattr(module, f"weight_{part}_l{layer}{suffix}") for part in ("ih", "hh"))
    if not module.bias:
        nothing = w_i.new_zeros(w_i.shape[0])
        return [w_i, w_h, nothing, nothing]
    return [w_i, w_h, *(getattr(module, f"bias_{part}_l{layer}{suffix}") for part in ("ih", "hh"))]
