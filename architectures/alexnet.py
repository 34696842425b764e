"""AlexNet (Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014).

Five convolutions with ReLU, three of them followed by overlapping 3x3 max pooling, then two hidden layers with dropout.
This is the single-column form of the network of Krizhevsky, Sutskever and Hinton (2012), without its local response
normalisation; the names and shapes of its weights are torchvision's. Weights begin as PyTorch's layers do by default.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .images import OVERLAPPING_POOL, ConvolutionTable, check_image_config, check_sizes, image_classifier, smallest_image


@dataclass(frozen=True)
class AlexNetConfig:
    in_channels: int = 3
    image_size: int = 224
    classes: int = 1000
    dropout: float = 0.5
    convolutions: ConvolutionTable = (  # channels, kernel, stride, padding, 1 if max pooling follows
        (64, 11, 4, 2, 1),
        (192, 5, 1, 2, 1),
        (384, 3, 1, 1, 0),
        (256, 3, 1, 1, 0),
        (256, 3, 1, 1, 1),
    )
    pooled: int = 6  # side to which the last feature maps are averaged
    hidden: int = 4096

    def __post_init__(self) -> None:
        check_sizes(self, "pooled", "hidden")
        check_image_config(self, network="AlexNet", smallest=smallest_image(self.convolutions))


class AlexNet(nn.Module):
    def __init__(self, config: AlexNetConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = config.in_channels
        for channels, kernel, stride, padding, pool in config.convolutions:
            layers += [nn.Conv2d(before, channels, kernel, stride=stride, padding=padding), nn.ReLU()]
            layers += [nn.MaxPool2d(*OVERLAPPING_POOL)] if pool else []
            before = channels
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(config.pooled)
        self.classifier = nn.Sequential(
            nn.Dropout(config.dropout),
            nn.Linear(before * config.pooled**2, config.hidden),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(),
            nn.Linear(config.hidden, config.classes),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.avgpool(self.features(pixels))  # (batch, channels, pooled, pooled)
        return self.classifier(x.flatten(1))  # (batch, classes)


_SMALL = AlexNetConfig(
    in_channels=1,
    image_size=32,
    classes=10,
    dropout=0.2,
    convolutions=((16, 5, 1, 0, 1), (24, 5, 1, 2, 1), (64, 3, 1, 1, 0), (48, 3, 1, 1, 0), (48, 3, 1, 1, 1)),
    pooled=2,
    hidden=128,
)

ALEXNETS = (
    image_classifier(
        name="alexnet", description="AlexNet, 224x224 images", config=AlexNetConfig(), build=AlexNet, head="classifier.6"
    ),
    image_classifier(
        name="alexnet-small",
        description="AlexNet's pattern, 32x32 or 28x28",
        config=_SMALL,
        build=AlexNet,
        head="classifier.6",
    ),
)
