"""Nadaraya–Watson kernel regression (Nadaraya, 1964; Watson, 1964), which is attention with one parameter a column.

    ŷ(x) = Σᵢ softmaxᵢ(−½ Σⱼ (wⱼ (xⱼ − kᵢⱼ))²) vᵢ

The keys k and values v are rows of the training data, kept as they are; the inverse bandwidths w are learned. A training row
that is itself a key would be predicted by looking itself up, and w would grow without end; so in training a key equal to the
query is hidden (leave one out).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from runtime.errors import OptionError
from runtime.signature import TensorSpec

from .architecture import Architecture, DataFacts
from .layers.attention import masked_softmax


class KernelRegression(nn.Module):
    keys: Tensor
    values: Tensor

    def __init__(self, *, features: int, outputs: int, keys: int) -> None:
        super().__init__()
        self.inverse_bandwidth = nn.Parameter(torch.ones(features))
        self.register_buffer("keys", torch.zeros(keys, features))
        self.register_buffer("values", torch.zeros(keys, outputs))

    @torch.no_grad()
    def remember(self, inputs: Tensor, targets: Tensor) -> None:
        """Keep rows at even distances in the training data, from the first to the last, as keys and values."""
        if len(inputs) < len(self.keys):
            raise OptionError(
                f"kernel-regression keeps {len(self.keys)} rows but there are {len(inputs)}; set network.keys={len(inputs)}"
            )
        rows = torch.linspace(0, len(inputs) - 1, len(self.keys), dtype=torch.float64).round().long()
        self.keys.copy_(inputs[rows].flatten(1))
        self.values.copy_(targets[rows].reshape(self.values.shape))

    def forward(self, x: Tensor) -> Tensor:
        difference = x.flatten(1).unsqueeze(1) - self.keys  # (batch, keys, features)
        scores = -0.5 * (self.inverse_bandwidth * difference).square().sum(dim=-1)  # (batch, keys)
        differs = (difference != 0).any(dim=-1)
        weights = masked_softmax(scores, differs if self.training else torch.ones_like(differs))
        return weights @ self.values  # (batch, outputs)


@dataclass(frozen=True)
class KernelRegressionConfig:
    input_shape: tuple[int, ...] = (10,)
    outputs: int = 1
    keys: int = 64  # rows of the training data that are kept; 0: all

    def __post_init__(self) -> None:
        if min(self.input_shape, default=0) < 1 or self.outputs < 1 or self.keys < 0:
            raise OptionError(
                f"sizes must be 1 or more, and keys 1 or more or 0 for all rows: input_shape {self.input_shape}, "
                f"outputs {self.outputs}, keys {self.keys}"
            )


def _adapt(config: KernelRegressionConfig, data: DataFacts) -> KernelRegressionConfig:
    keys = min(config.keys or data.rows, data.rows) if data.rows else config.keys
    return replace(config, input_shape=data.shape, outputs=data.outputs, keys=keys)


KERNEL_REGRESSION = Architecture(
    name="kernel-regression",
    description="Nadaraya–Watson kernel regression",
    tasks=("regression",),
    config=KernelRegressionConfig(),
    build=lambda config: KernelRegression(features=math.prod(config.input_shape), outputs=config.outputs, keys=config.keys),
    inputs=lambda config: (TensorSpec("features", "float32", ("batch", *config.input_shape)),),
    adapt=_adapt,
    takes=("columns",),
)
