"""RNN, GRU and LSTM as language model and as sequence classifier.

Language model:  p(token t+1 | tokens ≤ t) = softmax(W h_t + b), h_t the top layer after token t. With `tied` W is the embedding
itself (Press and Wolf, "Using the output embedding to improve language models", 2017).
Classifier:  W [h_forward after the last token; h_backward after the first] + b, of the top layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.errors import OptionError
from runtime.signature import TensorSpec

from .architecture import Architecture, DataFacts
from .layers.reading import choose
from .layers.recurrent import Recurrent, State, lengths_of


class TiedOutput(nn.Module):
    """Logits by the embedding's own weights E: E P h + b, without P where the widths are equal.

    E is passed in, not kept, so that it is stored once.
    """

    def __init__(self, *, hidden: int, embedding: int, vocabulary: int) -> None:
        super().__init__()
        self.projection = nn.Identity() if hidden == embedding else nn.Linear(hidden, embedding, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        return functional.linear(self.projection(h), embedding, self.bias)  # (…, vocabulary)


class RecurrentLanguageModel(nn.Module):
    state_batch_axis = Recurrent.state_batch_axis

    def __init__(
        self, *, kind: str, vocabulary: int, embedding: int, hidden: int, layers: int, dropout: float, tied: bool
    ) -> None:
        super().__init__()
        self.tied = tied
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.dropout = nn.Dropout(dropout)
        self.recurrent = Recurrent(kind=kind, input_size=embedding, hidden=hidden, layers=layers, dropout=dropout)
        if tied:
            self.output: nn.Module = TiedOutput(hidden=hidden, embedding=embedding, vocabulary=vocabulary)
            nn.init.normal_(self.embedding.weight, std=embedding**-0.5)  # logits of unit size, not of size √embedding
        else:
            self.output = nn.Linear(hidden, vocabulary)

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.recurrent.state_names

    def initial_state(self, batch: int) -> State:
        return self.recurrent.initial_state(batch)

    def forward(self, tokens: Tensor, *state: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
        """tokens (batch, time) → logits (batch, time, vocabulary) and the new state. Without a state, from the first token.

        With `lengths` (batch,), 1 or more, rows are right-padded and the state is the one after their last real token.
        """
        embedded = self.dropout(self.embedding(tokens))  # (batch, time, embedding)
        h, state = self.recurrent(embedded, state or self.initial_state(tokens.shape[0]), lengths)  # (batch, time, hidden)
        h = choose(self.dropout(h))
        logits = self.output(h, self.embedding.weight) if self.tied else self.output(h)
        return logits, *state


class RecurrentClassifier(nn.Module):
    def __init__(
        self,
        *,
        kind: str,
        vocabulary: int,
        embedding: int,
        hidden: int,
        layers: int,
        dropout: float,
        bidirectional: bool,
        classes: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.dropout = nn.Dropout(dropout)
        self.recurrent = Recurrent(
            kind=kind, input_size=embedding, hidden=hidden, layers=layers, dropout=dropout, bidirectional=bidirectional
        )
        self.output = nn.Linear(self.recurrent.output_size, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (batch, time), right-padded → logits (batch, classes)"""
        embedded = self.dropout(self.embedding(tokens))  # (batch, time, embedding)
        state = self.recurrent.initial_state(tokens.shape[0])
        _, (h, *_) = self.recurrent(embedded, state, lengths_of(tokens))
        return self.output(self.dropout(top_state(h, self.recurrent.directions)))  # (batch, classes)


def top_state(h: Tensor, directions: int) -> Tensor:
    """h (layers·directions, batch, hidden) → the top layer's directions side by side, (batch, directions·hidden)"""
    return h[-directions:].transpose(0, 1).flatten(1)


def check_recurrent_config(config: Any, *, kinds: tuple[str, ...]) -> None:
    """Refuse what no recurrent network can have; for `__post_init__` of its configuration."""
    if config.kind not in kinds:
        raise OptionError(f"kind is {config.kind!r}, expected one of: {', '.join(kinds)}")
    if config.vocabulary < 5:
        raise OptionError(f"vocabulary is {config.vocabulary}, expected at least 5: the four special tokens and one more")
    sizes = {name: getattr(config, name) for name in ("embedding", "hidden", "layers")}
    if min(sizes.values()) < 1:
        listed = ", ".join(f"{name} {value}" for name, value in sizes.items())
        raise OptionError(f"sizes must be 1 or more: {listed}")
    if not 0 <= config.dropout < 1:
        raise OptionError(f"dropout is {config.dropout}, expected 0 or more and below 1")


@dataclass(frozen=True)
class RecurrentConfig:
    task: str = "language-model"  # or "classification"
    kind: str = "lstm"  # "rnn", "gru" or "lstm"
    vocabulary: int = 100
    embedding: int = 128
    hidden: int = 256
    layers: int = 1
    dropout: float = 0.2
    bidirectional: bool = False  # classification only
    classes: int = 2  # classification only
    tied: bool = False  # language model only: the embedding is also the output layer

    def __post_init__(self) -> None:
        check_recurrent_config(self, kinds=("rnn", "gru", "lstm"))
        if self.task not in ("language-model", "classification"):
            raise OptionError(f"task is {self.task!r}, but recurrent networks do: language-model, classification")
        if self.task == "language-model" and self.bidirectional:
            raise OptionError(
                "a language model cannot be bidirectional: it would see the tokens it predicts; unset bidirectional"
            )
        if self.task == "classification" and self.classes < 2:
            raise OptionError(f"classes is {self.classes}, expected 2 or more")
        if self.task == "classification" and self.tied:
            raise OptionError("tied joins a language model's output to its embedding; a classifier has none: unset tied")


def build(config: RecurrentConfig) -> nn.Module:
    shared = {name: getattr(config, name) for name in ("kind", "vocabulary", "embedding", "hidden", "layers", "dropout")}
    if config.task == "language-model":
        return RecurrentLanguageModel(**shared, tied=config.tied)
    return RecurrentClassifier(**shared, bidirectional=config.bidirectional, classes=config.classes)


def adapt(config: RecurrentConfig, data: DataFacts) -> RecurrentConfig:
    classes = data.outputs if data.task == "classification" else config.classes
    return replace(config, task=data.task, vocabulary=data.vocabulary, classes=classes)


def _architecture(kind: str, description: str) -> Architecture:
    return Architecture(
        name=kind,
        description=description,
        tasks=("language-model", "classification"),
        config=RecurrentConfig(kind=kind),
        build=build,
        inputs=lambda config: (TensorSpec("tokens", "int64", ("batch", "time")),),
        adapt=adapt,
        takes=("tokens",),
        head=("output",),
    )


RNN = _architecture("rnn", "Elman's RNN, for language or classes")
GRU = _architecture("gru", "GRU, for language or classes")
LSTM = _architecture("lstm", "LSTM, for language or classes")
