"""Linear regression, y = Wx + b, and softmax regression, whose y are logits: p = softmax(Wx + b)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor, nn

from runtime.errors import OptionError
from runtime.signature import TensorSpec

from .architecture import Architecture


class Affine(nn.Module):
    """Wx + b over the flattened input."""

    def __init__(self, *, features: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))  # (batch, outputs)


@dataclass(frozen=True)
class LinearConfig:
    input_shape: tuple[int, ...] = (10,)
    outputs: int = 1

    def __post_init__(self) -> None:
        if min(self.input_shape, default=0) < 1 or self.outputs < 1:
            raise OptionError(f"input_shape {self.input_shape} and outputs {self.outputs} must be 1 or more")


@dataclass(frozen=True)
class SoftmaxConfig:
    input_shape: tuple[int, ...] = (1, 8, 8)
    classes: int = 10

    def __post_init__(self) -> None:
        if min(self.input_shape, default=0) < 1 or self.classes < 2:
            raise OptionError(f"input_shape {self.input_shape} must be 1 or more and classes {self.classes} 2 or more")


LINEAR = Architecture(
    name="linear",
    description="linear regression",
    tasks=("regression",),
    config=LinearConfig(),
    build=lambda config: Affine(features=math.prod(config.input_shape), outputs=config.outputs),
    inputs=lambda config: (TensorSpec("features", "float32", ("batch", *config.input_shape)),),
    adapt=lambda config, data: replace(config, input_shape=data.shape, outputs=data.outputs),
    takes=("image", "columns"),
    head=("linear",),
)

SOFTMAX = Architecture(
    name="softmax",
    description="softmax regression",
    tasks=("classification",),
    config=SoftmaxConfig(),
    build=lambda config: Affine(features=math.prod(config.input_shape), outputs=config.classes),
    inputs=lambda config: (TensorSpec("features", "float32", ("batch", *config.input_shape)),),
    adapt=lambda config, data: replace(config, input_shape=data.shape, classes=data.outputs),
    takes=("image", "columns"),
    head=("linear",),
)
