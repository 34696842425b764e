"""LeNet-5 (LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document recognition", 1998).

Two convolutions of 6 and 16 channels with 5x5 kernels, each followed by tanh and 2x2 average pooling, then 120, 84 and
`classes` units. Input is 32x32, as in the paper. The paper's trainable pooling and RBF output are, as is usual, plain average
pooling and a linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .architecture import Architecture
from .images import check_image_config, fit_image_classifier, image_spec


class LeNet(nn.Module):
    def __init__(self, *, in_channels: int, image_size: int, classes: int) -> None:
        super().__init__()
        side = _side_after_convolutions(image_size)
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 6, kernel_size=5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.Tanh(),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * side * side, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.features(pixels)  # (batch, 16, side, side)
        return self.classifier(x.flatten(1))  # (batch, classes)


def _side_after_convolutions(image_size: int) -> int:
    return ((image_size - 4) // 2 - 4) // 2


@dataclass(frozen=True)
class LeNetConfig:
    in_channels: int = 1
    image_size: int = 32
    classes: int = 10

    def __post_init__(self) -> None:
        check_image_config(self, network="LeNet-5", smallest=16)


LENET = Architecture(
    name="lenet",
    description="LeNet-5 for 32x32 images",
    tasks=("classification",),
    config=LeNetConfig(),
    build=lambda config: LeNet(in_channels=config.in_channels, image_size=config.image_size, classes=config.classes),
    inputs=lambda config: (image_spec(config),),
    adapt=fit_image_classifier,
    head=("classifier.4",),
)
