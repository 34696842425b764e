"""Recurrent cells and stacks of them: Elman's RNN, the GRU (Cho et al. 2014) and the LSTM (Hochreiter and Schmidhuber 1997).

The step functions are the equations, in `torch.nn`'s conventions, for networks that must stop between two steps (attention).
`Recurrent` runs whole sequences in torch's kernels. Both read the same weights: W_i (gates·hidden, input), W_h (gates·hidden,
hidden) and their biases. σ is the logistic function, ⊙ the product of elements.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from .swappable import swappable

State = tuple[Tensor, ...]
"""(h,), and for an LSTM (h, c)."""

PAD = 0


def rnn_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor) -> State:
    """h' = tanh(W_i x + b_i + W_h h + b_h)

    `gates` is W_i x + b_i, (batch, hidden), which callers can compute for all steps at once; `weight` is W_h and `bias` b_h.
    """
    (h,) = state
    return (torch.tanh(gates + functional.linear(h, weight, bias)),)


def gru_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor) -> State:
    """One step of a GRU; `gates` is W_i x + b_i, (batch, 3·hidden), in the order r, z, n.

    r = σ(W_ir x + b_ir + W_hr h + b_hr)             reset
    z = σ(W_iz x + b_iz + W_hz h + b_hz)             update
    n = tanh(W_in x + b_in + r ⊙ (W_hn h + b_hn))    candidate
    h' = (1 − z) ⊙ n + z ⊙ h
    """
    (h,) = state
    width = h.shape[-1]
    (early, late), (early_h, late_h) = (
        both.split([2 * width, width], dim=-1) for both in (gates, functional.linear(h, weight, bias))
    )
    r, z = torch.sigmoid(early + early_h).chunk(2, dim=-1)
    n = torch.tanh(late + r * late_h)
    return (n + z * (h - n),)


def lstm_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor) -> State:
    """One step of an LSTM; `gates` is W_i x + b_i, (batch, 4·hidden), in the order i, f, g, o.

    i = σ(W_ii x + b_ii + W_hi h + b_hi)       input
    f = σ(W_if x + b_if + W_hf h + b_hf)       forget
    g = tanh(W_ig x + b_ig + W_hg h + b_hg)    candidate
    o = σ(W_io x + b_io + W_ho h + b_ho)       output
    c' = f ⊙ c + i ⊙ g
    h' = o ⊙ tanh(c')
    """
    h, c = state
    i, f, g, o = (gates + functional.linear(h, weight, bias)).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


STEPS: dict[str, Callable[[Tensor, State, Tensor, Tensor], State]] = {"rnn": rnn_step, "gru": gru_step, "lstm": lstm_step}
LAYERS: dict[str, type[nn.RNN] | type[nn.GRU] | type[nn.LSTM]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
CELLS: dict[str, type[nn.RNNCell] | type[nn.GRUCell] | type[nn.LSTMCell]] = {
    "rnn": nn.RNNCell,
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
}


def state_parts(kind: str) -> int:
    """How many tensors the state has: h, and for an LSTM also c."""
    return 2 if kind == "lstm" else 1


def lengths_of(tokens: Tensor) -> Tensor:
    """Real tokens in each right-padded row, (batch,); a row of nothing but padding counts as one token long."""
    return (tokens != PAD).sum(dim=1).clamp(min=1)


def real_positions(steps: int, lengths: Tensor) -> Tensor:
    """(batch, steps), true at real tokens."""
    return torch.arange(steps, device=lengths.device) < lengths.unsqueeze(1)


def reverse(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x (batch, time, width) with each row reversed within its length; padding stays at the end. Its own inverse."""
    if lengths is None:
        return x.flip(1)
    steps = torch.arange(x.shape[1], device=x.device)
    last = lengths.unsqueeze(1) - 1
    index = torch.where(steps <= last, last - steps, steps)  # (batch, time)
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))


class Recurrent(nn.Module):
    """`layers` recurrent layers, one after the other, with dropout between them.

    The state is h (layers·directions, batch, hidden), and for an LSTM also c, in the order of `torch.nn`: the first layer's
    forward and backward direction, then the next layer's.
    """

    state_batch_axis = 1

    def __init__(
        self, *, kind: str, input_size: int, hidden: int, layers: int = 1, dropout: float = 0.0, bidirectional: bool = False
    ) -> None:
        super().__init__()
        self.kind, self.hidden, self.directions = kind, hidden, 1 + bidirectional
        self.output_size = hidden * self.directions
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                LAYERS[kind](input_size if layer == 0 else self.output_size, hidden, batch_first=True)
                for _ in range(self.directions)
            )
            for layer in range(layers)
        )

    def each_layer(self) -> list[list[nn.RNNBase]]:
        """The directions of every layer, the forward one first."""
        return [list(layer) for layer in self.layers]  # type: ignore[call-overload]

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("hidden", "cell")[: state_parts(self.kind)]

    def initial_state(self, batch: int) -> State:
        """Zeros, on the device and in the precision of the weights."""
        like = next(self.parameters())
        shape = (len(self.layers) * self.directions, batch, self.hidden)
        return tuple(like.new_zeros(shape) for _ in range(state_parts(self.kind)))

    def forward(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """x (batch, time, input) → outputs (batch, time, hidden·directions), and the state after the last step.

        With `lengths` (batch,) rows are right-padded: the state returned is the one after the last real step of each row, and
        the backward direction starts there. Outputs at padding are zero.
        """
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            # In bfloat16 a training step of a GRU encoder–decoder took 16 times as long, and an LSTM with lengths did not run
            # (torch 2.13, a CPU without bfloat16 instructions).
            precision = next(self.parameters()).dtype
            with torch.autocast("cpu", enabled=False):
                return recur(self, x.to(precision), tuple(part.to(precision) for part in state), lengths)
        return recur(self, x, state, lengths)


@swappable
def recur(stack: Recurrent, x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
    """All layers over the whole of x; see `Recurrent.forward`."""
    finals: list[State] = []
    for number, layer in enumerate(stack.each_layer()):
        if number > 0:
            x = stack.dropout(x)
        outputs = []
        for direction, of_direction in enumerate(layer):
            before = tuple(part[len(finals)].unsqueeze(0) for part in state)  # (1, batch, hidden) each
            if direction == 0:
                output, after = _run(of_direction, x, before, lengths)
            else:
                output, after = _run(of_direction, reverse(x, lengths), before, lengths)
                output = reverse(output, lengths)
            outputs.append(output)
            finals.append(after)
        x = torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
    if lengths is not None:
        x = x * real_positions(x.shape[1], lengths).unsqueeze(-1)
    return x, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))


def _run(layer: nn.RNNBase, x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
    """One layer in one direction over the whole of x, and its state after the last real step."""
    if isinstance(layer, nn.LSTM):
        if lengths is None:
            output, (h, c) = layer(x, state)
            return output, (h, c)
        output, c = _lstm_that_stops_at_padding(layer, x, state, lengths)
        return output, (_at(output, lengths - 1), c)
    output, h = layer(x, state[0])
    return output, (h if lengths is None else _at(output, lengths - 1),)


def _at(output: Tensor, steps: Tensor) -> Tensor:
    """output (batch, time, hidden) at one step of each row, as a state (1, batch, hidden)."""
    return output.gather(1, steps.view(-1, 1, 1).expand(-1, 1, output.shape[2])).transpose(0, 1)


# σ(±CLOSED) is exactly 0 or 1, with a gradient of exactly 0, as long as the rest of the gate's sum stays far below it.
CLOSED = 1e4


def _lstm_that_stops_at_padding(layer: nn.LSTM, x: Tensor, state: State, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and c after the last real step (torch returns c only after the last of all steps).

    One more input is 1 at padding, and its weights shut the input gate and open the forget gate, so c' = 1 ⊙ c + 0 ⊙ g = c from
    there on. A packed sequence gives the same at the same speed, but cannot be exported.
    """
    w_i, w_h, b_i, b_h = layer.parameters()
    padding = (~real_positions(x.shape[1], lengths)).to(x.dtype).unsqueeze(-1)  # (batch, time, 1)
    column = w_i.new_tensor([-CLOSED, CLOSED, 0.0, 0.0]).repeat_interleave(layer.hidden_size).unsqueeze(1)  # (4·hidden, 1)
    weights = [torch.cat([w_i, column], dim=1), w_h, b_i, b_h]
    output, _, c = torch.lstm(torch.cat([x, padding], dim=-1), state, weights, True, 1, 0.0, layer.training, False, True)
    return output, c
