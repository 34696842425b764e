"""Network in network (Lin, Chen and Yan, "Network in network", 2013).

Each block is a convolution followed by two 1x1 convolutions, all with ReLU: a small perceptron that slides over the image.
The last block has one feature map a class, and the mean of that map is the class's logit, so there are no linear layers.
The ImageNet form takes AlexNet's windows: 11x11 with 96, 5x5 with 256 and 3x3 with 384 channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .images import (
    OVERLAPPING_POOL,
    ConvolutionTable,
    check_image_config,
    image_classifier,
    initialize_for_relu,
    smallest_image,
)


@dataclass(frozen=True)
class NiNConfig:
    in_channels: int = 3
    image_size: int = 224
    classes: int = 1000
    dropout: float = 0.5
    convolutions: ConvolutionTable = (  # channels, kernel, stride, padding, 1 if max pooling follows the block
        (96, 11, 4, 0, 1),
        (256, 5, 1, 2, 1),
        (384, 3, 1, 1, 1),
    )

    def __post_init__(self) -> None:
        check_image_config(self, network="NiN", smallest=smallest_image(self.convolutions))


def perceptron_convolution(*, before: int, channels: int, kernel: int, stride: int, padding: int) -> nn.Sequential:
    """relu(W3 relu(W2 relu(W1 * x))): W1 sees a window, W2 and W3 see one pixel of all channels."""
    return nn.Sequential(
        nn.Conv2d(before, channels, kernel, stride=stride, padding=padding),
        nn.ReLU(),
        nn.Conv2d(channels, channels, kernel_size=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, kernel_size=1),
        nn.ReLU(),
    )


class NiN(nn.Module):
    def __init__(self, config: NiNConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = config.in_channels
        for channels, kernel, stride, padding, pool in config.convolutions:
            layers.append(
                perceptron_convolution(before=before, channels=channels, kernel=kernel, stride=stride, padding=padding)
            )
            layers += [nn.MaxPool2d(*OVERLAPPING_POOL)] if pool else []
            before = channels
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = perceptron_convolution(before=before, channels=config.classes, kernel=3, stride=1, padding=1)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        initialize_for_relu(self)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.dropout(self.features(pixels))  # (batch, channels, side, side)
        return self.avgpool(self.classifier(x)).flatten(1)  # (batch, classes)


_SMALL = NiNConfig(
    in_channels=1,
    image_size=32,
    classes=10,
    dropout=0.2,
    convolutions=((32, 5, 2, 2, 1), (48, 5, 1, 2, 1), (64, 3, 1, 1, 0)),
)

NINS = (
    image_classifier(
        name="nin", description="network in network, 224x224 images", config=NiNConfig(), build=NiN, head="classifier"
    ),
    image_classifier(
        name="nin-small",
        description="network in network, 32x32 or 28x28",
        config=_SMALL,
        build=NiN,
        head="classifier",
    ),
)
