"""Recurrent encoder–decoders: one sequence in, another one out.

Seq2Seq (Cho et al., "Learning phrase representations using RNN encoder–decoder", 2014; Sutskever, Vinyals and Le, "Sequence to
sequence learning with neural networks", 2014). The decoder starts from the encoder's last state, and the encoder's last top
state, the context, is part of each of its inputs:

    s_t = cell([E y_{t-1}; context], s_{t-1}),   logits_t = W s_t + b

AttentionSeq2Seq (Bahdanau, Cho and Bengio, "Neural machine translation by jointly learning to align and translate", 2015). The
context is made anew at each step, from all encoder outputs m_j:

    e_tj = vᵀ tanh(W s_{t-1} + U m_j),   a_t = softmax(e_t) over real source positions,   context_t = Σ_j a_tj m_j
    s_t = cell([E y_{t-1}; context_t], s_{t-1})
    logits_t = W_o maxout(R [s_t; context_t; E y_{t-1}] + b_R) + b_o,   maxout: the larger of each pair of units

The context is only ever multiplied, by parts C of the cell's and of R's weights, and C Σ_j a_tj m_j = Σ_j a_tj (C m_j): so
C m_j is what attention sums up, computed once for a source. At the default sizes a step then takes a third of the products.

With several layers s_{t-1} in e_tj and s_t in the logits are the top layer's. Two differences from the paper: the logits see
s_t where the paper has s_{t-1}, and the first state is made of both directions' last states, not of the backward one alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.errors import OptionError
from runtime.signature import TensorSpec

from .architecture import Architecture, DataFacts
from .layers.attention import AdditiveAttention
from .layers.reading import choose
from .layers.recurrent import CELLS, STEPS, Recurrent, State, lengths_of, real_positions, state_parts
from .recurrent import check_recurrent_config, top_state


@dataclass(frozen=True)
class Seq2SeqConfig:
    kind: str = "gru"  # or "lstm"
    vocabulary: int = 100
    target_vocabulary: int = 100
    embedding: int = 128
    hidden: int = 256
    layers: int = 1
    dropout: float = 0.2
    bidirectional: bool = False  # the encoder

    def __post_init__(self) -> None:
        check_recurrent_config(self, kinds=("gru", "lstm"))
        if self.target_vocabulary < 5:
            raise OptionError(
                f"target_vocabulary is {self.target_vocabulary}, expected at least 5: the four special tokens and one more"
            )


class Encoder(nn.Module):
    """Embedding and recurrent layers; its last state is brought to the decoder's shape."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.embedding)
        self.dropout = nn.Dropout(config.dropout)
        self.recurrent = Recurrent(
            kind=config.kind,
            input_size=config.embedding,
            hidden=config.hidden,
            layers=config.layers,
            dropout=config.dropout,
            bidirectional=config.bidirectional,
        )
        bridges = state_parts(config.kind) if config.bidirectional else 0
        self.bridges = nn.ModuleList(Bridge(layers=config.layers, hidden=config.hidden) for _ in range(bridges))

    def forward(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, State]:
        """source (batch, source) → outputs (batch, source, width), top state (batch, width), and the decoder's first state"""
        embedded = self.dropout(self.embedding(source))  # (batch, source, embedding)
        outputs, state = self.recurrent(embedded, self.recurrent.initial_state(source.shape[0]), lengths)
        top = top_state(state[0], self.recurrent.directions)
        if self.bridges:
            state = tuple(bridge(part) for bridge, part in zip(self.bridges, state, strict=True))
        return outputs, top, state


class Bridge(nn.Module):
    """tanh(W s + b): from the states of all layers and both directions to one state a layer."""

    def __init__(self, *, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = layers
        self.linear = nn.Linear(2 * layers * hidden, layers * hidden)

    def forward(self, state: Tensor) -> Tensor:
        joined = state.transpose(0, 1).flatten(1)  # (batch, 2·layers·hidden)
        return torch.tanh(self.linear(joined)).unflatten(1, (self.layers, -1)).transpose(0, 1)  # (layers, batch, hidden)


class Seq2Seq(nn.Module):
    """memory = (context (batch, width),); state = (h,) or (h, c), each (layers, batch, hidden)."""

    memory_names = ("context",)
    state_batch_axis = Recurrent.state_batch_axis

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.embedding = nn.Embedding(config.target_vocabulary, config.embedding)
        self.dropout = nn.Dropout(config.dropout)
        self.decoder = Recurrent(
            kind=config.kind,
            input_size=config.embedding + self.encoder.recurrent.output_size,
            hidden=config.hidden,
            layers=config.layers,
            dropout=config.dropout,
        )
        self.output = nn.Linear(config.hidden, config.target_vocabulary)

    def encode(self, source: Tensor) -> tuple[State, State]:
        _, context, state = self.encoder(source, lengths_of(source))
        return (context,), state

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.decoder.state_names

    def decode(self, tokens: Tensor, memory: State, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """tokens (batch, time) → logits (batch, time, target_vocabulary) and the state after the last token"""
        (context,) = memory
        embedded = self.dropout(self.embedding(tokens))  # (batch, time, embedding)
        repeated = context.unsqueeze(1).expand(-1, tokens.shape[1], -1)  # (batch, time, width)
        h, state = self.decoder(torch.cat([embedded, repeated], dim=-1), state, lengths)  # (batch, time, hidden)
        return self.output(choose(self.dropout(h))), state

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        logits, _ = self.decode(tokens, *self.encode(source))
        return logits


class AttentionDecoder(nn.Module):
    """Recurrent cells that look at the memory before each step."""

    def __init__(self, config: Seq2SeqConfig, *, memory_width: int) -> None:
        super().__init__()
        hidden = config.hidden
        self.step = STEPS[config.kind]
        self.attention = AdditiveAttention(query_width=hidden, key_width=memory_width, hidden=hidden)
        self.dropout = nn.Dropout(config.dropout)
        inputs = [config.embedding + memory_width] + [hidden] * (config.layers - 1)
        self.cells = nn.ModuleList(CELLS[config.kind](size, hidden) for size in inputs)

    def forward(self, inputs: Tensor, memory: State, state: State) -> tuple[Tensor, Tensor, State]:
        """inputs (batch, time, given) → top states (batch, time, hidden), what is given to the readout (batch, time, 2·maxout),
        and the new state. `inputs` are what embeddings give to the first cell's gates and, behind that, to the readout; so are
        the memory's values (batch, source, given).
        """
        keys, values, mask = memory
        first, *above = self.cells
        gates = len(first.weight_hh)  # type: ignore[arg-type]
        widths = [gates, inputs.shape[2] - gates]
        states = list(zip(*(part.unbind(0) for part in state), strict=True))  # one (h,) or (h, c) a layer
        tops, readouts = [], []
        for of_embedding in inputs.unbind(1):  # which, unlike indexing in the loop, puts the gradient together once
            of_context, _ = self.attention(states[-1][0], keys, values, mask)  # (batch, given)
            to_gates, to_readout = (of_embedding + of_context).split(widths, dim=-1)
            states[0] = self._advance(first, to_gates, states[0])
            for layer, cell in enumerate(above, start=1):
                below = functional.linear(self.dropout(states[layer - 1][0]), cell.weight_ih, cell.bias_ih)  # type: ignore
                states[layer] = self._advance(cell, below, states[layer])
            tops.append(states[-1][0])
            readouts.append(to_readout)
        after = tuple(torch.stack(parts) for parts in zip(*states, strict=True))
        return torch.stack(tops, dim=1), torch.stack(readouts, dim=1), after

    def _advance(self, cell: nn.Module, gates: Tensor, state: State) -> State:
        return self.step(gates, state, cell.weight_hh, cell.bias_hh)  # type: ignore[arg-type]


class AttentionSeq2Seq(nn.Module):
    """memory = (projected keys, projected values, source mask), batch first; state = (h,) or (h, c), (layers, batch, hidden).

    A forward hook on `decoder.attention` sees the weights (batch, source) of each step.
    """

    memory_names = ("key", "value", "mask")
    state_batch_axis = Recurrent.state_batch_axis

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        width = self.encoder.recurrent.output_size
        self.embedding = nn.Embedding(config.target_vocabulary, config.embedding)
        self.dropout = nn.Dropout(config.dropout)
        self.decoder = AttentionDecoder(config, memory_width=width)
        maxout = (config.hidden + 1) // 2  # half of the hidden size, as in the paper
        self.readout = nn.Linear(config.hidden + width + config.embedding, 2 * maxout)
        self.output = nn.Linear(maxout, config.target_vocabulary)

    def encode(self, source: Tensor) -> tuple[State, State]:
        lengths = lengths_of(source)
        outputs, _, state = self.encoder(source, lengths)
        outputs = self.dropout(outputs)
        keys = self.decoder.attention.project_keys(outputs)  # (batch, source, hidden)
        _, of_context = self._given()
        values = functional.linear(outputs, of_context)  # (batch, source, given)
        return (keys, values, real_positions(source.shape[1], lengths)), state

    def _given(self) -> tuple[Tensor, Tensor]:
        """Weights by which an embedding and a context give to the gates of the first cell and, behind these, to the readout."""
        embedding, hidden = self.embedding.embedding_dim, self.decoder.attention.query.in_features
        to_gates: Tensor = self.decoder.cells[0].weight_ih  # type: ignore[assignment]  # of [embedding; context]
        to_readout = self.readout.weight  # of [state; context; embedding]
        return (
            torch.cat([to_gates[:, :embedding], to_readout[:, -embedding:]]),
            torch.cat([to_gates[:, embedding:], to_readout[:, hidden:-embedding]]),
        )

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.encoder.recurrent.state_names

    def decode(self, tokens: Tensor, memory: State, state: State) -> tuple[Tensor, State]:
        """tokens (batch, time) → logits (batch, time, target_vocabulary) and the state after the last token"""
        embedded = self.dropout(self.embedding(tokens))  # (batch, time, embedding)
        of_embedding, _ = self._given()
        biases = torch.cat([self.decoder.cells[0].bias_ih, self.readout.bias])  # type: ignore[list-item]
        h, given, state = self.decoder(functional.linear(embedded, of_embedding, biases), memory, state)
        of_state = functional.linear(h, self.readout.weight[:, : h.shape[-1]])
        pairs = (given + of_state).unflatten(-1, (-1, 2))  # (batch, time, maxout, 2)
        return self.output(self.dropout(pairs.amax(dim=-1))), state

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        logits, _ = self.decode(tokens, *self.encode(source))
        return logits


def _architecture(name: str, description: str, network: Callable[..., nn.Module], config: Seq2SeqConfig) -> Architecture:
    return Architecture(
        name=name,
        description=description,
        tasks=("seq2seq",),
        config=config,
        build=network,
        inputs=lambda config: (
            TensorSpec("source", "int64", ("batch", "source")),
            TensorSpec("tokens", "int64", ("batch", "time")),
        ),
        adapt=fit_to_pairs,
        takes=("tokens",),
        head=("output",),
    )


def fit_to_pairs(config: Seq2SeqConfig, data: DataFacts) -> Seq2SeqConfig:
    return replace(config, vocabulary=data.vocabulary, target_vocabulary=data.target_vocabulary)


SEQ2SEQ = _architecture("seq2seq", "recurrent encoder–decoder", Seq2Seq, Seq2SeqConfig())
SEQ2SEQ_ATTENTION = _architecture(
    "seq2seq-attention",
    "encoder–decoder, Bahdanau attention",
    AttentionSeq2Seq,
    Seq2SeqConfig(bidirectional=True),
)
