"""Users' networks with torch.nn's recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tagger(nn.Module):
    """A score for every step of a sequence."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.score = nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(x)
        return self.score(y)


class Stepper(nn.Module):
    """With a state that comes in and goes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 5, num_layers=2)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.layer(x, (h, c))
        return y, h, c


def _tagger(layer: nn.RNNBase) -> tuple[nn.Module, Tensor, dict[str, object]]:
    torch.manual_seed(0)
    batch, time = (0, 1) if layer.batch_first else (1, 0)
    axes = {"x": {batch: "batch", time: "time"}}
    return Tagger(layer), torch.randn(3, 6, 4), {"dynamic_axes": axes}


def rnn() -> object:
    return _tagger(nn.RNN(4, 5, batch_first=True))


def relu() -> object:
    return _tagger(nn.RNN(4, 5, num_layers=2, nonlinearity="relu"))


def gru() -> object:
    return _tagger(nn.GRU(4, 5, num_layers=2, bidirectional=True, batch_first=True))


def lstm() -> object:
    return _tagger(nn.LSTM(4, 5, bidirectional=True, bias=False))


def stepper() -> object:
    torch.manual_seed(0)
    axes = {"x": {0: "time", 1: "batch"}, "h": {1: "batch"}, "c": {1: "batch"}}
    return Stepper(), (torch.randn(6, 3, 4), torch.randn(2, 3, 5), torch.randn(2, 3, 5)), {"dynamic_axes": axes}
