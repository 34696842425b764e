"""A network that takes raw pixels or raw columns: normalisation, resizing and the target's scale are part of the graph.

x' = resize((x - mean) / deviation), and for regression y = y' * target_deviation + target_mean. The statistics come from the
training data. Being inside the graph they cannot be forgotten, or done differently, on the device.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.errors import OptionError
from runtime.signature import TensorSpec

from .architecture import Architecture


@dataclass(frozen=True)
class Preprocessing:
    """What a raw input is, and the statistics of the training data."""

    kind: str  # "image" or "columns"
    shape: tuple[int, ...]  # of one raw sample: (channels, height, width) or (columns,)
    mean: tuple[float, ...]  # one a channel, or one a column
    deviation: tuple[float, ...]
    columns: tuple[str, ...] | None = None
    maximum: float = 255.0  # image: the largest raw pixel value, so that an image file can be brought to the same scale
    target_mean: float = 0.0
    target_deviation: float = 1.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Preprocessing:
        lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list | tuple)}
        return cls(**(data | lists))


class RawInputNetwork(nn.Module):
    """`network` behind the arithmetic of `preprocessing`. `size` is the image side the network wants, if it wants one."""

    mean: Tensor
    scale: Tensor

    def __init__(self, network: nn.Module, preprocessing: Preprocessing, size: int | None) -> None:
        super().__init__()
        trailing = (1,) * (len(preprocessing.shape) - 1)
        self.register_buffer("mean", torch.tensor(preprocessing.mean).reshape(-1, *trailing))
        self.register_buffer("scale", 1 / torch.tensor(preprocessing.deviation).reshape(-1, *trailing))
        self.factors = _resize_factors(preprocessing.shape, size)
        self.target_mean = preprocessing.target_mean
        self.target_deviation = preprocessing.target_deviation
        self.network = network

    def remember(self, raw: Tensor, targets: Tensor) -> None:
        """Show the training data to a network that keeps some of it."""
        remember = getattr(self.network, "remember", None)
        if remember is not None:
            remember((raw - self.mean) * self.scale, (targets - self.target_mean) / self.target_deviation)

    def forward(self, raw: Tensor) -> Tensor:
        x = (raw - self.mean) * self.scale
        if self.factors is not None:
            x = functional.interpolate(x, scale_factor=self.factors, mode="bilinear", align_corners=False)
        y = self.network(x)
        if (self.target_mean, self.target_deviation) != (0.0, 1.0):
            y = y * self.target_deviation + self.target_mean
        return y


def _resize_factors(shape: tuple[int, ...], size: int | None) -> tuple[float, float] | None:
    """Constant factors rather than a size: the exporter turns a size into Shape and Concat nodes on every run."""
    if size is None or shape[1:] == (size, size):
        return None
    height, width = shape[1:]
    factors = (size / height, size / width)
    if any(math.floor(side * factor) != size for side, factor in zip((height, width), factors, strict=True)):
        factors = tuple(math.nextafter(factor, math.inf) for factor in factors)  # type: ignore[assignment]
    return factors


def build_network(
    architecture: Architecture, config: Any, preprocessing: Preprocessing | None
) -> tuple[nn.Module, tuple[TensorSpec, ...]]:
    """The network to train or export, and the tensors it takes."""
    network, wanted = architecture.build(config), architecture.inputs(config)
    if preprocessing is None:
        return network, wanted
    sample = wanted[0].shape[1:]
    size = None
    if preprocessing.kind == "image" and len(sample) == 3 and preprocessing.shape != sample:
        if preprocessing.shape[0] != sample[0]:
            raise OptionError(f"{architecture.name} takes {sample[0]} channels but the images have {preprocessing.shape[0]}")
        size = int(sample[1])
    name = "pixels" if preprocessing.kind == "image" else "features"
    raw = TensorSpec(name, "float32", ("batch", *preprocessing.shape))
    return RawInputNetwork(network, preprocessing, size), (raw,)
