"""VGG (Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", 2015).

Stages of 3x3 convolutions with ReLU, each stage ended by 2x2 max pooling that halves the side, then two hidden layers with
dropout. With `batch_norm`, a batch normalisation sits between each convolution and its ReLU. The names and shapes of the
weights are torchvision's. Weights begin as He et al. propose: the paper's N(0, 0.01) starves layers narrower than its 4096.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from runtime.errors import OptionError

from .images import check_image_config, check_sizes, image_classifier, initialize_for_relu


@dataclass(frozen=True)
class VGGConfig:
    in_channels: int = 3
    image_size: int = 224
    classes: int = 1000
    dropout: float = 0.5
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)  # channels of each stage
    depths: tuple[int, ...] = (1, 1, 2, 2, 2)  # convolutions in each stage
    batch_norm: bool = False
    pooled: int = 7  # side to which the last feature maps are averaged
    hidden: int = 4096

    def __post_init__(self) -> None:
        check_sizes(self, "widths", "depths", "pooled", "hidden")
        if len(self.widths) != len(self.depths):
            raise OptionError(f"widths {self.widths} and depths {self.depths} must have as many numbers, one a stage")
        check_image_config(self, network="VGG", smallest=2 ** len(self.widths))


class VGG(nn.Module):
    def __init__(self, config: VGGConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = config.in_channels
        for width, depth in zip(config.widths, config.depths, strict=True):
            for _ in range(depth):
                layers.append(nn.Conv2d(before, width, kernel_size=3, padding=1))
                layers += [nn.BatchNorm2d(width)] if config.batch_norm else []
                layers.append(nn.ReLU())
                before = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(config.pooled)
        self.classifier = nn.Sequential(
            nn.Linear(before * config.pooled**2, config.hidden),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.classes),
        )
        initialize_for_relu(self.features)
        for layer in self.classifier:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.avgpool(self.features(pixels))  # (batch, channels, pooled, pooled)
        return self.classifier(x.flatten(1))  # (batch, classes)


_DEPTHS = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}  # columns A, B, D, E of the paper
_PLAIN = {f"vgg{layers}": VGGConfig(depths=depths) for layers, depths in _DEPTHS.items()}
_NORMED = {f"{name}-bn": replace(config, batch_norm=True) for name, config in _PLAIN.items()}
_SMALL = VGGConfig(
    in_channels=1,
    image_size=32,
    classes=10,
    dropout=0.2,
    widths=(32, 64, 128),
    depths=(2, 2, 2),
    batch_norm=True,
    pooled=1,
    hidden=128,
)

VGGS = tuple(
    image_classifier(name=name, description=description, config=config, build=VGG, head="classifier.6")
    for name, config, description in (
        *((name, config, f"VGG-{name[3:]}, 224x224 images") for name, config in _PLAIN.items()),
        *((name, config, f"VGG-{name[3:5]}, batch norm, 224x224 images") for name, config in _NORMED.items()),
        ("vgg-small", _SMALL, "VGG's pattern, 32x32 or 28x28"),
    )
)
