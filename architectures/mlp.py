"""Multi-layer perceptron: flatten, then (linear, ReLU, dropout) for each hidden size, then linear."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor, nn

from runtime.errors import OptionError
from runtime.signature import TensorSpec

from .architecture import Architecture


class MLP(nn.Module):
    def __init__(self, *, features: int, hidden: tuple[int, ...], outputs: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise((features, *hidden)):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear((features, *hidden)[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.layers(x.flatten(1)))  # (batch, outputs)


@dataclass(frozen=True)
class MLPConfig:
    input_shape: tuple[int, ...] = (1, 8, 8)
    hidden: tuple[int, ...] = (256, 128)
    outputs: int = 10
    dropout: float = 0.2

    def __post_init__(self) -> None:
        if min((*self.input_shape, *self.hidden), default=0) < 1 or self.outputs < 1:
            raise OptionError(
                f"sizes must be 1 or more: input_shape {self.input_shape}, hidden {self.hidden}, outputs {self.outputs}"
            )
        if not 0 <= self.dropout < 1:
            raise OptionError(f"dropout is {self.dropout}, expected 0 or more and below 1")


MLP_ARCHITECTURE = Architecture(
    name="mlp",
    description="multi-layer perceptron",
    tasks=("classification", "regression"),
    config=MLPConfig(),
    build=lambda config: MLP(
        features=math.prod(config.input_shape), hidden=config.hidden, outputs=config.outputs, dropout=config.dropout
    ),
    inputs=lambda config: (TensorSpec("features", "float32", ("batch", *config.input_shape)),),
    adapt=lambda config, data: replace(config, input_shape=data.shape, outputs=data.outputs),
    takes=("image", "columns"),
    head=("output",),
)
