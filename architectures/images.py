"""What the image classifiers share: the tensor they take, how they are fitted to data, and how their weights begin.

Their configurations have `in_channels`, `image_size` (the side of a square) and `classes`, and may have `dropout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from runtime.errors import OptionError
from runtime.signature import TensorSpec

from .architecture import Architecture, DataFacts


def image_classifier(*, name: str, description: str, config: Any, build: Callable[[Any], nn.Module], head: str) -> Architecture:
    """A row of the catalogue for a network that takes images and gives one logit a class. `head` is its last layer."""
    return Architecture(
        name=name,
        description=description,
        tasks=("classification",),
        config=config,
        build=build,
        inputs=lambda config: (image_spec(config),),
        adapt=fit_image_classifier,
        head=(head,),
    )


def image_spec(config: Any) -> TensorSpec:
    return TensorSpec("pixels", "float32", ("batch", config.in_channels, config.image_size, config.image_size))


def fit_image_classifier(config: Any, data: DataFacts) -> Any:
    """As many channels and classes as the data has. The network keeps its image size: raw images are resized in the graph."""
    return replace(config, in_channels=data.shape[0], classes=data.outputs)


def check_image_config(config: Any, *, network: str, smallest: int, largest: int = 1024) -> None:
    """Refuse sizes that the network cannot have; for `__post_init__` of its configuration."""
    if not smallest <= config.image_size <= largest:
        raise OptionError(
            f"image_size is {config.image_size}, but {network} needs at least {smallest} pixels, and {largest} at most"
        )
    if config.in_channels < 1 or config.classes < 2:
        raise OptionError(f"in_channels {config.in_channels} must be 1 or more and classes {config.classes} 2 or more")
    if not 0 <= getattr(config, "dropout", 0.0) < 1:
        raise OptionError(f"dropout is {config.dropout}, expected 0 or more and below 1")


def check_sizes(config: Any, *names: str) -> None:
    """Refuse a field, or a table of any depth, that is empty or holds a number below 1."""
    for name in names:
        sizes = list(_numbers(getattr(config, name)))
        if min(sizes, default=0) < 1:
            raise OptionError(f"{name} is {getattr(config, name)}, expected numbers of 1 or more")


def _numbers(table: Any) -> Iterable[int]:
    if isinstance(table, int):
        yield table
    else:
        for entry in table:
            yield from _numbers(entry)


ConvolutionTable = tuple[tuple[int, ...], ...]  # rows: channels, kernel, stride, padding, 1 if OVERLAPPING_POOL follows
OVERLAPPING_POOL = (3, 2, 0)  # kernel, stride and padding of AlexNet's and NiN's max pooling


def smallest_image(convolutions: ConvolutionTable) -> int:
    """The smallest side of which the convolutions and poolings leave one pixel."""
    if not convolutions:
        raise OptionError("convolutions is empty, expected rows of channels, kernel, stride, padding, 0 or 1 (pool)")
    side = 1
    for row in reversed(convolutions):
        if len(row) != 5 or min(row[:3]) < 1 or row[3] < 0 or row[4] not in (0, 1):
            raise OptionError(f"convolution {row} is not understood; expected channels, kernel, stride, padding, 0 or 1 (pool)")
        _, *window, pool = row
        for kernel, stride, padding in ([OVERLAPPING_POOL] if pool else []) + [window]:
            side = max(1, (side - 1) * stride + kernel - 2 * padding)
    return side


def initialize_for_relu(module: nn.Module, *, fan: Literal["fan_in", "fan_out"] = "fan_out") -> None:
    """Convolutions from N(0, 2 / fan), which keeps the variance of a signal through ReLU; biases zero.

    The fan is the kernel's area times its input or output channels (He, Zhang, Ren and Sun, "Delving deep into rectifiers",
    2015). Batch norms begin as the identity, as PyTorch makes them; linear layers are left alone.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode=fan, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
